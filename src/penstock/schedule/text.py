"""The one text form of actions and programs: as torch writes them, plus JSON.

    step       0F1   3B0   1I2   1W2   2SEND_F0   0UNSHARD   (0F3;1B2)OVERLAP_F_B
    program    a line per rank, steps parted by commas; empty cells are idle time, and skipped

Reading what was written gives the same value back; anything that is left over is an error. This
module knows what a program looks like, not whether it is right: ``penstock.schedule.check`` does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TypeVar

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Step
from penstock.schedule.messages import number_of, quoted, runs_of
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rows import cells_of, lines_of, read_row, refuse
from penstock.schedule.rules import COMPUTE
from penstock.schedule.step_text import format_step, parse_action, parse_step

__all__ = [
    "format_csv",
    "format_step",
    "from_json",
    "load_csv",
    "parse_action",
    "parse_csv",
    "parse_step",
    "save_csv",
    "to_json",
]

_JSON_FORMAT = "penstock program 1"
# Those that older files lack, and what they are there.
_JSON_DEFAULTS: dict[str, object] = {"copies": 1, "num_splits": 1}
_JSON_COUNTS = ("num_ranks", "copies", "num_microbatches", "num_splits")
_JSON_FIELDS = {"format", "name", "num_microbatches", "num_ranks", "stage_ranks", "ranks"}

# No file counts as far: Python reads numbers of more digits slowly, and beyond 4300 not at all.
_MOST_DIGITS = 18
# How many stages or microbatches may be missing by mistake, which the checker tells.
_MAY_BE_MISSING = 1000

_KINDS: dict[type, str] = {int: "a whole number", str: "a text", list: "a list"}

T = TypeVar("T")


def parse_csv(
    text: str,
    *,
    num_microbatches: int | None = None,
    placement: Placement | None = None,
    num_splits: int = 1,
    name: str = "csv",
) -> Program:
    """Read a program.

    Args:
        text: one line per rank, steps parted by commas; empty cells are skipped.
        num_microbatches: microbatches per step; None for the highest in the text, plus one.
        placement: which rank holds which stage; None to see it from who computes what.
        num_splits: into how many pieces sequences are split, which the text does not tell.
        name: the program's name.

    Returns:
        The program, not checked.

    Raises:
        ScheduleError: a cell that is no step (the message names row and column, from 1), no
            steps at all, more or fewer rows than ranks, or no placement that fits the text.

    Example:
        >>> program = parse_csv("0F0,,0B0\\n1F0,1B0\\n")
        >>> program.placement.stage_ranks, program.num_microbatches
        ((0, 1), 1)
        >>> format_csv(program)
        '0F0,0B0\\n1F0,1B0\\n'
    """
    return _parse(text, num_microbatches, placement, num_splits, name, source="")


def format_csv(program: Program) -> str:
    """Write a program: what ``parse_csv`` reads.

    Args:
        program: any program.

    Returns:
        One line per rank, steps parted by commas, each line ended by a newline.
    """
    return "".join(",".join(map(str, steps)) + "\n" for steps in program.ranks)


def load_csv(
    path: str | PathLike[str],
    *,
    num_microbatches: int | None = None,
    placement: Placement | None = None,
    num_splits: int = 1,
) -> Program:
    """Read a program from a file, as ``parse_csv``; its name is the file's, without suffix.

    Raises:
        ScheduleError: as ``parse_csv``, or a file that is not text in UTF-8.
        OSError: the file can't be read.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not a text file in UTF-8 ({error})") from error
    return _parse(text, num_microbatches, placement, num_splits, path.stem, source=f"{path}: ")


def save_csv(program: Program, path: str | PathLike[str]) -> None:
    """Write a program to a file, as ``format_csv``.

    Raises:
        ScheduleError: what is given is no program.
        OSError: the file can't be written.
    """
    refuse_no_program(program, "save_csv()")
    Path(path).write_text(format_csv(program), encoding="utf-8", newline="\n")


def to_json(program: Program) -> str:
    """Write a program with its name and placement as JSON: what ``from_json`` reads.

    Args:
        program: any program.

    Returns:
        One JSON object; the steps are in their text form.
    """
    document = {
        "format": _JSON_FORMAT,
        "name": program.name,
        "num_microbatches": program.num_microbatches,
        "num_splits": program.num_splits,
        "num_ranks": program.placement.num_ranks,
        "stage_ranks": program.placement.stage_ranks,
        "copies": program.placement.copies,
        "ranks": [[str(step) for step in steps] for steps in program.ranks],
    }
    return json.dumps(document)


