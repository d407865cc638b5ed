"""Dropout over real processes and gloo: with ``microbatch_rng`` the masks are the plain loop's."""

from __future__ import annotations

import pytest

from tests.dropout import compare_dropout
from tests.processes import run_ranks

# A rank whose comparison fails leaves the others waiting in the next step.
TIMEOUT_S = 20.0
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv")


def train(rank: int, num_ranks: int) -> None:
    """Hold each schedule's steps against the plain loop."""
    for schedule in SCHEDULES:
        compare_dropout(6, schedule=schedule, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("ranks", [2, 3])
def test_masks_are_the_plain_loops(ranks: int) -> None:
    for outcome in run_ranks(train, ranks, timeout_s=150):
        outcome.result()
