"""Looped breadth-first: GPipe over stages that go round the ranks several times.

P = 2, V = 2, M = 3 (tF = tB = tW = 1); lower case is a rank's second stage:

    rank 0  F0 F1 F2 f0 f1 f2 .. .. .. b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
    rank 1  .. F0 F1 F2 f0 f1 f2 b0 -- b1 -- b2 -- B0 -- B1 -- B2 -- .. ..

All microbatches take a loop before any takes the next. With a chunk as the unit the bubble is
(P - 1)(tF + tB + tW) for every M ≥ P; each rank holds all M·V activations at its peak. Parameters
of a stage are needed in one stretch per direction, which suits sharded parameters.

Any P ≥ 1, V ≥ 1, M ≥ 1. Below P microbatches the loop can't be filled, and costs another
(V - 1)(P - M)(tF + tB + tW).

Backwards run in the order of the forwards, so that gradients are summed in the order of the
microbatches, as one device sums them.

Source: arXiv:2211.05953, sec. 3.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.families.common import chunks, looped_order, program_of
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["looped_bfs"]


def looped_bfs(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """All forwards loop by loop, then all backwards loop by loop.

    Example:
        >>> program = looped_bfs(ranks=2, microbatches=2, virtual=2)
        >>> " ".join(map(str, program.ranks[1]))
        '1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1'
    """
    order = looped_order(virtual=virtual, groups=(microbatches,))
    backward = [(virtual - 1 - loop, microbatch) for loop, microbatch in order]
    placement = looped(ranks, virtual)
    steps = (
        chunks(Op.FORWARD, order, stages=placement.stages_of(rank))
        + chunks(Op.FULL_BACKWARD, backward, stages=placement.stages_of(rank))
        for rank in range(ranks)
    )
    return program_of("looped-bfs", placement, microbatches, steps)
