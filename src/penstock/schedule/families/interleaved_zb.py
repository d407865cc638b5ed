"""Interleaved zero bubble: the backward is split, and weight gradients fill the gaps.

P = 3, V = 1, M = 5 (tF = tB = tW = 1), which is also called ZB-H1:

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

P = 2, V = 2, M = 4; lower case is a rank's second stage:

    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3

Forwards and input gradients alternate as in interleaved 1F1B, but with a warm-up shorter by
P - 1 - r, since an input gradient comes back sooner than a full backward. On rank r the weight
gradients trail the input gradients by r, so that the ranks that are done first with their
forwards have them left for the end, where they would else wait.

With a chunk as the unit the bubble is (P - 1)(tF + tB - tW) where tW is neither above tF nor above
tB, and M ≥ 2P (with equal costs, M ≥ P).
Rank r holds (V - 1)·G + P activations at its peak (at most V·M), G being the largest of the groups
in which microbatches go round (as in interleaved 1F1B): P·V where P divides M.

Any P ≥ 1, V ≥ 1, M ≥ 1.

Source: arXiv:2401.10241, sec. 2.2 (ZB-H1), over the loops of arXiv:2104.04473, sec. 2.2.
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating, even_groups, program_of
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["interleaved_zb"]


def interleaved_zb(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """Forwards and input gradients in turn, with weight gradients r behind on rank r.

    Example:
        >>> program = interleaved_zb(ranks=2, microbatches=3, virtual=1)
        >>> " ".join(map(str, program.ranks[1]))
        '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2'
    """
    placement = looped(ranks, virtual)
    groups = even_groups(microbatches=microbatches, group=ranks)
    ahead = (virtual - 1) * max(groups)
    steps = alternating(
        placement,
        groups=groups,
        warmups=[ahead + ranks - 1 - rank for rank in range(ranks)],
        behind=range(ranks),
    )
    return program_of("interleaved-zb", placement, microbatches, steps)