def from_json(text: str) -> Program:
    """Read a program from JSON.

    Args:
        text: what ``to_json`` wrote.

    Returns:
        The program, not checked.

    Raises:
        ScheduleError: not JSON, not a program's fields, numbers of ranks, stages or microbatches
            that the steps can't be of, or a text that is no step (the message names row and
            column, from 1).
    """
    try:
        document = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ScheduleError("not JSON: brackets in brackets without end") from error
    if not isinstance(document, dict) or document.get("format") != _JSON_FORMAT:
        raise ScheduleError(f'not a program: expected an object with "format": "{_JSON_FORMAT}"')
    unknown = sorted(document.keys() - _JSON_FIELDS - _JSON_DEFAULTS.keys())
    if unknown:
        raise ScheduleError(f"not a program: unknown fields {unknown}")
    document = {**_JSON_DEFAULTS, **document}
    rows = _field(document, "ranks", list)
    for row, cells in enumerate(rows):
        if not isinstance(cells, list) or not all(isinstance(cell, str) for cell in cells):
            raise ScheduleError(f"row {row + 1} of 'ranks': expected a list of texts")
    stage_ranks = _field(document, "stage_ranks", list)
    if not all(type(rank) is int for rank in stage_ranks):
        raise ScheduleError("'stage_ranks': expected a list of whole numbers")
    counts = {name: _count(document, name) for name in _JSON_COUNTS}
    ranks = tuple(read_row(row, cells, source="") for row, cells in enumerate(rows))
    if counts["num_ranks"] > len(stage_ranks):
        raise ScheduleError(
            f"'num_ranks': {counts['num_ranks']}, but 'stage_ranks' is of "
            f"{number_of(len(stage_ranks), 'stage')}; every rank holds a stage"
        )
    actions = _num_actions(ranks)
    for what, number in (("stage", len(stage_ranks)), ("microbatch", counts["num_microbatches"])):
        if number > actions + _MAY_BE_MISSING:
            raise ScheduleError(
                f"{number_of(number, what)} in a program of {number_of(actions, 'action')}; "
                "each takes one at least"
            )
    return Program(
        name=_field(document, "name", str),
        placement=Placement(
            num_ranks=counts["num_ranks"],
            stage_ranks=tuple(stage_ranks),
            copies=counts["copies"],
        ),
        num_microbatches=counts["num_microbatches"],
        num_splits=counts["num_splits"],
        ranks=ranks,
    )


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ScheduleError(f"not a program: it has a number of {len(text)} digits")
    return int(text)


def _count(document: dict[str, object], name: str) -> int:
    number = _field(document, name, int)
    if number < 1:
        raise ScheduleError(f"{name!r}: expected a whole number from 1 on, got {number}")
    return number


def _field(document: dict[str, object], name: str, kind: type[T]) -> T:
    value = document.get(name)
    if type(value) is not kind:
        raise ScheduleError(f"{name!r}: expected {_KINDS[kind]}, got {quoted(json.dumps(value))}")
    return value


def _parse(
    text: str,
    num_microbatches: int | None,
    placement: Placement | None,
    num_splits: int,
    name: str,
    source: str,
) -> Program:
    rows = [cells_of(row, line, source=source) for row, line in enumerate(lines_of(text))]
    # Empty lines at the end are no ranks, unless the placement says so.
    num_ranks = placement.num_ranks if placement is not None else 1
    while len(rows) > num_ranks and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    ranks = tuple(read_row(row, cells, source=source) for row, cells in enumerate(rows))
    _refuse_far_numbers(ranks, source)
    if placement is None:
        placement = _placement_of(ranks, source)
    elif len(ranks) != placement.num_ranks:
        raise ScheduleError(
            f"{source}{number_of(len(ranks), 'row')}; the placement has "
            f"{number_of(placement.num_ranks, 'rank')}, and each takes a line"
        )
    if num_microbatches is None:
        used = [a.microbatch for steps in ranks for step in steps for a in step.parts]
        num_microbatches = 1 + max((m for m in used if m is not None), default=0)
    return Program(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        ranks=ranks,
        num_splits=num_splits,
    )


def _num_actions(ranks: tuple[tuple[Step, ...], ...]) -> int:
    return sum(len(step.parts) for steps in ranks for step in steps)


def _refuse_far_numbers(ranks: tuple[tuple[Step, ...], ...], source: str) -> None:
    """Refuse a stage or microbatch so high that those below it can't all be in the text."""
    actions = _num_actions(ranks)
    for rank, steps in enumerate(ranks):
        for act in (a for step in steps for a in step.parts):
            for what, number in (("stage", act.stage), ("microbatch", act.microbatch or 0)):
                if number >= actions + _MAY_BE_MISSING:
                    refuse(
                        f"{source}row {rank + 1}, {act}: {what} {number} in a text of "
                        f"{number_of(actions, 'action')}; each {what} from 0 on takes one at "
                        "least",
                        Where(rank=rank, action=str(act)),
                    )


def _placement_of(ranks: tuple[tuple[Step, ...], ...], source: str) -> Placement:
    """The placement in which each stage lies where the text computes it."""
    holders: dict[int, int] = {}
    for rank, steps in enumerate(ranks):
        for act in (a for step in steps for a in step.parts if a.op in COMPUTE):
            if holders.setdefault(act.stage, rank) != rank:
                refuse(
                    f"{source}stage {act.stage} is computed in row {holders[act.stage] + 1} and "
                    f"in row {rank + 1}; one rank holds a stage",
                    Where(rank=rank, stage=act.stage, action=str(act)),
                )
        if rank not in holders.values():
            refuse(
                f"{source}row {rank + 1}: this rank computes nothing; every rank holds a stage",
                Where(rank=rank),
            )
    missing = [stage for stage in range(max(holders, default=-1) + 1) if stage not in holders]
    if not holders or missing:
        nowhere = f"{number_of(len(missing), 'stage')} computed nowhere ({runs_of(missing)})"
        what = nowhere if missing else "no steps"
        raise ScheduleError(f"{source}{what}; the placement can't be seen from the text")
    stage_ranks = tuple(holders[stage] for stage in range(len(holders)))
    one = Placement(num_ranks=len(ranks), stage_ranks=stage_ranks)
    if len(stage_ranks) % 2:
        return one
    # Two copies of the model show in that each takes microbatches that the other does not.
    two = replace(one, copies=2)
    acts = (a for steps in ranks for step in steps for a in step.parts)
    apart = all(a.microbatch is None or two.passes(a.microbatch, a.stage) for a in acts)
    return two if apart else one
