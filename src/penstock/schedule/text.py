"""The text forms of actions and programs, which are those of torch.

    step       0F1   3B0   1I2   1W2   2SEND_F0   0UNSHARD   (0F3;1B2)OVERLAP_F_B
    program    a line per rank, steps separated by commas; empty cells are idle time, and skipped,
               as are torch's waits (0WAIT_SEND_F1, 0WAIT_REDUCE_GRAD): the runtime waits by itself

``parse(format(p)) == p``; programs are checked by ``penstock.schedule.check``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from reprlib import repr as quoted

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE, WHOLE_STAGE
from penstock.schedule.wording import number_of, runs_of

__all__ = [
    "format_csv", "is_wait", "load_csv", "parse_action", "parse_csv", "parse_step", "save_csv",
]  # fmt: skip

_OVERLAP = "OVERLAP_F_B"
_NAMES = {op.value: op for op in Op}
_ACTION = re.compile(r"([0-9]{1,18})([A-Z](?:[A-Z_]*[A-Z])?)([0-9]{0,18})")

_WAIT = re.compile(r"[0-9]{1,18}WAIT_(SEND_[FB][0-9]{1,18}|REDUCE_GRAD)")

# The most stages or microbatches that may be missing by mistake; the checker lists them.
_MAY_BE_MISSING = 1000


def parse_action(text: str) -> Action:
    """Read one action, such as ``"2F3"`` or ``"0UNSHARD"``; blanks around it are allowed.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    op = _NAMES.get(match[2]) if match else None
    if match is None or op is None or bool(match[3]) == (op in WHOLE_STAGE):
        raise ScheduleError(
            f"{quoted(text)} is not an action; expected a stage, one of {', '.join(_NAMES)}, and a "
            "microbatch except for whole stages, as in 2F3 or 0UNSHARD"
        )
    return action(int(match[1]), op, int(match[3]) if match[3] else None)


def is_wait(text: str) -> bool:
    """True for a wait of torch's files."""
    return _WAIT.fullmatch(text.strip()) is not None


def parse_step(text: str) -> Step:
    """Read one step: an action, or an overlapped pair as ``"(0F3;1B2)OVERLAP_F_B"``.

    Raises:
        ScheduleError: the text is not a step, or has trailing text.
    """
    stripped = text.strip()
    if not stripped.startswith("("):
        return parse_action(text)
    inner, bracket, kind = stripped[1:].partition(")")
    if not bracket or kind != _OVERLAP:
        raise ScheduleError(
            f"{quoted(text)} is not an overlapped pair; expected actions separated by ';' in "
            f"brackets, then {_OVERLAP}, as in (0F3;1B2){_OVERLAP}"
        )
    return Overlap(parts=tuple(parse_action(part) for part in inner.split(";")))


