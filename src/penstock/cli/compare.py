"""``penstock compare``: schedules side by side."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import typer

from penstock.cli.figures import ranges
from penstock.cli.setting import Setting, takes_setting
from penstock.cli.sources import is_file, load_program
from penstock.cli.terminal import number, percent, stdout, table
from penstock.errors import ScheduleError
from penstock.schedule.catalog import family
from penstock.simulate.costs import Costs
from penstock.simulate.result import Simulation
from penstock.simulate.shares import share_out

__all__ = ["compare"]


class Per(Enum):
    """What costs are given for."""

    STAGE = "stage"
    RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    label: str
    share: int
    result: Simulation


@takes_setting
def compare(
    schedules: Annotated[
        list[str],
        typer.Argument(
            metavar="SCHEDULE...",
            help="Names, each with options of its own if need be, as in "
            "interleaved-1f1b:virtual=4; or files with programs.",
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

    --virtual and --option go to the schedules that take them.
    """
    costs = setting.costs()
    _refuse_options_of_none(schedules, setting)
    rows = [_row(each, setting, costs, per) for each in schedules]
    numbers = ("stages per rank", "makespan", "bubble", "span", "span bubble", "messages")
    shown = table("schedule", *numbers[:5], "peak per rank", "messages", numbers=numbers)
    best = min(row.result.bubble_ratio for row in rows)
    for row in rows:
        share = row.share if per is Per.RANK else 1
        program = row.result.program
        bubble = percent(row.result.bubble_ratio)
        shown.add_row(
            row.label,
            str(program.num_stages // program.num_ranks),
            number(row.result.makespan),
            f"[bold green]{bubble}[/]" if row.result.bubble_ratio == best else bubble,
            number(row.result.span),
            percent(row.result.span_bubble_ratio),
            ranges(tuple(peak / share for peak in row.result.peak_in_flight)),
            str(row.result.messages),
        )
    stdout().print(shown)


def _refuse_options_of_none(sources: list[str], setting: Setting) -> None:
    chosen = [family(each.partition(":")[0]) for each in sources if not is_file(each)]
    for option in setting.options():
        if not any(option in each.options for each in chosen):
            names = ", ".join(each.name for each in chosen)
            raise ScheduleError(f"none of {names} has an option {option!r}")


def _row(source: str, setting: Setting, costs: Costs, per: Per) -> _Row:
    program = load_program(source, setting, each_its_own=True)
    # Of two copies of a model, a microbatch passes one; a piece is so much of its sequence.
    share = program.placement.num_model_stages // program.num_ranks * program.num_splits
    return _Row(
        label=source if ":" in source else program.name,
        share=share,
        result=setting.play(program, share_out(costs, share) if per is Per.RANK else costs),
    )
