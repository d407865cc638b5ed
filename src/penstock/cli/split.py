"""``penstock split``: measure a model, cut it into balanced stages, show them, write the plan.

model ──measured──► costs per block ──layout or balance──► counts ──► plan, table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.models import ModelRequest, load_model, user_error
from penstock.cli.output import print_table, progress_bar, stdout, table
from penstock.cli.values import bytes_text, parse_bytes, percent, seconds_text
from penstock.errors import PartitionError, PenstockError
from penstock.partition.balance.balance import SplitObjective, Terms, balanced
from penstock.partition.balance.costs import Profile, repeat_layers
from penstock.partition.balance.for_program import balance_for
from penstock.partition.balance.layout import Layout
from penstock.partition.plan import Plan, rules_refused, toml_path
from penstock.schedule.messages import numbers_of
from penstock.schedule.program import Program
from penstock.schedule.resolve import choose_program
from penstock.simulate.memory import StageMemory, peaks

__all__ = ["split"]

NUMBERS = ("stage", "rank", "parameters", "time", "share", "activations", "holds", "sends")


def split(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function, which returns (model, example); or a configuration of "
            "transformers (llama, LlamaConfig, LlamaForCausalLM), with random weights."
        ),
    ],
    *,
    stages: Annotated[int | None, typer.Option("--stages", "-s", help="How many stages.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan: *.toml.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value for the configuration; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows of a microbatch.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    device: Annotated[str, typer.Option(help="Where to measure.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="The model's dtype.")] = "float32",
    max_size: Annotated[str, typer.Option(help="The most that parameters may take.")] = "4GB",
    sample: Annotated[
        int | None,
        typer.Option(help="Make and measure so many layers; the others cost the same."),
    ] = None,
    runs: Annotated[int, typer.Option(help="Measure so often; the median counts.")] = 5,
    costs: Annotated[
        Path | None,
        typer.Option(help="Read costs from this file where it is; else measure, and write it."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Cut as Megatron's layout says: 'Et*3|(tt|)*29,m|L'.")
    ] = None,
    rule: Annotated[str | None, typer.Option(help="Not supported.", hidden=True)] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Balance for this schedule's ranks, which may hold several stages."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-r", help="On how many ranks --schedule runs.")
    ] = None,
    objective: Annotated[
        SplitObjective,
        typer.Option(help="The slowest stage or rank (max), or a step's length (step)."),
    ] = SplitObjective.BOTTLENECK,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Microbatches per step.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="The most that a rank may hold, such as 16GB.")
    ] = None,
    state_factor: Annotated[
        float, typer.Option(help="Held per byte of parameters: 4 with gradients and Adam.")
    ] = 4.0,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes per second between stages, such as 10GB.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds that each transfer takes besides.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Measure a model, cut it into balanced stages, and show what each holds and sends."""
    if rule is not None:
        raise rules_refused(rule)
    wanted = None if layout is None else Layout.parse(layout)
    num_stages = _stages_of(stages, wanted)
    if wanted is not None and (
        memory_limit or bandwidth or objective is not SplitObjective.BOTTLENECK
    ):
        raise PartitionError(
            "--memory-limit, --bandwidth and --objective are for balancing; leave them out with "
            "--layout"
        )
    if ranks is not None and schedule is None:
        raise PartitionError("--ranks says on how many ranks a --schedule runs; name one")
    if output is not None:
        toml_path(output)
    program = None
    if schedule is not None:
        program = choose_program(
            schedule,
            num_stages=stages,
            n_microbatches=microbatches,
            ranks=ranks,
            virtual=None,
            world=None,
        )
    terms = Terms(
        num_stages=num_stages,
        placement=None if program is None else program.placement,
        in_flight=None if program is None else _peak_in_flight(program),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        state_factor=state_factor,
        bandwidth=None if bandwidth is None else parse_bytes(bandwidth),
        latency_s=latency,
        objective=objective,
        microbatches=microbatches,
    )
    request = ModelRequest(
        name=model,
        settings=tuple(settings or ()),
        batch=batch,
        length=length,
        device=device,
        dtype=dtype,
        max_bytes=parse_bytes(max_size),
        sample=sample,
    )
    measured = _measured_costs(request, costs, runs)
    counts, made = _counts(measured, terms, program, wanted)
    made = f"{made}; measured on {measured.machine}, with {measured.example}"
    plan = measured.plan(counts, made=made)
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    _show(plan, measured, Layout.of(measured.blocks, counts), terms)
    if output is not None:
        stdout().print(f"wrote {output}", markup=False, soft_wrap=True)


# --- where to cut -------------------------------------------------------------------------------


def _stages_of(stages: int | None, layout: Layout | None) -> int:
    if layout is None and stages is None:
        raise PartitionError("say how many stages: --stages 4, or a --layout that has them")
    if layout is None:
        assert stages is not None
        return stages
    if stages not in (None, len(layout.stages)):
        raise PartitionError(
            f"--stages {stages}, but the layout has {len(layout.stages)}; leave --stages out"
        )
    return len(layout.stages)


