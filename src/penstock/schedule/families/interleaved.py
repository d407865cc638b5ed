"""Interleaved 1F1B, GIS and GIS-H: stages go round the ranks several times.

Interleaved 1F1B, P = 2, V = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage:

    rank 0  F0 F1 f0 f1 F2 .. b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .. b2 -- .. b3 -- B2 -- B3 --
    rank 1  .. F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .. ..

Microbatches go round in groups: a group takes all V loops before the next one starts. The bubble is
(P - 1)(tF + tB + tW) chunks for M ≥ P: a share of (P - 1) / (V·M) of the work. Rank r holds
(V - 1)·G + 2 (P - 1 - r) + 1 activations at its peak (at most V·M), G being the largest group.

P is the smallest group that keeps every rank busy at the turn of the loop. Larger groups give
messages more time, for more memory. Without ``group``, leftover microbatches are spread over groups
of at least P. With ``group`` as the maximum, the last group takes the leftovers; if they are less
than P, groups are made even; if these would be below P, the last group stays small and its ranks
wait, up to (V - 1)(P - rest)(tF + tB + tW) in all:

    P = 4    M = 9: 5 4              group 6    M = 16: 6 6 4    M = 14: 5 5 4    M = 7: 6 1

Any P ≥ 1, V ≥ 1, M ≥ 1; M below P costs another (V - 1)(P - M)(tF + tB + tW).

GIS, P = 2, V = 2, M = 4, is interleaved zero bubble in the least memory, for a larger bubble:

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

Source: arXiv:2104.04473, sec. 2.2; for groups of other sizes than P: arXiv:2407.21783, sec. 3.3.2.
GIS: arXiv:2503.01328 (generalized interleaved schedule).
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating, even_groups
from penstock.schedule.family import refuse_option
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["gis", "gis_h", "interleaved_1f1b"]


def interleaved_1f1b(
    *, ranks: int, microbatches: int, virtual: int, group: int | None = None
) -> Program:
    """1F1B over stages that go round the ranks several times."""
    if group is None:
        groups = even_groups(microbatches, ranks=ranks)
    else:
        refuse_option("interleaved-1f1b", "group", group, ranks, microbatches)
        groups = _groups(ranks, microbatches, group)
    return alternating(
        "interleaved-1f1b", looped(ranks, virtual), microbatches, groups=groups, ahead=2
    )


def _groups(ranks: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Groups of at most ``group``, the last one uneven; their sum may exceed ``microbatches``."""
    full, rest = divmod(microbatches, group)
    if rest == 0 or rest >= ranks:
        return (group,) * full + (rest,) * (rest > 0)
    number = full + 1
    if microbatches >= number * ranks:
        return even_groups(microbatches, ranks=ranks, number=number)
    return (group,) * number


def gis(*, ranks: int, microbatches: int, virtual: int, group: int | None = None) -> Program:
    """Interleaved zero bubble in less memory, for a larger bubble."""
    return _grouped("gis", ranks, microbatches, virtual, ranks if group is None else group)


def gis_h(*, ranks: int, microbatches: int, virtual: int, group: int | None = None) -> Program:
    """GIS in groups of P / 2: about half the memory of interleaved 1F1B."""
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
