"""Interleaved 1F1B: 1F1B over stages that go round the ranks several times.

P = 2, V = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage:

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

Source: arXiv:2104.04473, sec. 2.2; for groups of other sizes than P: arXiv:2407.21783, sec. 3.3.2.
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating, even_groups
from penstock.schedule.family import refuse_option
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(
    *, ranks: int, microbatches: int, virtual: int, group: int | None = None
) -> Program:
    """1F1B over stages that go round the ranks several times.

    Args:
        group: the most microbatches that go round together; None for ``ranks`` or as few more as
            keep every rank busy.

    Raises:
        ScheduleError: ``group`` is below ``ranks`` or above ``microbatches``.
    """
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
