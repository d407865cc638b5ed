"""GIS and GIS-H: interleaved zero bubble in the least memory, for a somewhat larger bubble.

GIS, P = 2, V = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage:

    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 .. i3 w3 I2 W2 I3 W3
    rank 1  .. F0 F1 f0 i0 w0 f1 i1 w1 F2 I0 W0 F3 I1 W1 f2 i2 w2 f3 i3 w3 I2 W2 I3 W3 ..

GIS-H, P = 3, V = 2, M = 3:

    rank 0  F0 F1 .. f0 f1 F2 .. .. i0 w0 .. i1 w1 f2 I0 W0 .. I1 W1 i2 w2 .. I2 W2
    rank 1  .. F0 F1 .. f0 f1 .. i0 w0 F2 i1 w1 .. I0 W0 f2 I1 W1 i2 w2 .. I2 W2 ..
    rank 2  .. .. F0 F1 .. f0 i0 w0 f1 i1 w1 F2 I0 W0 I1 W1 f2 i2 w2 .. I2 W2 .. ..

Forwards and input gradients alternate as in interleaved zero bubble, but each weight gradient
follows its input gradient at once, which frees the activation.

    gis     groups of g = P         bubble (P - 1)(tF + tB)     PV - r activations on rank r
    gis-h   groups of g = ⌈P / 2⌉   larger                      g(V - 1) + P - r, about half of what
                                                                interleaved 1F1B holds

Groups of g that divide M, P / 2 ≤ g ≤ P, have in chunks a bubble of

    (P - 1)(tF + tB) + (V - 1)((P - g) tF + max(0, (P - g) tB - g tW))

where P · max(tF, tB) ≤ g(tF + tB + tW) and tW ≤ tF + tB, and for g = P with any costs: at each turn
of the loop the first rank waits for forwards to come round, and the last for input gradients.

Groups that don't divide M are made as even as can be, none above g and only the last below ⌈P / 2⌉.
Any P ≥ 1, V ≥ 1, M ≥ 1 and groups from ⌊P / 2⌋ on; smaller groups would deadlock.

Source: arXiv:2503.01328 (generalized interleaved schedule).
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating
from penstock.schedule.family import refuse_option
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["gis", "gis_h"]


def gis(*, ranks: int, microbatches: int, virtual: int, group: int | None = None) -> Program:
    """Interleaved zero bubble in less memory, for a larger bubble.

    Args:
        group: the most microbatches that go round together; None for ``ranks``.

    Raises:
        ScheduleError: ``group`` is below half of ``ranks``.
    """
    return _grouped("gis", ranks, microbatches, virtual, ranks if group is None else group)


def gis_h(*, ranks: int, microbatches: int, virtual: int, group: int | None = None) -> Program:
    """GIS in groups of P / 2: about half the memory of interleaved 1F1B.

    Args:
        group: as for ``gis``; None for half of ``ranks``, rounded up.

    Raises:
        ScheduleError: ``group`` is below half of ``ranks``.
    """
    half = -(-ranks // 2)
    return _grouped("gis-h", ranks, microbatches, virtual, half if group is None else group)


def _grouped(name: str, ranks: int, microbatches: int, virtual: int, group: int) -> Program:
    least = max(1, ranks // 2)
    refuse_option(name, "group", group, least)
    number = -(-microbatches // group)
    # As even as possible, but not so small that ranks wait at the turn of the loop.
    group = min(group, max(-(-microbatches // number), -(-ranks // 2)))
    groups = (group,) * number
    return alternating(name, looped(ranks, virtual), microbatches, groups=groups, ahead=1, behind=0)
