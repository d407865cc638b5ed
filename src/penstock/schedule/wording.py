"""Shared wording of messages: counts of things, and problems of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

__all__ = ["Problem", "is_count", "number_of", "numbers_of", "runs_of"]

# The number of runs beyond which a message is cut.
_MOST_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fault of a program: its rank, the index of the step there, and the step (or the missing
    action) in text form, each None if not about a single one; and a message."""

    rank: int | None
    step: int | None
    action: str | None
    message: str

    def __str__(self) -> str:
        """``rank 1, step 3 (1F0): ...``, without the parts of the place that are None."""
        place = [] if self.rank is None else [f"rank {self.rank}"]
        if self.step is not None:
            place.append(f"step {self.step} ({self.action})")
        return f"{', '.join(place)}: {self.message}" if place else self.message


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """True for a whole number from ``least`` on; False for bools."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number_of(number: int, thing: str) -> str:
    """A count of things, in words, as '1 rank', '2 microbatches' and '0 copies'."""
    if number == 1:
        return f"1 {thing}"
    if thing.endswith("y"):
        return f"{number} {thing[:-1]}ies"
    return f"{number} {thing}{'es' if thing.endswith('ch') else 's'}"


def numbers_of(**numbers: int) -> str:
    """Counts of several things by noun, as '4 ranks, 1 microbatch'."""
    return ", ".join(number_of(number, thing) for thing, number in numbers.items())


def runs_of(numbers: Sequence[int]) -> str:
    """Rising numbers as text: the first few runs of consecutive numbers, and a count of the rest.

    Examples:
        >>> runs_of([0, 2, 3]), runs_of(range(0, 100, 2))
        ('0, 2 to 3', '0, 2, 4, 6, 8 and 45 more')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    left = sum(map(len, runs[_MOST_RUNS:]))
    return ", ".join(shown[:_MOST_RUNS]) + (f" and {left} more" if left else "")
