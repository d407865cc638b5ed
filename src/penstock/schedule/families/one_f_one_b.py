"""1F1B: after its warm-up a rank runs one forward and one backward in turn.

P = 3, M = 4 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

Bubble (P - 1)(tF + tB + tW), as GPipe's; rank r holds min(M, P - r) activations at its peak,
however many microbatches there are. Any P ≥ 1, M ≥ 1.

Source: arXiv:2007.01045 (DAPPLE), sec. 3; arXiv:1806.03377 (PipeDream), sec. 3.2, with a flush.
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating, program_of
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["one_f_one_b"]


def one_f_one_b(*, ranks: int, microbatches: int) -> Program:
    """P - 1 - r forwards on rank r, then one forward and one backward in turn.

    Example:
        >>> " ".join(map(str, one_f_one_b(ranks=2, microbatches=2).ranks[0]))
        '0F0 0F1 0B0 0B1'
    """
    warmups = [ranks - 1 - rank for rank in range(ranks)]
    steps = alternating(linear(ranks), groups=(microbatches,), warmups=warmups)
    return program_of("1f1b", linear(ranks), microbatches, steps)
