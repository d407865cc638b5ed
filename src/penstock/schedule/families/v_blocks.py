"""What the families of repeated blocks over a V share: a V's gaps, and the program of a block.

This module knows no family: each says in its own file what its block looks like.

Source: arXiv:2405.15362, sec. 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.action import Op
from penstock.schedule.families.repeating import place_block, repeat
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.placement import v_shape
from penstock.schedule.program import Program

__all__ = ["Hops", "repeated_v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """The least time from a pass's start to the start of the next one, in units of a forward.

    Args:
        legs: from rank to rank: of forwards on the way down, of forwards on the way up, and of
            backwards along each of them.
        turns: where both are on one rank: at the foot of the V, at the model's end, and at the
            foot again.
    """

    legs: tuple[int, int, int, int]
    turns: tuple[int, int, int] = (1, 1, 1)

    def gaps(self, ranks: int) -> list[int]:
        """The gaps between all passes of a microbatch, one after the other."""
        gaps = [self.legs[0]] * (ranks - 1)
        for turn, leg in zip(self.turns, self.legs[1:], strict=True):
            gaps += [turn, *[leg] * (ranks - 1)]
        return gaps


def repeated_v(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    hops: Hops,
    limit: int,
    spare: int,
    backward: Op = Op.INPUT_GRAD,
    overtake: bool = False,
) -> Program:
    """A block over a V, started over every six units (two forwards and backwards), and scheduled.

    Args:
        name: the family's.
        ranks: number of ranks.
        microbatches: number of microbatches.
        hops: the block's.
        limit: the most activations that a rank may hold.
        spare: how many of those a forward run ahead of its turn leaves free.
        backward: INPUT_GRAD or FULL_BACKWARD.
        overtake: whether backwards may go ahead of their turn too.

    Example:
        >>> program = repeated_v(
        ...     "v-min", ranks=1, microbatches=2, hops=Hops(legs=(1, 1, 1, 1)), limit=2, spare=1
        ... )
        >>> " ".join(map(str, program.ranks[0]))
        '0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1'
    """
    placement = v_shape(ranks)
    block = place_block(placement, gaps=hops.gaps(ranks), interval=6, backward=backward)
    scheduled = list_schedule(
        placement,
        repeat(block, microbatches=microbatches),
        limit=limit,
        spare=spare,
        overtake=overtake,
    )
    return Program(
        name=name, placement=placement, num_microbatches=microbatches, ranks=scheduled.ranks
    )
