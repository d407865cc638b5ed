"""``penstock compare``: schedules side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import typer

from penstock.cli import settings as given
from penstock.cli.output import over_limit, per_rank, plain, print_table, stdout, table, warn
from penstock.cli.settings import Settings, message_of
from penstock.cli.sources import complete, is_file, load_program, takes_virtual
from penstock.cli.values import number, percent
from penstock.errors import ScheduleError
from penstock.schedule.registry import family
from penstock.simulate.costs import Costs, share_of, share_out
from penstock.simulate.simulation import Simulation

__all__ = ["compare"]


class Per(Enum):
    """The part of the model that costs are given for."""

    STAGE = "stage"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One schedule of the table; with costs per rank, peaks are in activations of a rank's part."""

    label: str
    result: Simulation
    peaks: tuple[float, ...]
    fault: str | None  # the ranks over the memory limit


# Marks a failed schedule; its reason replaces all figures of the row.
_REASON = "\ue000"


def compare(
    schedules: Annotated[
        list[str],
        typer.Argument(
            metavar="SCHEDULE...",
            help="Names, each with options of its own if need be, as in "
            "interleaved-1f1b:virtual=4; or files with programs.",
            autocompletion=complete,
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
    per: Annotated[
        Per,
        typer.Option(
            help="Whether costs are those of a stage, or of a rank, divided equally among its "
            "stages: this compares one model cut into more or fewer stages."
        ),
    ] = Per.STAGE,
) -> None:
    """Compare schedules: time, bubble and memory side by side.

    --virtual and --option go to the schedules that take them. Schedules over --memory are marked;
    a schedule that can't be built is listed with the reason.
    """
    settings = Settings(
        ranks=ranks, microbatches=microbatches, virtual=virtual, option=option, memory=memory,
        forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency,
        overlap=overlap, cost=cost, jitter=jitter, jitter_seed=jitter_seed,
    )  # fmt: skip
    costs = settings.costs()
    _refuse_unused(schedules, settings)
    rows = [_row(each, settings, costs, per) for each in schedules]
    failed = [row for row in rows if isinstance(row, ScheduleError)]
    if len(failed) == len(rows):
        raise failed[0]
    _print(schedules, rows)
    for row in rows:
        if isinstance(row, _Row) and row.fault is not None:
            warn(f"{row.label}: {row.fault}")


def _row(source: str, settings: Settings, costs: Costs, per: Per) -> _Row | ScheduleError:
    try:
        program = load_program(source, settings, lenient=True)
        share = share_of(program) if per is Per.RANK else 1
        costs = share_out(costs, share) if per is Per.RANK else costs
        result = settings.simulate(program, costs)
    except ScheduleError as error:
        return error
    peaks = tuple(peak / share for peak in result.peak_in_flight)
    # Bytes are already per stage; counted activations are the smaller ones of a stage.
    held = result.peak_bytes
    if costs.activation_bytes is None:
        held = tuple(peak / share for peak in held)
    return _Row(
        label=source if ":" in source else program.name,
        result=result,
        peaks=peaks,
        fault=over_limit(held, settings.memory),
    )


def _refuse_unused(sources: list[str], settings: Settings) -> None:
    """Refuse options that none of the schedules takes."""
    chosen = [family(each.partition(":")[0]) for each in sources if not is_file(each)]
    if not chosen:
        settings.refuse_for_program(" ".join(sources))
    unused = [
        f"option {name!r}"
        for name in settings.options()
        if not any(each.takes_option(name) for each in chosen)
    ]
    if not any(takes_virtual(each, settings.virtual) for each in chosen):
        unused.append(f"--virtual {settings.virtual}")
    if chosen and unused:
        names = ", ".join(each.name for each in chosen)
        raise ScheduleError(
            f"none of {names} takes {', '.join(unused)}; `penstock schedules` lists what each takes"
        )


def _print(sources: Sequence[str], rows: Sequence[_Row | ScheduleError]) -> None:
    numbers = ("stages per rank", "makespan", "bubble", "span", "span bubble", "messages")
    shown = table("schedule", *numbers[:5], "peak per rank", "messages", numbers=numbers)
    fitting = [row for row in rows if isinstance(row, _Row) and row.fault is None]
    best = min((row.result.bubble_ratio for row in fitting), default=None)
    reasons = []
    for source, row in zip(sources, rows, strict=True):
        if isinstance(row, ScheduleError):
            shown.add_row(plain(source), _REASON)
            reasons.append(" ".join(message_of(row).split()).replace(f"{source}: ", "", 1))
            continue
        fits, result, peaks = row.fault is None, row.result, per_rank(row.peaks)
        bubble = percent(result.bubble_ratio)
        shown.add_row(
            plain(row.label),
            number(result.program.num_stages / result.program.num_ranks),
            number(result.makespan),
            f"[bold green]{bubble}[/]" if fits and result.bubble_ratio == best else bubble,
            number(result.span),
            percent(result.span_bubble_ratio),
            peaks if fits else f"[yellow]{peaks} over[/]",
            str(result.messages),
        )
    console = stdout()
    with console.capture() as drawn:
        print_table(shown, console)
    # Rich has no cell that spans columns.
    console.out(re.sub(rf" *{_REASON}.*", lambda _: f"   {reasons.pop(0)}", drawn.get()), end="")
