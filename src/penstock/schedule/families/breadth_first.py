"""All forwards before all backwards: forward-only, GPipe and looped breadth-first.

GPipe, P = 3, M = 4 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
    rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
    rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..

Looped breadth-first, P = 2, V = 2, M = 3; lower case is a rank's second stage:

    rank 0  F0 F1 F2 f0 f1 f2 .. .. .. b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
    rank 1  .. F0 F1 F2 f0 f1 f2 b0 -- b1 -- b2 -- B0 -- B1 -- B2 -- .. ..

All microbatches take a loop before any takes the next; GPipe is V = 1. The bubble is
(P - 1)(tF + tB + tW) chunks for M ≥ P; each rank holds all M·V activations at its peak. Gradients
are summed in the order of one device. A stage's parameters are needed in one stretch per direction,
which suits sharded parameters.

Forward-only, for evaluation, P = 3, V = 1, M = 4, and P = 2, V = 2, M = 4 in groups of P:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3

    rank 0  F0 F1 f0 f1 F2 F3 f2 f3 ..
    rank 1  .. F0 F1 f0 f1 F2 F3 f2 f3

Its bubble is (P - 1) tF for M ≥ P, another (V - 1)(P - M) tF below; each rank holds 1 activation.
Any P ≥ 1, V ≥ 1, M ≥ 1.

Source: GPipe: arXiv:1811.06965, sec. 2.3. Looped breadth-first: arXiv:2211.05953, sec. 3.
Forward-only: the forward half of arXiv:2104.04473, sec. 2.2.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.families.common import even_groups, looped_order, program_of
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["forward_only", "gpipe", "looped_bfs"]


def gpipe(*, ranks: int, microbatches: int) -> Program:
    """All forwards, then all backwards."""
    return replace(looped_bfs(ranks=ranks, microbatches=microbatches, virtual=1), name="gpipe")


def looped_bfs(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """GPipe over stages that go round the ranks several times."""
    placement = looped(ranks, virtual)
    orders = []
    for rank in range(ranks):
        stages = placement.stages_of(rank)
        backwards = [stage + placement.num_stages for stage in reversed(stages)]
        orders.append(looped_order([*stages, *backwards], (microbatches,)))
    return program_of("looped-bfs", placement, microbatches, orders, full=True)


def forward_only(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """Forwards alone, as an evaluation runs them."""
    placement = looped(ranks, virtual)
    groups = even_groups(microbatches, ranks=ranks)
    orders = (looped_order(placement.stages_of(rank), groups) for rank in range(ranks))
    return program_of("forward-only", placement, microbatches, orders)
