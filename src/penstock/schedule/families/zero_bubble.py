"""ZB-H1, ZB-H2, interleaved zero bubble and ZB-V: weight gradients fill a split backward's gaps.

ZB-H1, P = 3, M = 5 (tF = tB = tW = 1), in the memory of 1F1B:

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Interleaved zero bubble, P = 2, V = 2, M = 4; lower case is a rank's second stage. ZB-H1 is V = 1:

    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3

ZB-H2, P = 3, M = 6, with no bubble from a rank's first start to its last end, for twice the memory:

    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

ZB-V, P = 2, M = 4, over a V-shape; lower case is a rank's second stage, on the way up:

    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

In the others weight gradients trail the input gradients by r on rank r (2r for ZB-H2), so ranks
that finish their forwards first keep them for the end. Groups of microbatches go round as in
interleaved 1F1B, the largest of size G. Peaks, and bubbles in chunks, where tW ≤ tF and tW ≤ tB:

                      activations held        bubble
    interleaved-zb    min(VM, (V - 1)G + P)   (P - 1)(tF + tB - tW), for M ≥ 2P (equal costs: M ≥ P)
    zb-h1             min(M, P)               the same
    zb-h2             min(M, 2P - 1)          (P - 1) tF, for M ≥ 2P - 1; the next step's warm-up
                                              fills it if ranks need not wait for one another
    zbv               2P, each of half size   (P - 1) tF, none in the ranks' own spans, for M ≥ 2P
                                              and equal costs

In general ZB-H2's bubble is (P - 1)(tF + max(0, tB - 2 tW)), and (P - 1)(tF + tB - 2 tW) in the
ranks' own spans, where tW ≤ tF and 2 tW ≤ tF + tB. Given costs, ZB-V's
weight gradients move to where they fill idle time, if that shortens the ranks' spans. Any P ≥ 1,
V ≥ 1, M ≥ 1.

Source: arXiv:2401.10241, sec. 2.2, over the loops of arXiv:2104.04473, sec. 2.2; ZB-V: sec. 6.
"""

from __future__ import annotations

from typing import Any

from penstock.schedule.families.common import Phases, alternating, even_groups, phased_v, program_of
from penstock.schedule.families.costed import CostedStep
from penstock.schedule.placement import linear, looped
from penstock.schedule.program import Program

__all__ = ["interleaved_zb", "zb_h1", "zb_h2", "zbv"]


def zb_h1(*, ranks: int, microbatches: int) -> Program:
    """1F1B with a split backward, in no more memory."""
    return alternating("zb-h1", linear(ranks), microbatches, ahead=1, behind=1)


def interleaved_zb(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """The backward is split, and weight gradients fill the gaps."""
    groups, placement = even_groups(microbatches, ranks=ranks), looped(ranks, virtual)
    return alternating("interleaved-zb", placement, microbatches, groups=groups, ahead=1, behind=1)


def zb_h2(*, ranks: int, microbatches: int) -> Program:
    """No bubble from a rank's first start to its last end, for twice the memory."""
    return alternating("zb-h2", linear(ranks), microbatches, ahead=2, behind=2)


def zbv(*, ranks: int, microbatches: int, **costs: Any) -> Program:
    """Zero bubble over a V-shape, in the memory of 1F1B."""
    program = phased_v("zbv", ranks, microbatches, _phases)
    if not costs:
        return program
    step = CostedStep("zbv", program.placement, microbatches, 2 * ranks, **costs)
    step.add(step.work.order(program))
    if step.is_done:
        return program
    forwards_and_backwards = [[kind for kind in kinds if kind < 4 * ranks] for kinds in step.order]
    step.add_filled(forwards_and_backwards)
    return program_of("zbv", program.placement, microbatches, step.order)


def _phases(rank: int, ranks: int, microbatches: int) -> Phases:
    """The phases of ZB-V on a rank."""
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
