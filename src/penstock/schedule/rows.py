"""The rows of a program's text: lines, their cells, and the steps in those.

What is wrong is told by row and column, from 1. This module knows no programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Step
from penstock.schedule.messages import quoted
from penstock.schedule.step_text import parse_step

__all__ = ["cells_of", "lines_of", "read_row", "refuse"]

# A cell in quotes, or up to the next comma; a quote in the former is written twice.
_CELL = re.compile(r'"((?:[^"]|"")*)"|([^",]*)')
_LINE_END = re.compile(r"\r\n|\n|\r")


def lines_of(text: str) -> list[str]:
    """The lines of a text, whatever ends them; behind the last end there is none.

    Example:
        >>> lines_of("0F0\\r\\n\\n"), lines_of("")
        (['0F0', ''], [])
    """
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def cells_of(row: int, line: str, *, source: str) -> list[str]:
    """The texts between a line's commas, without the quotes around them.

    Args:
        row: the line's index, from 0.
        line: without its end.
        source: what messages begin with.

    Raises:
        ScheduleError: a quotation mark that is not around a whole cell.

    Example:
        >>> cells_of(0, '0F0,,"0B0"', source="")
        ['0F0', '', '0B0']
    """
    if '"' not in line:
        return line.split(",")
    cells: list[str] = []
    start = 0
    while start <= len(line):
        cell = _CELL.match(line, start)
        assert cell is not None, "it matches an empty text, too"
        if cell.end() < len(line) and line[cell.end()] != ",":
            place, rest = f"{source}row {row + 1}, column {len(cells) + 1}", quoted(line[start:])
            refuse(
                f"{place}: {rest} has a quotation mark that is not around a whole cell; leave it "
                "out, steps need none",
                Where(rank=row),
            )
        cells.append(cell[2] if cell[1] is None else cell[1].replace('""', '"'))
        start = cell.end() + 1
    return cells


def read_row(row: int, cells: Sequence[str], *, source: str) -> tuple[Step, ...]:
    """The steps of a rank; cells without one are skipped.

    Args:
        row: the rank.
        cells: each a step's text, or blank.
        source: what messages begin with.

    Raises:
        ScheduleError: a cell that is no step.
    """
    steps: list[Step] = []
    for column, cell in enumerate(cells):
        if not cell or cell.isspace():
            continue
        try:
            steps.append(parse_step(cell))
        except ScheduleError as error:
            refuse(
                f"{source}row {row + 1}, column {column + 1}: {error}",
                Where(rank=row, action=cell.strip()),
                cause=error,
            )
    return tuple(steps)


def refuse(message: str, where: Where, *, cause: Exception | None = None) -> NoReturn:
    """Raise an error whose message tells row and column itself, and is not to begin with them.

    Args:
        message: what is wrong, and where.
        where: the place, for programs.
        cause: what was raised first.
    """
    error = ScheduleError(message)
    error.where = where
    raise error from cause
