"""``penstock compare``: schedules side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import typer

from penstock.cli.completion import sources
from penstock.cli.figures import over_limit, ranges
from penstock.cli.setting import Setting, takes_setting
from penstock.cli.sources import is_file, load_program, takes_virtual
from penstock.cli.terminal import number, percent, plain, print_table, stdout, table, warn
from penstock.cli.values import in_options
from penstock.errors import ScheduleError
from penstock.schedule.catalog import family
from penstock.simulate.costs import Costs
from penstock.simulate.result import Simulation
from penstock.simulate.shares import share_of, share_out

__all__ = ["compare"]


class Per(Enum):
    """What costs are given for."""

    STAGE = "stage"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    label: str
    share: float  # what peaks are divided by: of a rank's activation, a stage holds so small a part
    result: Simulation

    @property
    def peaks(self) -> tuple[float, ...]:
        return tuple(peak / self.share for peak in self.result.peak_in_flight)

    def over(self, limit: float | None) -> str | None:
        """Which ranks are over the limit, in bytes where the costs tell them, in words."""
        counted = self.result.costs.activation_bytes is None
        held = self.result.peak_bytes
        return over_limit([peak / self.share for peak in held] if counted else held, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoRow:
    label: str
    error: ScheduleError

    @property
    def reason(self) -> str:
        """In a line, without the name that stands before it."""
        text = " ".join(in_options(str(self.error)).split())
        return text.removeprefix(f"{self.label}: ")


# Stands in the table where a reason is to be, in place of all figures.
_REASON = "\ue000"


@takes_setting()
def compare(
    schedules: Annotated[
        list[str],
        typer.Argument(
            metavar="SCHEDULE...",
            help="Names, each with options of its own if need be, as in "
            "interleaved-1f1b:virtual=4; or files with programs.",
            autocompletion=sources,
        ),
    ],
    *,
    per: Annotated[
        Per,
        typer.Option(
            help="Whether costs are a stage's, or a rank's, of which each of its stages takes an "
            "equal part: so that one model is compared over more or fewer stages."
        ),
    ] = Per.STAGE,
    setting: Setting,
) -> None:
    """Compare schedules: time, bubble and memory side by side.

    --virtual and --option go to the schedules that take them; those over --memory are marked, and
    of those that can't be built it is told why.
    """
    costs = setting.costs()
    _refuse_options_of_none(schedules, setting)
    rows = [_row(each, setting, costs, per) for each in schedules]
    faults = [row.over(setting.memory) for row in rows if isinstance(row, _Row)]
    if not faults:
        raise next(row.error for row in rows if isinstance(row, _NoRow))
    _print(rows, setting.memory)
    for row in rows:
        fault = row.over(setting.memory) if isinstance(row, _Row) else None
        if fault is not None:
            warn(f"{row.label}: {fault}")


def _print(rows: Sequence[_Row | _NoRow], memory: float | None) -> None:
    numbers = ("stages per rank", "makespan", "bubble", "span", "span bubble", "messages")
    shown = table("schedule", *numbers[:5], "peak per rank", "messages", numbers=numbers)
    fitting = [row for row in rows if isinstance(row, _Row) and row.over(memory) is None]
    best = min((row.result.bubble_ratio for row in fitting), default=None)
    for row in rows:
        if isinstance(row, _NoRow):
            shown.add_row(plain(row.label), _REASON)
            continue
        fits, program = row.over(memory) is None, row.result.program
        bubble = percent(row.result.bubble_ratio)
        is_best = fits and row.result.bubble_ratio == best
        peaks = ranges(row.peaks)
        shown.add_row(
            plain(row.label),
            number(program.num_stages / program.num_ranks),
            number(row.result.makespan),
            f"[bold green]{bubble}[/]" if is_best else bubble,
            number(row.result.span),
            percent(row.result.span_bubble_ratio),
            peaks if fits else f"[yellow]{peaks} over[/]",
            str(row.result.messages),
        )
    console = stdout()
    with console.capture() as drawn:
        print_table(shown, console)
    # Rich has no cell that spans columns.
    reasons = (row.reason for row in rows if isinstance(row, _NoRow))
    console.out(re.sub(rf" *{_REASON}.*", lambda _: f"   {next(reasons)}", drawn.get()), end="")


def _refuse_options_of_none(given: list[str], setting: Setting) -> None:
    chosen = [family(each.partition(":")[0]) for each in given if not is_file(each)]
    if not chosen:
        setting.refuse_beside_file(" ".join(given))
    names = ", ".join(each.name for each in chosen)
    if chosen and not any(takes_virtual(each, setting.virtual) for each in chosen):
        raise ScheduleError(
            f"none of {names} can have --virtual {setting.virtual} stages per rank; `penstock "
            "schedules` tells what each can"
        )
    for option in setting.options():
        if not any(each.takes_option(option) for each in chosen):
            raise ScheduleError(
                f"none of {names} has an option {option!r}; `penstock schedules` tells what each "
                "has"
            )


def _row(source: str, setting: Setting, costs: Costs, per: Per) -> _Row | _NoRow:
    try:
        program = load_program(source, setting, each_its_own=True)
        share = share_of(program) if per is Per.RANK else 1
        result = setting.play(program, share_out(costs, share) if per is Per.RANK else costs)
    except ScheduleError as error:
        return _NoRow(label=source, error=error)
    return _Row(
        label=source if ":" in source else program.name,
        share=share,
        result=result,
    )
