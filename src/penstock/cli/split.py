"""``penstock split``: measure a model, cut it into balanced stages, show them, write the plan.

model ──measured──► costs per block ──balance──► counts ──► plan, table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output as out
from penstock.cli.models import ModelRequest, load_model, parse_bytes
from penstock.cli.settings import option, with_options
from penstock.errors import PartitionError
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.plan import Plan, runs_of_names, split_by_counts, toml_path
from penstock.schedule.program import Program
from penstock.schedule.registry import choose_program
from penstock.schedule.wording import numbers_of
from penstock.simulate.memory import StageMemory, peaks

if TYPE_CHECKING:
    from penstock.partition.balance.balance import BalanceConfig

__all__ = ["split"]

_bytes = partial(option, parser=parse_bytes, metavar="BYTES")
_NUMBERS = ("stage", "rank", "parameters", "time", "share", "activations", "holds", "sends")


@with_options
def split(
    *,
    stages: Annotated[int, option("How many stages.", "--stages", "-s")],
    output: Annotated[Path | None, option("Write the plan: *.toml.", "--output", "-o")] = None,
    request: ModelRequest,
    runs: Annotated[int, option("Measure so often; the median counts.")] = 5,
    schedule: Annotated[str | None, option("Balance for the ranks of this schedule.")] = None,
    ranks: Annotated[
        int | None, option("On how many ranks --schedule runs.", "--ranks", "-r")
    ] = None,
    microbatches: Annotated[
        int | None, option("Microbatches per step.", "--microbatches", "-m")
    ] = None,
    memory_limit: Annotated[float | None, _bytes("The most that a rank may hold, as 16GB.")] = None,
    state_factor: Annotated[
        float, option("Held per byte of parameters: 4 with gradients and Adam.")
    ] = 4.0,
    bandwidth: Annotated[float | None, _bytes("Bytes per second between stages, as 10GB.")] = None,
    latency: Annotated[float, option("Seconds that each transfer takes besides.")] = 0.0,
    as_json: Annotated[bool, option("Print the plan as JSON.", "--json")] = False,
) -> None:
    """Measure a model, cut it into balanced stages, and show what each holds and sends."""
    # These import NumPy, which no other command needs.
    from penstock.partition.balance.balance import BalanceConfig, balanced, split_costs
    from penstock.partition.balance.for_program import balance_for

    if ranks is not None and schedule is None:
        raise PartitionError("--ranks says on how many ranks a --schedule runs; name one")
    if output is not None:
        toml_path(output)
    program = None
    if schedule is not None:
        program = choose_program(
            schedule, num_stages=stages, n_microbatches=microbatches, ranks=ranks, virtual=None,
            world=None,
        )  # fmt: skip
    config = BalanceConfig(
        num_stages=stages, memory_limit=memory_limit, state_factor=state_factor,
        bandwidth=bandwidth, latency_s=latency, microbatches=microbatches,
        placement=None if program is None else program.placement,
        in_flight=None if program is None else _peak_in_flight(program),
    )  # fmt: skip
    measured = _measure(request, runs)
    if program is None or memory_limit or bandwidth or latency:
        counts = balanced(measured, config).counts
    else:
        counts = balance_for(measured, program).counts
    made = f"balanced for {'the slowest stage' if program is None else program.name}"
    plan = measured.plan(counts, made=made)
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    sizes = numbers_of(block=len(measured.blocks), stage=stages)
    times = split_costs(measured, counts, placement=config.placement).rank_time_s
    _show(plan, split_by_counts(measured.blocks, counts), config, sizes, times)
    out.console().print(plan.made, markup=False, soft_wrap=True, style="dim")
    if output is not None:
        typer.echo(f"wrote {output}")


def _measure(request: ModelRequest, runs: int) -> Profile:
    """Measure the model's costs, with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from penstock.partition.profile import profile

    model, example = load_model(request)
    what = TextColumn("{task.description}")
    with out.progress_bar(TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), what) as bar:
        task = bar.add_task("")

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        return profile(model, example, runs=runs, progress=show)


def _peak_in_flight(program: Program) -> list[int]:
    """The peak number of microbatches in flight on each of the model's stages."""
    placement, found = program.placement, [0] * program.placement.num_model_stages
    nothing = (0.0,) * placement.num_stages
    for stage in range(placement.num_stages):
        one = tuple(float(each == stage) for each in range(placement.num_stages))
        memory = StageMemory(activation=one, weight_grad=one, recompute=nothing)
        index = placement.model_stage(stage)
        found[index] = max(found[index], int(max(peaks(program, memory))))
    return found


def _show(
    plan: Plan,
    groups: Sequence[Sequence[BlockCosts]],
    config: BalanceConfig,
    sizes: str,
    rank_time_s: Sequence[float],
) -> None:
    """Print a row per stage, and the slowest stage or rank."""
    time_s = sum(rank_time_s)
    rows = [_row(plan.stages[i], blocks, config, i, time_s) for i, blocks in enumerate(groups)]
    shown = out.table(*rows[0], numbers=_NUMBERS, title=f"{plan.model}: {sizes}")
    for row in rows:
        shown.add_row(*row.values())
    out.print_table(shown)
    what = "stage" if config.placement is None else "rank"
    slowest_s, mean_s = max(rank_time_s), sum(rank_time_s) / len(rank_time_s)
    out.console().print(
        f"slowest {what} [bold]{out.seconds_text(slowest_s)}[/] per microbatch, forward and "
        f"backward; {slowest_s / mean_s - 1:.2%} above the mean of all {what}s",
        soft_wrap=True,
    )


def _row(
    modules: Sequence[str],
    blocks: Sequence[BlockCosts],
    config: BalanceConfig,
    stage: int,
    whole_s: float,
) -> dict[str, str]:
    """The table row of a stage with these modules and blocks, by column."""
    placement, time_s = config.placement, sum(block.time_s for block in blocks)
    row = {"stage": f"[bold]{stage}[/]"}
    if placement is not None:
        places = range(stage, placement.num_stages, placement.num_model_stages)
        row["rank"] = ", ".join(str(placement.rank_of(each)) for each in places)
    row |= {
        "modules": "\n".join(runs_of_names(modules)),
        "parameters": f"{sum(block.parameters for block in blocks):,}",
        "time": out.seconds_text(time_s),
        "share": f"{time_s / whole_s:.2%}",
        "activations": out.bytes_text(sum(block.activation_bytes for block in blocks)),
    }
    if config.memory_limit is not None:
        flight = config.stage_in_flight[stage]
        row["holds"] = out.bytes_text(sum(config.held_bytes(block, flight) for block in blocks))
    row["sends"] = out.bytes_text(blocks[-1].sent_bytes) if blocks[-1].sends else ""
    times = Counter(blocks[-1].sends)
    row["across"] = "\n".join(f"{n} × {each}" if n > 1 else each for each, n in times.items())
    return row
