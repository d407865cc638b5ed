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
    """One schedule of the table."""

    label: str
    share: float  # the stages among which a rank's costs were divided; 1 where costs are a stage's
    result: Simulation

    @property
    def peaks(self) -> tuple[float, ...]:
        """Peak activations per rank, in activations of what the costs are given for."""
        return tuple(peak / self.share for peak in self.result.peak_in_flight)

    def over(self, limit: float | None) -> str | None:
        """Name the ranks over the limit, in bytes if the costs give the size of an activation."""
        counted = self.result.costs.activation_bytes is None
        held = self.result.peak_bytes
        return over_limit([peak / self.share for peak in held] if counted else held, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A schedule that can't be built or simulated, and why."""

    label: str
    error: ScheduleError

    @property
    def reason(self) -> str:
        """The message on one line, without the label that stands before it."""
        text = " ".join(message_of(self.error).split())
        return text.replace(f"{self.label}: ", "", 1)


# Stands for the reason, which replaces all figures of its row once the table is drawn.
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
    if all(isinstance(row, _Failed) for row in rows):
        raise next(row.error for row in rows if isinstance(row, _Failed))
    _print(rows, settings.memory)
    for row in rows:
        fault = row.over(settings.memory) if isinstance(row, _Row) else None
        if fault is not None:
            warn(f"{row.label}: {fault}")


def _row(source: str, settings: Settings, costs: Costs, per: Per) -> _Row | _Failed:
    try:
        program = load_program(source, settings, lenient=True)
        share = share_of(program) if per is Per.RANK else 1
        costs = share_out(costs, share) if per is Per.RANK else costs
        result = settings.simulate(program, costs)
    except ScheduleError as error:
        return _Failed(label=source, error=error)
    return _Row(label=source if ":" in source else program.name, share=share, result=result)


def _refuse_unused(sources: list[str], settings: Settings) -> None:
    """Refuse options that none of the schedules takes."""
    chosen = [family(each.partition(":")[0]) for each in sources if not is_file(each)]
    if not chosen:
        settings.refuse_for_program(" ".join(sources))
    names = ", ".join(each.name for each in chosen)
    if chosen and not any(takes_virtual(each, settings.virtual) for each in chosen):
        raise ScheduleError(
            f"none of {names} can have --virtual {settings.virtual} stages per rank; `penstock "
            "schedules` lists what each can"
        )
    for option in settings.options():
        if not any(each.takes_option(option) for each in chosen):
            raise ScheduleError(
                f"none of {names} has an option {option!r}; `penstock schedules` lists what each "
                "has"
            )


def _print(rows: Sequence[_Row | _Failed], memory: float | None) -> None:
    numbers = ("stages per rank", "makespan", "bubble", "span", "span bubble", "messages")
    shown = table("schedule", *numbers[:5], "peak per rank", "messages", numbers=numbers)
    fitting = [row for row in rows if isinstance(row, _Row) and row.over(memory) is None]
    best = min((row.result.bubble_ratio for row in fitting), default=None)
    for row in rows:
        if isinstance(row, _Failed):
            shown.add_row(plain(row.label), _REASON)
            continue
        fits, result = row.over(memory) is None, row.result
        bubble, peaks = percent(result.bubble_ratio), per_rank(row.peaks)
        is_best = fits and result.bubble_ratio == best
        shown.add_row(
            plain(row.label),
            number(result.program.num_stages / result.program.num_ranks),
            number(result.makespan),
            f"[bold green]{bubble}[/]" if is_best else bubble,
            number(result.span),
            percent(result.span_bubble_ratio),
            peaks if fits else f"[yellow]{peaks} over[/]",
            str(result.messages),
        )
    console = stdout()
    with console.capture() as drawn:
        print_table(shown, console)
    # Rich has no cell that spans columns.
    reasons = (row.reason for row in rows if isinstance(row, _Failed))
    console.out(re.sub(rf" *{_REASON}.*", lambda _: f"   {next(reasons)}", drawn.get()), end="")
