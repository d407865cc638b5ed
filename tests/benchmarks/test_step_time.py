"""The three ways whose times are compared give the same gradients, for every kind of schedule."""

from __future__ import annotations

import warnings

from benchmarks.step_time import RANKS, TINY, ways_of
from penstock.testing.processes import run_ranks


def run_all(rank: int, num_ranks: int) -> list[list[str]]:
    warnings.simplefilter("ignore")
    # It raises where gradients differ.
    return [list(ways_of(rank, case.schedule, case.virtual, "tiny", True)) for case in TINY]


def test_all_ways_do_the_same_work() -> None:
    for outcome in run_ranks(run_all, RANKS, timeout_s=200):
        assert outcome.result() == [["bare", "penstock", "torch"]] * len(TINY)