def parse_csv(
    text: str,
    *,
    num_microbatches: int | None = None,
    placement: Placement | None = None,
    num_splits: int = 1,
    name: str = "csv",
) -> Program:
    """Read a program, without checking it.

    Args:
        text: one line per rank, steps separated by commas; empty cells and waits are skipped.
        num_microbatches: microbatches per step; None for the highest in the text, plus one.
        placement: the rank of every stage; None to infer it from the computations.
        num_splits: sequence chunks per microbatch, which the text does not contain.
        name: the program's name.

    Raises:
        ScheduleError: a cell is not a step (the message names row and column, from 1), there are no
            steps, the rows are not as many as the ranks, or no placement fits the text.

    Examples:
        >>> program = parse_csv("0F0,,0B0\\n1F0,1B0\\n")
        >>> program.placement.stage_ranks, program.num_microbatches
        ((0, 1), 1)
        >>> format_csv(program)
        '0F0,0B0\\n1F0,1B0\\n'
    """
    reader = csv.reader(io.StringIO(text, newline=None), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        message = f"row {reader.line_num}: not CSV ({error}); steps need no quotes"
        raise _error_at(message, Where(rank=reader.line_num - 1)) from error
    # Trailing empty lines are not ranks, unless the placement has these ranks.
    num_ranks = placement.num_ranks if placement is not None else 1
    while len(rows) > num_ranks and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    ranks = _read_rows(rows)
    acts = [act for steps in ranks for step in steps for act in step.parts]
    microbatches = 1 + max((act.microbatch or 0 for act in acts), default=0)
    stages = 1 + max((act.stage for act in acts), default=0)
    for thing, number in (("stage", stages), ("microbatch", microbatches)):
        if number > len(acts) + _MAY_BE_MISSING:
            has = number_of(len(acts), "action")
            raise ScheduleError(f"{number_of(number, thing)} in a program of {has}")
    if placement is None:
        placement = _placement_of(ranks)
    elif len(ranks) != num_ranks:
        on = number_of(num_ranks, "rank")
        raise ScheduleError(f"{number_of(len(ranks), 'row')}; the placement has {on}")
    return Program(
        name=name,
        placement=placement,
        num_microbatches=microbatches if num_microbatches is None else num_microbatches,
        ranks=ranks,
        num_splits=num_splits,
    )


def format_csv(program: Program) -> str:
    """Format a program: one line per rank, steps separated by commas; inverse of ``parse_csv``."""
    return "".join(",".join(map(str, steps)) + "\n" for steps in program.ranks)


def load_csv(
    path: str | PathLike[str],
    *,
    num_microbatches: int | None = None,
    placement: Placement | None = None,
    num_splits: int = 1,
) -> Program:
    """Read a program from a file, as ``parse_csv``; the file's stem becomes its name.

    Raises:
        ScheduleError: as for ``parse_csv``, or the file is not UTF-8 text.
        OSError: the file can't be read.
    """
    path = Path(path)
    try:
        return parse_csv(
            path.read_text(encoding="utf-8-sig"),
            num_microbatches=num_microbatches,
            placement=placement,
            num_splits=num_splits,
            name=path.stem,
        )
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not a text file in UTF-8 ({error})") from error
    except ScheduleError as error:
        error.args = (f"{path}: {error}",)
        raise


def save_csv(program: Program, path: str | PathLike[str]) -> None:
    """Write a program to a file, as ``format_csv``."""
    refuse_no_program(program, "save_csv()")
    Path(path).write_text(format_csv(program), encoding="utf-8", newline="\n")


def _read_rows(rows: Sequence[Sequence[str]]) -> tuple[tuple[Step, ...], ...]:
    """The steps of each rank; empty cells and waits are skipped."""
    ranks = []
    for rank, cells in enumerate(rows):
        steps: list[Step] = []
        for column, cell in enumerate(cells):
            if not cell or cell.isspace() or is_wait(cell):
                continue
            try:
                steps.append(parse_step(cell))
            except ScheduleError as error:
                message = f"row {rank + 1}, column {column + 1}: {error}"
                raise _error_at(message, Where(rank=rank, action=cell.strip())) from error
        ranks.append(tuple(steps))
    return tuple(ranks)


def _placement_of(ranks: Sequence[Sequence[Step]]) -> Placement:
    """Infer the placement: each stage is on the rank that computes it."""
    placed = [(act, rank) for rank, row in enumerate(ranks) for step in row for act in step.parts]
    holders: dict[int, int] = {}
    for act, rank in placed:
        if act.op in COMPUTE and holders.setdefault(act.stage, rank) != rank:
            raise _error_at(
                f"stage {act.stage} is computed in row {holders[act.stage] + 1} and in row "
                f"{rank + 1}; one rank holds a stage",
                Where(rank=rank, stage=act.stage, action=str(act)),
            )
    missing = set(range(max(holders, default=0) + 1)) - holders.keys()
    if missing:
        raise ScheduleError(
            f"{'' if holders else 'no steps: '}stages {runs_of(sorted(missing))} are computed "
            "nowhere; the placement can't be inferred from the text"
        )
    one = Placement(
        num_ranks=len(ranks), stage_ranks=tuple(holders[stage] for stage in sorted(holders))
    )
    if len(holders) % 2:
        return one
    # Each of two copies of the model takes half of the microbatches.
    two = replace(one, num_directions=2)
    apart = all(a.microbatch is None or two.passes(a.microbatch, a.stage) for a, _ in placed)
    return two if apart else one


def _error_at(message: str, where: Where) -> ScheduleError:
    """An error that names row and column in its message, since its place is for programs."""
    error = ScheduleError(message)
    error.where = where
    return error
