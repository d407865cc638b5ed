"""1F1B-V: 1F1B over a V-shape, with whole backwards, in two thirds of its memory.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, on the way up:

    rank 0  F0 F1 .. f0 b0 -- f1 b1 -- F2 B0 -- f2 b2 -- F3 B1 -- f3 b3 -- .. B2 -- .. .. B3 --
    rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- F2 f2 b1 -- B1 -- F3 f3 b2 -- B2 -- b3 -- B3 -- .. ..

Every action of the pattern starts as soon as the one before ends, a backward taking two units; a
rank repeats two forwards and two backwards every six units. Each rank holds at most
2⌊(2P + 2) / 3⌋ activations, each of half the size of a 1F1B stage's. Where tF = tB = tW and
M ≥ P the bubble is 5(P - 1) chunks where 3 divides P - 1, and 5P - 6 where 3 divides P - 2; 1F1B's
is 6(P - 1).

Where 3 divides P, the shortest pattern lives 8P + 3 units: one activation more on some rank.
No pattern fits the memory above for P = 3 and 6, and for P = 3 no other order does without
waiting: with M = 4, 5, 6, 8, 10 the least bubble is 13, 14, 15, 18, 20 (by exact search). So ranks
wait in the steady state, one or two units for each microbatch, and from M = 2P on the whole takes
longer than 1F1B, which holds half as much again.

With ``limit=2 * ((2 * P + 2) // 3) + 1``, one activation more, no rank waits: the bubble is 5P - 3
for M ≥ 2P. The default keeps the memory that is published, which no interleaved 1F1B fits; V-Half
and V-Min do, and are faster, where backwards may be split.

Any P ≥ 1, M ≥ 1.

Source: arXiv:2405.15362; the pattern is chosen here.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.families.periodic import v_program
from penstock.schedule.messages import is_count, number_of
from penstock.schedule.program import Program

__all__ = ["one_f_one_b_v"]


def one_f_one_b_v(*, ranks: int, microbatches: int, limit: int | None = None) -> Program:
    """A pattern whose actions follow one another as closely as can be, with full backwards.

    Args:
        limit: the most activations that a rank may hold; None for 2⌊(2P + 2) / 3⌋. What is above
            that by more than one is not used.

    Raises:
        ScheduleError: ``limit`` is below 2⌊(2P + 2) / 3⌋.

    Example:
        >>> " ".join(map(str, one_f_one_b_v(ranks=1, microbatches=2).ranks[0]))
        '0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1'
    """
    least = 2 * ((2 * ranks + 2) // 3)
    limit = least if limit is None else limit
    if not is_count(limit, least):
        on = number_of(ranks, "rank")
        raise ScheduleError(
            f"1f1b-v on {on}: limit={limit!r} activations do not suffice; give {least} or more, a "
            "whole number"
        )
    meets = ranks % 3 == 0
    fits = limit > least or not meets
    return v_program(
        "1f1b-v",
        ranks=ranks,
        microbatches=microbatches,
        legs=(1, 1, 2, 2),
        turns=(2 if meets and fits else 1, 1, 2),
        limit=least + (meets and fits),
        # With too little memory a pattern can continue only if any ready action may run out of
        # order.
        spare=1 if fits else 0,
        overtake=not fits,
        backward=Op.FULL_BACKWARD,
    )
