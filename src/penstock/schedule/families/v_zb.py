"""V-ZB: zero bubble by a periodic pattern over a V-shape, in the memory of 1F1B.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, on the way up:

    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 f3 i3 I2 w3 I3 W2 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3

A pattern's actions come 1 after one another on the way down and 5 on the way up, there and back, so
that every stage's activations live 12P units together: as long as six units per microbatch can
carry without any rank ever waiting. Where tF = tB = tW and M ≥ 2P the ranks' own spans have no
bubble at all, the makespan one of (P - 1) tF. Each rank holds 2P activations at its peak (at most
2M), each of half the size of a 1F1B stage's. ZB-V reaches the same by hand-made phases.

Any P ≥ 1, M ≥ 1; below 2P microbatches bubbles appear.

Source: arXiv:2405.15362, sec. 3.
"""

from __future__ import annotations

from penstock.schedule.families.periodic import v_program
from penstock.schedule.program import Program

__all__ = ["v_zb"]


def v_zb(*, ranks: int, microbatches: int) -> Program:
    """A pattern whose activations live twice as long as V-Half's.

    Example:
        >>> " ".join(map(str, v_zb(ranks=1, microbatches=1).ranks[0]))
        '0F0 1F0 1I0 0I0 1W0 0W0'
    """
    return v_program(
        "v-zb",
        ranks=ranks,
        microbatches=microbatches,
        legs=(1, 5, 1, 5),
        limit=2 * ranks,
        spare=0,
    )
