"""ZB-H2: no bubble from a rank's first start to its last end, for twice the memory.

P = 3, M = 6 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

The warm-up is filled with 2(P - 1 - r) + 1 forwards on rank r, and weight gradients trail the
input gradients by 2r, which fill the cool-down. The ranks' spans have a bubble of
(P - 1)(tF + tB - 2 tW) where tW is not above tF nor 2 tW above tF + tB: none where costs are
equal, for M ≥ 2P - 1. The step as a whole has one of (P - 1)(tF + max(0, tB - 2 tW)), for the last
rank starts (P - 1) tF late; the next step's warm-up fills that if ranks need not wait for one
another. Each rank holds min(M, 2P - 1) activations.

Any P ≥ 1, M ≥ 1; below 2P - 1 microbatches the warm-up can't be filled, and bubbles appear.

Source: arXiv:2401.10241, sec. 2.2.
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating, program_of
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["zb_h2"]


def zb_h2(*, ranks: int, microbatches: int) -> Program:
    """Forwards and input gradients in turn, with weight gradients 2r behind on rank r.

    Example:
        >>> " ".join(map(str, zb_h2(ranks=2, microbatches=3).ranks[1]))
        '1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2'
    """
    steps = alternating(
        linear(ranks),
        groups=(microbatches,),
        warmups=[2 * (ranks - 1 - rank) for rank in range(ranks)],
        behind=[2 * rank for rank in range(ranks)],
    )
    return program_of("zb-h2", linear(ranks), microbatches, steps)
