"""Eager 1F1B: 1F1B with twice the warm-up, so that messages travel while ranks compute.

P = 3, M = 4 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

Forwards run 2(P - 1 - r) ahead of backwards on rank r, where 1F1B's run P - 1 - r ahead: in the
steady state two messages, there and back, have the time of a whole forward and backward to come
in. As long as messages that take tC each do, so that 2tC ≤ T = tF + tB + tW, the bubble is
(P - 1) T and 2(P - 1) tC, once; in 1F1B each microbatch pays for its messages. Rank r holds
min(M, 2(P - r) - 1) activations at its peak.

Any P ≥ 1, M ≥ 1.

Source: arXiv:2211.05322 (overlapping-friendly 1F1B).
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating, program_of
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["eager_1f1b"]


def eager_1f1b(*, ranks: int, microbatches: int) -> Program:
    """2(P - 1 - r) forwards on rank r, then one forward and one backward in turn.

    Example:
        >>> " ".join(map(str, eager_1f1b(ranks=2, microbatches=4).ranks[0]))
        '0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3'
    """
    warmups = [2 * (ranks - 1 - rank) for rank in range(ranks)]
    steps = alternating(linear(ranks), groups=(microbatches,), warmups=warmups)
    return program_of("eager-1f1b", linear(ranks), microbatches, steps)
