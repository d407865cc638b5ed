"""``penstock schedules``, ``simulate``, ``compare`` and ``check``: schedules and programs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import typer

from penstock.cli import output as out
from penstock.cli.settings import (
    Settings,
    is_file,
    load,
    load_program,
    message_of,
    option,
    with_options,
)
from penstock.errors import ScheduleError
from penstock.schedule.check import check as check_program
from penstock.schedule.passes import lower
from penstock.schedule.program import Program, sizes_text
from penstock.schedule.registry import family
from penstock.schedule.registry import schedules as families
from penstock.schedule.rules import COMPUTE
from penstock.schedule.wording import number_of, numbers_of
from penstock.simulate.costs import Costs, costs_divisor, per_stage_costs
from penstock.simulate.simulation import Simulation
from penstock.simulate.simulation import simulate as simulate_program
from penstock.trace import Trace
from penstock.view.palette import SAME_MODEL, SAME_STAGES, amount

__all__ = ["check", "compare", "schedules", "simulate"]

_SCHEDULES = (
    "Names, each with options of its own if need be, as in interleaved-1f1b:virtual=4; or files "
    "with programs."
)
_PER = (
    "Whether costs and --memory are those of a rank's part of the model, of which a stage of V per "
    "rank takes and holds 1/V, or those of each stage."
)
# Below this width the table of ``compare`` has options below the schedule's name, and the fullest
# rank's peak.
_NARROW = 100


def schedules(
    name: Annotated[
        str | None, typer.Argument(help="The schedule to describe.", show_default=False)
    ] = None,
    *,
    names: Annotated[bool, option("List the names alone.", "--names")] = False,
) -> None:
    """List all schedules: how stages lie on ranks, their options and sources.

    With a NAME: describe one schedule, with its timeline.
    """
    if name is not None:
        each = family(name)
        typer.echo(each.doc or each.summary)
        return
    if names:
        typer.echo("\n".join(each.name for each in families()))
        return
    shown = out.table("schedule", "stages, ranks P, microbatches M", "what it is")
    for each in families():
        where = "rank" if each.num_directions == 1 else "rank and direction"
        placed = f"{each.arrangement.value}, {each.virtuals_text} per {where}"
        rules = filter(None, (placed, each.rule, ", ".join(f"{name}=" for name in each.options)))
        summary = f"{each.summary} [dim]{each.source}[/]"
        shown.add_row(f"[bold]{each.name}[/]", "; ".join(rules), summary)
    out.print_table(shown)


@with_options
def simulate(
    schedule: Annotated[
        str, typer.Argument(help="A schedule's name, or a program's file (*.csv).")
    ],
    *,
    settings: Settings,
    json: Annotated[bool, option("Print the figures alone, as JSON.", "--json")] = False,
) -> None:
    """Simulate a step: its timeline, its bubble, its peak memory."""
    result = simulate_program(load_program(schedule, settings), settings.costs())
    if json:
        typer.echo(out.figures_json(result))
    else:
        _print_timeline(result)
    # Peaks are in activations unless the costs give the size of an activation.
    out.warn(out.over_limit(result.peak_bytes, settings.memory))


def _print_timeline(result: Simulation) -> None:
    from penstock.view.terminal import timeline

    program, console = result.program, out.console()
    chunks = f" of {program.num_splits} chunks" if program.num_splits > 1 else ""
    console.print(f"[bold]{program.name}[/], {sizes_text(program)}{chunks}\n")
    drawn = timeline(result.trace, width=console.width)
    if console.color_system not in ("256", "truecolor"):
        # The nearest of 16 colours would hide some of the text.
        drawn.spans.clear()
    console.print(drawn, end="")
    console.print(f"\n{out.figures_text(result)}", soft_wrap=True)
    console.print(out.peaks_text(result), soft_wrap=True)


@partial(with_options, omit=("virtual", "option"))
def compare(
    schedules: Annotated[list[str], typer.Argument(help=_SCHEDULES, metavar="SCHEDULE...")],
    *,
    settings: Settings,
    per: Annotated[Literal["rank", "stage"], option(_PER)] = "rank",
) -> None:
    """Compare schedules of one model: time, bubble and memory side by side.

    Schedules over --memory are marked; one that can't be built is listed with the reason.
    """
    costs, per_rank = settings.costs(), per == "rank"
    if not [family(each.partition(":")[0]) for each in schedules if not is_file(each)]:
        settings.refuse_for(" ".join(schedules))
    narrow = out.console().width < _NARROW
    peak = "highest peak" if narrow else "peak per rank"
    times = ("stages per rank", "makespan", "bubble", "span", "span bubble")
    numbers = (*times, "highest peak", "messages")
    shown = out.table("schedule", *times, peak, "messages", numbers=numbers)
    failed: dict[str, ScheduleError] = {}
    faults = []
    for name in schedules:
        try:
            result, share, fault = _simulated(name, settings, costs, per_rank)
        except ScheduleError as error:
            failed[name] = error
            continue
        label = name if ":" in name else result.program.name
        held = tuple(peak / share for peak in result.peak_in_flight)
        peaks = amount(max(held)) if narrow else out.per_rank(held, most=16)
        if fault is not None:
            peaks = f"[yellow]{peaks} over[/]"
            faults.append(f"{label}: {fault}")
        virtual = result.program.num_stages / result.program.num_ranks
        shown.add_row(
            out.plain(label.replace(":", "\n :", 1) if narrow else label),
            amount(virtual), amount(result.makespan),
            f"{result.bubble_ratio:.2%}", amount(result.span),
            f"{result.span_bubble_ratio:.2%}", peaks, str(result.messages),
        )  # fmt: skip
    if not shown.row_count:
        raise next(iter(failed.values()))
    out.console().print(SAME_MODEL if per_rank else SAME_STAGES)
    out.print_table(shown)
    for name, refusal in failed.items():
        reason = " ".join(message_of(refusal).split()).replace(f"{name}: ", "", 1)
        out.console().print(f" {out.plain(name)}   {out.plain(reason)}", soft_wrap=True)
    for fault in faults:
        out.warn(fault)


def _simulated(
    name: str, settings: Settings, costs: Costs, per_rank: bool
) -> tuple[Simulation, float, str | None]:
    """The simulated step, the stages of a rank's part, and the ranks over the memory limit."""
    if is_file(name):  # it has no use for the sizes, but a schedule beside it may have
        settings = replace(settings, ranks=None, microbatches=None)
    program = load_program(name, settings, per_rank=per_rank)
    share = costs_divisor(program) if per_rank else 1.0
    costs = per_stage_costs(costs, share)
    result = simulate_program(program, costs)
    # Bytes are already per stage; counted activations are the smaller ones of a stage.
    unit = share if costs.activation_bytes is None else 1
    peaks = [peak / unit for peak in result.peak_bytes]
    return result, share, out.over_limit(peaks, settings.memory)


