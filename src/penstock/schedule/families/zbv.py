"""ZB-V: zero bubble over a V-shape, in the memory of 1F1B.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, on the way up:

    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

Where tF = tB = tW and M ≥ 2P the ranks' own spans have no bubble, the makespan one of (P - 1) tF.
Each rank holds 2P activations at its peak, each of half the size of a 1F1B stage's. Any P ≥ 1,
M ≥ 1; below 2P microbatches the V isn't full, and bubbles appear.

Source: arXiv:2401.10241, sec. 6 and its appendix on ZB-V.
"""

from __future__ import annotations

from penstock.schedule.families.common import Phases, phased_v
from penstock.schedule.program import Program

__all__ = ["zbv"]


def zbv(*, ranks: int, microbatches: int) -> Program:
    """Zero bubble over a V-shape, in the memory of 1F1B."""
    return phased_v("zbv", ranks, microbatches, _phases)


def _phases(rank: int, ranks: int, microbatches: int) -> Phases:
    above = ranks - 1 - rank
    return [
        (2 * above + 1, "F0"),
        (rank, "F1 F0"),
        (above + 1, "F1 I1 W"),
        (microbatches - ranks - above, "F0 I0 W F1 I1 W"),
        (above, "I0 W F1 I1 W"),
        (rank, "I0 I1"),
        (above + 1, "I0 W"),
        (2 * rank, "W"),
    ]
