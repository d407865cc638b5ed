"""Sequences in pieces, over real processes and gloo."""

from __future__ import annotations

from penstock import build
from penstock.testing.processes import run_ranks
from tests.sequences import causal, compare_steps

# A rank whose comparison fails leaves the other waiting in the next step.
TIMEOUT_S = 20.0


def train(rank: int, num_ranks: int) -> None:
    """Hold pipelines of pieces against the plain model, of which every rank has a copy."""
    for microbatches, splits in ((1, 2), (3, 3)):
        program = build("seq1f1b", ranks=num_ranks, microbatches=microbatches, splits=splits)
        compare_steps(causal(4), program, length=6, rows=2, timeout_s=TIMEOUT_S)


def test_gradients_are_those_of_whole_sequences() -> None:
    for outcome in run_ranks(train, 2, timeout_s=120):
        outcome.result()
