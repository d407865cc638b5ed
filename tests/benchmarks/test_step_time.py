"""The three ways whose times are compared give the same gradients, for every kind of schedule."""

from __future__ import annotations

from benchmarks.step_time import COMPUTE_BOUND, RANKS, TINY, time_ways
from penstock.testing.processes import run_ranks


def run_all(rank: int, num_ranks: int) -> list[list[str]]:
    # time_ways raises where gradients differ, before anything is timed.
    return [
        list(time_ways(rank, num_ranks, case.schedule, case.virtual, "tiny", True, 1, 1))
        for case in (*TINY, *COMPUTE_BOUND)
    ]


def test_all_ways_do_the_same_work() -> None:
    for outcome in run_ranks(run_all, RANKS, timeout_s=200):
        assert outcome.result() == [["bare", "penstock", "torch"]] * 9