def _counts(
    measured: Profile, terms: Terms, program: Program | None, layout: Layout | None
) -> tuple[Sequence[int], str]:
    """The number of blocks per stage, and the method that found it."""
    if layout is not None:
        return layout.counts(measured.blocks), f"layout {layout}"
    is_step = terms.objective is SplitObjective.STEP
    free = terms.memory_limit is None and terms.bandwidth is None and not terms.latency_s
    if program is not None and free and not is_step:
        found = balance_for(measured, program)  # only the blocks' times count
    else:
        found = balanced(measured, terms)
    aim = "the slowest stage" if program is None else program.name
    if is_step:
        aim = "a step's length"
    return found.counts, f"balanced for {aim}"


def _peak_in_flight(program: Program) -> list[int]:
    """The peak number of microbatches in flight on each of the model's stages.

    Example:
        >>> from penstock.schedule.registry import build
        >>> _peak_in_flight(build("1f1b", ranks=3, microbatches=8))
        [3, 2, 1]
    """
    placement, found = program.placement, [0] * program.placement.num_model_stages
    nothing = (0.0,) * placement.num_stages
    for stage in range(placement.num_stages):
        one = tuple(float(each == stage) for each in range(placement.num_stages))
        memory = StageMemory(activation=one, weight_grad=one, recompute=nothing, running=one)
        index = placement.model_stage(stage)
        found[index] = max(found[index], int(max(peaks(program, memory))))
    return found


def _measured_costs(request: ModelRequest, file: Path | None, runs: int) -> Profile:
    """The model's costs: from the file if it exists, else measured and saved to the file."""
    if file is not None and file.exists():
        return Profile.load(file)
    from penstock.partition.profile import profile

    loaded = load_model(request)
    try:
        with _progress() as progress:
            measured = profile(loaded.model, loaded.example, runs=runs, progress=progress)
    except PenstockError:
        raise
    except Exception as error:  # whatever the user's model raises
        raise user_error(f"{request.name}: its model, run on its example,", error) from error
    if loaded.trunks:
        measured = repeat_layers(measured, loaded.trunks)
    if file is not None:
        measured.save(file)
    return measured


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A transient progress bar on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    measuring, what = TextColumn("measuring"), TextColumn("{task.description}")
    with progress_bar(measuring, BarColumn(), MofNCompleteColumn(), what) as shown:
        task = shown.add_task("")
        yield lambda done, total, what: shown.update(
            task, completed=done, total=total, description=what
        )


# --- the table ----------------------------------------------------------------------------------


def _show(plan: Plan, measured: Profile, layout: Layout, terms: Terms) -> None:
    rows = [_row(plan, terms, stage) for stage in range(plan.num_stages)]
    title = f"{plan.model}: {numbers_of(block=len(measured.blocks), stage=plan.num_stages)}"
    shown = table(*rows[0], numbers=NUMBERS, title=title)
    for row in rows:
        shown.add_row(*row.values())
    console = stdout()
    print_table(shown, console)
    console.print(_slowest(plan, terms), soft_wrap=True)
    console.print(f"layout {layout}", markup=False, soft_wrap=True)
    console.print(plan.made, markup=False, soft_wrap=True, style="dim")


def _row(plan: Plan, terms: Terms, stage: int) -> dict[str, str]:
    """The table row of a stage, by column."""
    costs, placement = plan.costs[stage], terms.placement
    row = {"stage": f"[bold]{stage}[/]"}
    if placement is not None:
        places = range(stage, placement.num_stages, placement.num_model_stages)
        row["rank"] = ", ".join(str(placement.rank_of(each)) for each in places)
    row |= {
        "modules": "\n".join(_ranges(plan.stages[stage])),
        "parameters": f"{costs.parameters:,}",
        "time": seconds_text(costs.time_s),
        "share": percent(costs.time_s / sum(each.time_s for each in plan.costs)),
        "activations": bytes_text(costs.activation_bytes),
    }
    if terms.memory_limit is not None:
        row["holds"] = bytes_text(terms.held_bytes(costs, terms.flights[stage]))
    row["sends"] = bytes_text(costs.sent_bytes) if costs.sends else ""
    times = Counter(costs.sends)
    row["across"] = "\n".join(f"{n} × {each}" if n > 1 else each for each, n in times.items())
    return row


def _slowest(plan: Plan, terms: Terms) -> str:
    """The slowest stage or rank, compared with the mean."""
    what, times = "stage", [costs.time_s for costs in plan.costs]
    placement = terms.placement
    if placement is not None:
        what, by_stage = "rank", times
        directions = placement.num_stages // placement.num_model_stages
        times = [
            sum(by_stage[placement.model_stage(stage)] for stage in placement.stages_of(rank))
            / directions
            for rank in range(placement.num_ranks)
        ]
    mean_s = sum(times) / len(times)
    return (
        f"slowest {what} [bold]{seconds_text(max(times))}[/] per microbatch, forward and backward; "
        f"{percent(max(times) / mean_s - 1)} above the mean of all {what}s"
    )


def _ranges(names: Sequence[str]) -> list[str]:
    """Names, with numbered runs shortened to ranges.

    Example:
        >>> _ranges(["wte", "h.0", "h.1", "h.2", "ln"])
        ['wte', 'h.0-2', 'ln']
    """
    runs: list[list[str]] = []
    for name in names:
        prefix, dot, number = name.rpartition(".")
        before = f"{prefix}{dot}{int(number) - 1}" if number.isdecimal() else ""
        if runs and runs[-1][-1] == before:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}" for run in runs]
