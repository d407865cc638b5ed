"""The three ways whose times are compared give the same gradients, for every kind of schedule."""

from __future__ import annotations

import warnings

import pytest
import torch

from benchmarks.step_time import RANKS, TINY, ways_of
from tests.processes import run_ranks


def run_all(rank: int, num_ranks: int) -> list[list[str]]:
    warnings.simplefilter("ignore")
    # It raises where gradients differ.
    return [list(ways_of(rank, case.schedule, case.virtual, "tiny", True, 8)) for case in TINY]


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11's own V schedules end in an error"
)
def test_all_ways_do_the_same_work() -> None:
    for outcome in run_ranks(run_all, RANKS, timeout_s=200):
        assert outcome.result() == [["bare", "penstock", "torch"]] * len(TINY)
