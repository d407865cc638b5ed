"""``penstock split``: measure a model, cut it into balanced stages, show them, write the plan.

model ──measured──► costs per block ──balance──► counts ──► plan, table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from penstock.cli import output as out
from penstock.cli.models import ModelRequest, load_model, parse_bytes
from penstock.cli.settings import option, with_options
from penstock.errors import PartitionError
from penstock.partition.balance.costs import Profile
from penstock.partition.plan import runs_of_names, split_by_counts, toml_path
from penstock.schedule.placement import Placement, linear
from penstock.schedule.registry import choose_program
from penstock.schedule.wording import numbers_of
from penstock.simulate.memory import peak_in_flight

__all__ = ["split"]

_NUMBERS = ("stage", "rank", "parameters", "time", "share", "activations", "holds", "sends")


@with_options
def split(
    *,
    stages: Annotated[int, option("How many stages.", "--stages", "-s", min=1)],
    output: Annotated[Path | None, option("Write the plan: *.toml.", "--output", "-o")] = None,
    request: ModelRequest,
    runs: Annotated[int, option("Number of measurements.", min=1)] = 5,
    schedule: Annotated[str | None, option("Balance for the ranks of this schedule.")] = None,
    ranks: Annotated[
        int | None, option("On how many ranks --schedule runs.", "--ranks", "-r")
    ] = None,
    microbatches: Annotated[
        int | None, option("Microbatches per step of --schedule.", "--microbatches", "-m")
    ] = None,
    memory_limit: Annotated[
        float | None,
        option("The most that a rank may hold, as 16GB.", parser=parse_bytes, metavar="BYTES"),
    ] = None,
    state_factor: Annotated[
        float, option("Held per byte of parameters: 4 with gradients and Adam.")
    ] = 4.0,
    as_json: Annotated[bool, option("Print the plan as JSON.", "--json")] = False,
) -> None:
    """Measure a model, cut it into balanced stages, and show what each holds and sends."""
    # These import NumPy, which no other command needs.
    from penstock.partition.balance.balance import balance
    from penstock.partition.balance.for_program import balance_for, rank_times
    from penstock.partition.profile import profile

    if output is not None:
        toml_path(output).parent.mkdir(parents=True, exist_ok=True)
    program, placement, in_flight = None, linear(stages), None
    if schedule is not None:
        program = choose_program(
            schedule, num_stages=stages, n_microbatches=microbatches, ranks=ranks, virtual=None,
            world=None,
        )  # fmt: skip
        placement, peaks = program.placement, peak_in_flight(program)
        in_flight = [peaks[rank] for rank in placement.stage_ranks]
        if memory_limit is not None and placement.num_stages > placement.num_ranks:
            raise PartitionError(
                f"--memory-limit is for one stage on each rank, {program.name} has several: leave "
                "it out, or use Pipeline(schedule='auto', memory_limit=...)"
            )
    elif ranks is not None or microbatches is not None:
        raise PartitionError("--ranks and --microbatches are those of a --schedule; name one")
    model, example = load_model(request)
    with out.console(error=True).status("measuring"):
        measured, held = profile(model, example, runs=runs), None
    if program is not None and memory_limit is None:
        counts = balance_for(measured, program)
    else:
        found = balance(
            measured, stages, memory_limit, in_flight=in_flight, state_factor=state_factor
        )
        counts, held = found.counts, found.held_bytes if memory_limit is not None else None
    balanced_for = "the slowest stage" if program is None else program.name
    plan = measured.plan(counts, made=f"balanced for {balanced_for}")
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    rows = [*_rows(measured, counts, None if program is None else placement, held)]
    title = f"{plan.model}: {numbers_of(block=len(measured.blocks), stage=stages)}"
    shown = out.table(*rows[0], numbers=_NUMBERS, title=title)
    for row in rows:
        shown.add_row(*row.values())
    out.print_table(shown)
    times, what = rank_times(measured, counts, placement), "stage" if program is None else "rank"
    out.console().print(
        f"slowest {what} [bold]{out.seconds_text(max(times))}[/] per microbatch, forward and "
        f"backward; {max(times) * len(times) / sum(times) - 1:.2%} above the mean of all {what}s",
        soft_wrap=True,
    )
    out.console().print(plan.made, markup=False, soft_wrap=True, style="dim")
    if output is not None:
        typer.echo(f"wrote {output}")


def _rows(
    measured: Profile,
    counts: Sequence[int],
    placement: Placement | None,
    held_bytes: Sequence[float] | None,
) -> Iterator[dict[str, str]]:
    """The table row of each stage, by column."""
    for stage, blocks in enumerate(split_by_counts(measured.blocks, counts)):
        row = {"stage": f"[bold]{stage}[/]"}
        if placement is not None:
            places = range(stage, placement.num_stages, placement.num_model_stages)
            row["rank"] = ", ".join(str(placement.rank_of(each)) for each in places)
        time_s = sum(block.time_s for block in blocks)
        row |= {
            "modules": "\n".join(runs_of_names([n for block in blocks for n in block.modules])),
            "parameters": f"{sum(block.parameters for block in blocks):,}",
            "time": out.seconds_text(time_s),
            "share": f"{time_s / measured.time_s:.2%}",
            "activations": decimal(sum(block.activation_bytes for block in blocks)),
        }
        if held_bytes is not None:
            row["holds"] = decimal(int(held_bytes[stage]))
        sent = blocks[-1]
        row["sends"] = decimal(sent.sent_bytes) if sent.sends else ""
        times = Counter(sent.sends).items()
        row["across"] = "\n".join(f"{n} × {each}" if n > 1 else each for each, n in times)
        yield row
