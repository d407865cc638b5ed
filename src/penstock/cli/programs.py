"""``penstock schedules``, ``simulate`` and ``check``: one schedule or one program."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import settings as given
from penstock.cli.output import (
    figures_json,
    figures_text,
    over_limit,
    peaks_text,
    print_table,
    stdout,
    table,
    warn,
)
from penstock.cli.settings import Settings
from penstock.cli.sources import complete, is_file, load, load_program
from penstock.errors import ScheduleError
from penstock.schedule.check import Channels
from penstock.schedule.check import check as check_program
from penstock.schedule.family import Family
from penstock.schedule.messages import number_of, numbers_of
from penstock.schedule.passes import lower
from penstock.schedule.program import Program
from penstock.schedule.registry import family
from penstock.schedule.registry import schedules as families
from penstock.schedule.rules import COMPUTE
from penstock.simulate.simulation import Simulation
from penstock.trace import Trace

__all__ = ["check", "schedules", "simulate"]


def schedules(
    name: Annotated[
        str | None, typer.Argument(help="The schedule to describe.", show_default=False)
    ] = None,
    *,
    names: Annotated[bool, typer.Option("--names", help="List the names alone.")] = False,
) -> None:
    """List all schedules: how stages lie on ranks, their options and sources.

    With a NAME: describe one schedule, with its timeline.
    """
    console = stdout()
    if name is not None:
        each = family(name)
        console.print(each.doc or each.summary, markup=False, highlight=False, soft_wrap=True)
        return
    if names:
        for each in families():
            console.print(each.name, markup=False)
        return
    shown = table("schedule", "stages, ranks P, microbatches M", "what it is")
    for each in families():
        summary = f"{each.summary} [dim]{each.source}[/]"
        shown.add_row(f"[bold]{each.name}[/]", _rules(each), summary)
    print_table(shown, console)


def _rules(each: Family) -> str:
    where = "rank" if each.num_directions == 1 else "rank and direction"
    rules = [f"{each.arrangement.value}, {each.virtuals_text} per {where}"]
    if each.rule:
        rules.append(each.rule)
    if each.options:
        rules.append(", ".join(f"{name}=" for name in each.options))
    return "; ".join(rules)


def simulate(
    schedule: Annotated[
        str,
        typer.Argument(
            help="A schedule's name, or a program's file (*.csv, *.json).", autocompletion=complete
        ),
    ],
    *,
    ranks: given.Ranks = None,
    microbatches: given.Microbatches = None,
    virtual: given.Virtual = None,
    option: given.Option = None,
    memory: given.Memory = None,
    forward: given.Forward = "1",
    input_grad: given.InputGrad = "1",
    weight_grad: given.WeightGrad = "1",
    latency: given.Latency = "0",
    overlap: given.OverlapTime = None,
    cost: given.OtherCosts = None,
    jitter: given.Jitter = 0.0,
    jitter_seed: given.JitterSeed = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures alone, as JSON.")] = False,
) -> None:
    """Simulate a step: its timeline in colour, its bubble, its peak memory."""
    settings = Settings(
        ranks=ranks, microbatches=microbatches, virtual=virtual, option=option, memory=memory,
        forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency,
        overlap=overlap, cost=cost, jitter=jitter, jitter_seed=jitter_seed,
    )  # fmt: skip
    result = settings.simulate(load_program(schedule, settings))
    if json:
        stdout().print(figures_json(result), markup=False, soft_wrap=True)
    else:
        _print_timeline(result)
    # Peaks are in activations unless the costs give the size of an activation.
    over = over_limit(result.peak_bytes, settings.memory)
    if over is not None:
        warn(over)


def _print_timeline(result: Simulation) -> None:
    from penstock.view.terminal import legend, timeline

    program, console = result.program, stdout()
    coloured = console.color_system is not None
    shaded = console.color_system in ("256", "truecolor")
    chunks = f" of {program.num_splits} chunks" if program.num_splits > 1 else ""
    sizes = numbers_of(
        rank=program.num_ranks,
        stage=program.num_stages,
        microbatch=program.num_whole_microbatches,
    )
    console.print(f"[bold]{program.name}[/], {sizes}{chunks}\n")
    drawn = timeline(result.trace, width=console.width, colour=coloured, shaded=shaded)
    console.print(drawn, end="")
    if coloured:
        console.print(legend(result.trace, shaded=shaded))
    console.print(f"\n{figures_text(result)}", soft_wrap=True)
    console.print(peaks_text(result), soft_wrap=True)


def check(
    file: Annotated[str, typer.Argument(help="A program as CSV, in torch's form, or as JSON.")],
    *,
    per_pair: Annotated[
        bool,
        typer.Option(
            "--per-pair", help="One channel per pair of ranks, as NCCL has, instead of two."
        ),
    ] = False,
) -> None:
    """Prove that a program is valid; else list its problems, with exit code 1."""
    if not is_file(file):
        raise ScheduleError(
            f"{file!r} is no file; check takes a program as *.csv or *.json, and any other with "
            f"its folder, as ./{file}"
        )
    model = Channels(per_pair=per_pair)
    program = load(file, Settings())
    if isinstance(program, Trace):
        raise ScheduleError(f"{file}: a trace of what ran; check takes a program")
    console = stdout()
    try:
        checked = check_program(program, model)
        if not program.has_transfers:
            # Check the program that runs: the one with its transfers inserted.
            check_program(lower(checked, channels=model), model)
    except ScheduleError as error:
        console.print(f"[bold red]wrong[/] {_summary(program)}", soft_wrap=True)
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(f"[bold green]ok[/] {_summary(program)}", soft_wrap=True)


def _summary(program: Program) -> str:
    actions = list(program.actions())
    computes = sum(act.op in COMPUTE for act in actions)
    transfers = "with its transfers" if program.has_transfers else "transfers to be inserted"
    sizes = numbers_of(
        rank=program.num_ranks,
        stage=program.num_stages,
        microbatch=program.num_microbatches,
        action=len(actions),
    )
    return f"{program.name}: {sizes} ({number_of(computes, 'computation')}), {transfers}"
