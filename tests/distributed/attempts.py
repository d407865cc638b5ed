"""What a rank makes of an attempt: did it raise, what, and how soon?

Each attempt gets a process group of its own: a failed one leaves broken connections behind, and
many can then follow each other in the same processes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PenstockError
from tests.processes import run_ranks

Run = Callable[[], object]
Case = Callable[[int, dist.ProcessGroup], list[Run]]
"""Given the rank and a group: what this rank does, one attempt after the other."""

SOON_S = 5.0
DIM = 4


class Attempt(NamedTuple):
    """How a call ended.

    Fields: the exception's class name, or None; its message; its place; class name and message
    of its ``__cause__``; how long the call took.
    """

    kind: str | None
    message: str
    where: tuple[int | None, int | None, int | None, str | None]
    cause: str | None
    elapsed_s: float


def attempt(run: Run) -> Attempt:
    """Call ``run``; whatever it raises is noted, Ctrl-C included."""
    start = time.monotonic()
    try:
        run()
    except BaseException as error:
        where = (None, None, None, None)
        if isinstance(error, PenstockError):
            where = (error.rank, error.stage, error.microbatch, error.action)
        cause = None if error.__cause__ is None else repr(error.__cause__)
        elapsed_s = time.monotonic() - start
        return Attempt(type(error).__name__, str(error), where, cause, elapsed_s)
    return Attempt(None, "", (None, None, None, None), None, time.monotonic() - start)


class At(nn.Module):
    """A linear layer that does something at its ``after``-th forward, from 0."""

    def __init__(self, act: Callable[[], object], after: int) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.act = act
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            self.act()
        out: Tensor = self.inner(x)
        return out


def play_cases(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[list[tuple[Any, ...]]]:
    """Per case, this rank's attempts (as plain tuples, to cross between processes)."""
    told = []
    for case in cases:
        group = dist.new_group(list(range(num_ranks)))
        told.append([tuple(attempt(run)) for run in case(rank, group)])
    return told


def attempts_of(
    cases: Sequence[Case], num_ranks: int, launches: int = 4
) -> list[list[list[Attempt]]]:
    """Per case, per rank, its attempts, over real processes in so many launches at once."""
    # Ranks mostly wait for one that failed: launches don't disturb each other.
    attempts: list[Any] = [None] * len(cases)
    parts = [slice(first, None, launches) for first in range(min(launches, len(cases)))]
    with ThreadPoolExecutor(len(parts)) as pool:
        for part, found in pool.map(lambda p: (p, _attempts_in(cases[p], num_ranks)), parts):
            attempts[part] = found
    return attempts


def _attempts_in(cases: Sequence[Case], num_ranks: int) -> list[list[list[Attempt]]]:
    """The same in one set of processes."""
    outcomes = run_ranks(play_cases, num_ranks, list(cases), timeout_s=30 + 2 * len(cases))
    by_rank = [outcome.result() for outcome in outcomes]
    return [[[Attempt(*told) for told in ranks[i]] for ranks in by_rank] for i in range(len(cases))]


def played(
    cases: tuple[Case, ...], num_ranks: int, launches: int = 4
) -> dict[Case, list[list[Attempt]]]:
    """As ``attempts_of``, by case; run once, however many tests look at it.

    Args:
        cases: the cases.
        num_ranks: the number of ranks.
        launches: the number of launches at once; cases of one run one after the other.
    """
    told = _played_once(cases, num_ranks, launches)
    if isinstance(told, AssertionError):
        raise told
    return told


@functools.cache
def _played_once(
    cases: tuple[Case, ...], num_ranks: int, launches: int
) -> dict[Case, list[list[Attempt]]] | AssertionError:
    # A run that hangs is not run again for every test that looks at it.
    try:
        return dict(zip(cases, attempts_of(cases, num_ranks, launches), strict=True))
    except AssertionError as error:
        return error
