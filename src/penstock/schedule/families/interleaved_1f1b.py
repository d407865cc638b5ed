"""Interleaved 1F1B: 1F1B over stages that go round the ranks several times.

P = 2, V = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage:

    rank 0  F0 F1 f0 f1 F2 .. b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .. b2 -- .. b3 -- B2 -- B3 --
    rank 1  .. F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .. ..

Microbatches go round in groups: a group takes all V loops before the next one starts. The unit
being a chunk (one stage of one microbatch), the bubble is (P - 1)(tF + tB + tW) for every M ≥ P:
a share of (P - 1) / (V·M) of the work. Rank r holds (V - 1)·G + 2 (P - 1 - r) + 1 activations at
its peak (at most V·M), G being the largest group.

A group of P is the least that keeps every rank busy at the turn of the loop. A larger group asks
for fewer, longer loops: more memory, and a longer time from a result to its use on the next rank,
in which messages can travel. What doesn't fill a group of its own is, without ``group``, spread
evenly over the others, which become larger than P: no bubble is lost, for some memory. With
``group`` none is larger: the last one takes what is left over; or, if that is less than P, groups
are made as even as can be; or, if that would leave them below P, the last one is that small, and
its ranks wait, up to (V - 1)(P - rest)(tF + tB + tW) in all, for a peak as above:

    P = 4    M = 9: 5 4              group 6    M = 16: 6 6 4    M = 14: 5 5 4    M = 7: 6 1

Any P ≥ 1, V ≥ 1, M ≥ 1. Below P microbatches the loop can't be filled, and costs another
(V - 1)(P - M)(tF + tB + tW).

Source: arXiv:2104.04473, sec. 2.2; for groups of other sizes than P: arXiv:2407.21783, sec. 3.3.2.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.families.common import alternating, even_groups, first_microbatches
from penstock.schedule.messages import is_count, number_of
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(
    *, ranks: int, microbatches: int, virtual: int, group: int | None = None
) -> Program:
    """One forward and one backward in turn, over ``virtual`` stages per rank.

    Args:
        group: the most microbatches that go round together; None for ``ranks`` or as few more as
            keep every rank busy.

    Raises:
        ScheduleError: ``group`` is below ``ranks`` or above ``microbatches``.

    Example:
        >>> program = interleaved_1f1b(ranks=2, microbatches=2, virtual=2)
        >>> " ".join(map(str, program.ranks[1]))
        '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    if group is not None and not (is_count(group, ranks) and group <= microbatches):
        raise ScheduleError(
            f"interleaved-1f1b on {number_of(ranks, 'rank')}: group={group!r} does not work; give "
            f"a whole number from {ranks} to {microbatches} (the microbatches), or leave it out"
        )
    if group is None:
        groups = even_groups(microbatches=microbatches, group=ranks)
    else:
        groups = _groups(ranks, microbatches, group)
    placement = looped(ranks, virtual)
    ahead = (virtual - 1) * max(groups)
    warmups = [ahead + 2 * (ranks - 1 - rank) for rank in range(ranks)]
    steps = alternating(placement, groups=groups, warmups=warmups)
    return first_microbatches(
        steps, name="interleaved-1f1b", placement=placement, microbatches=microbatches
    )


def _groups(ranks: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Groups of at most ``group``, the last one uneven; their sum may exceed ``microbatches``."""
    full, rest = divmod(microbatches, group)
    if rest == 0 or rest >= ranks:
        return (group,) * full + (rest,) * (rest > 0)
    number = full + 1
    if microbatches >= number * ranks:
        size, larger = divmod(microbatches, number)
        return (size + 1,) * larger + (size,) * (number - larger)
    return (group,) * number