def check(file: Annotated[str, typer.Argument(help="A program as CSV, in torch's form.")]) -> None:
    """Prove that a program is valid; else list its problems, with exit code 1."""
    if not is_file(file):
        raise ScheduleError(
            f"{file!r} is no file; check takes a program as *.csv, and any other with its "
            f"folder, as ./{file}"
        )
    console = out.console()
    program = load(file, Settings())
    if isinstance(program, Trace):
        raise ScheduleError(f"{file}: a trace of what ran; check takes a program")
    try:
        checked = check_program(program)
        if not program.has_transfers:
            # Check the program that runs: the one with its transfers inserted.
            check_program(lower(checked))
    except ScheduleError as error:
        console.print(f"[bold red]wrong[/] {_summary(program)}", soft_wrap=True)
        typer.echo(str(error))
        raise typer.Exit(1) from error
    console.print(f"[bold green]ok[/] {_summary(program)}", soft_wrap=True)


def _summary(program: Program) -> str:
    actions = list(program.actions())
    computes = number_of(sum(act.op in COMPUTE for act in actions), "computation")
    transfers = "with its transfers" if program.has_transfers else "transfers to be inserted"
    sizes = numbers_of(
        rank=program.num_ranks, stage=program.num_stages, microbatch=program.num_microbatches,
        action=len(actions),
    )  # fmt: skip
    return f"{program.name}: {sizes} ({computes}), {transfers}"
