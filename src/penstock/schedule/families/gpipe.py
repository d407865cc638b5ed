"""GPipe: all forwards, then all backwards.

P = 3, M = 4 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
    rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
    rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..

Bubble (P - 1)(tF + tB + tW); rank r holds M activations at its peak. Any P ≥ 1, M ≥ 1.

Backwards run in the order of the forwards, so that gradients are summed in the order of the
microbatches, as one device sums them.

Source: arXiv:1811.06965, sec. 2.3.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.families.common import chunks, program_of
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["gpipe"]


def gpipe(*, ranks: int, microbatches: int) -> Program:
    """All forwards, then all backwards, on one stage per rank.

    Example:
        >>> " ".join(map(str, gpipe(ranks=2, microbatches=2).ranks[1]))
        '1F0 1F1 1B0 1B1'
    """
    order = [(0, microbatch) for microbatch in range(microbatches)]
    steps = (
        chunks(Op.FORWARD, order, stages=(rank,)) + chunks(Op.FULL_BACKWARD, order, stages=(rank,))
        for rank in range(ranks)
    )
    return program_of("gpipe", linear(ranks), microbatches, steps)
