"""One launch of ranks for several cases of a test, which then share what each process warms up."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable
from typing import Any

from tests.processes import run_ranks

__all__ = ["results_of"]

Case = tuple[Hashable, ...]
"""The arguments of a case, after the rank and the number of ranks."""


def results_of(
    work: Callable[..., Any], num_ranks: int, cases: tuple[Case, ...], case: Case
) -> list[Any]:
    """What ``work`` returns for a case, by rank; all ``cases`` run once, in one launch.

    Raises:
        AssertionError: it raised on some rank.
    """
    found = []
    for rank, by_case in enumerate(_launched(work, num_ranks, cases)):
        error, value = by_case[cases.index(case)]
        assert not error, f"rank {rank}: {error}"
        found.append(value)
    return found


@functools.cache
def _launched(work: Callable[..., Any], num_ranks: int, cases: tuple[Case, ...]) -> list[Any]:
    outcomes = run_ranks(_run, num_ranks, work, cases, timeout_s=60 + 20 * len(cases))
    return [outcome.result() for outcome in outcomes]


def _run(
    rank: int, num_ranks: int, work: Callable[..., Any], cases: tuple[Case, ...]
) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for case in cases:
        try:
            found.append(("", work(rank, num_ranks, *case)))
        except Exception:
            found.append((traceback.format_exc(), None))
    return found
