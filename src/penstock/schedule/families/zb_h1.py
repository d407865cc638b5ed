"""ZB-H1: 1F1B with a split backward, in no more memory.

P = 3, M = 5 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Weight gradients trail the input gradients by r on rank r: ranks that are done first with their
forwards have them left for the end. The bubble is (P - 1)(tF + tB - tW) where tW is neither above
tF nor above tB and M ≥ 2P (with equal costs, M ≥ P): a third of 1F1B's where costs are equal.
Each rank holds min(M, P) activations at its peak, as rank 0 does in 1F1B.

Any P ≥ 1, M ≥ 1. Interleaved zero bubble is the same over several stages per rank.

Source: arXiv:2401.10241, sec. 2.2.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.families.interleaved_zb import interleaved_zb
from penstock.schedule.program import Program

__all__ = ["zb_h1"]


def zb_h1(*, ranks: int, microbatches: int) -> Program:
    """Interleaved zero bubble with one stage per rank.

    Example:
        >>> " ".join(map(str, zb_h1(ranks=2, microbatches=3).ranks[1]))
        '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2'
    """
    return replace(interleaved_zb(ranks=ranks, microbatches=microbatches, virtual=1), name="zb-h1")
