"""Chimera: two 1F1B pipelines in opposite directions, each in the other's bubbles.

P = 4, M = 4 (tF = tB = tW = 1). Even microbatches go down through stages 0 to 3, odd ones (lower
case) up through stages 4 to 7, which are the model's stages 0 to 3 again: every rank holds two
stages, and the weights are there twice:

    rank 0  F0 F2 .. f1 b1 -- f3 b3 -- .. B0 -- .. .. B2 --
    rank 1  .. F0 f1 F2 f3 .. b1 -- B0 -- b3 -- B2 -- .. ..
    rank 2  .. f1 F0 f3 F2 .. B0 -- b1 -- B2 -- b3 -- .. ..
    rank 3  f1 f3 .. F0 B0 -- F2 B2 -- .. b1 -- .. .. b3 --

A unit is P microbatches, half of them in each direction; both directions are 1F1B, laid over each
other in slots of one forward or one backward. Further units follow 2P slots behind one another,
so that the forwards of one fill the bubble at the end of the one before.

For M = P the bubble is (P - 2)·max(tF, tB + tW), where 1F1B's is (P - 1)(tF + tB + tW). Ranks hold
P/2 + 1 activations (the outermost) to P (those in the middle) at their peaks. After a step the
gradients of the two copies are summed, once for each of the P/2 pairs of ranks that hold the same
stages.

P even, M ≥ 2.

Source: arXiv:2107.06925, sec. 3.1 and 3.3 (direct concatenation).
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import bidirectional
from penstock.schedule.program import Program

__all__ = ["chimera", "nearest"]


def nearest(ranks: int, microbatches: int) -> tuple[int, int]:
    """The nearest numbers that Chimera works with.

    Example:
        >>> nearest(4, 5), nearest(3, 1)
        ((4, 5), (4, 2))
    """
    return ranks + ranks % 2, max(microbatches, 2)


def chimera(*, ranks: int, microbatches: int) -> Program:
    """Each rank's steps by the slots that they have in their own direction.

    Args:
        ranks: number of ranks, even.
        microbatches: number of microbatches, at least 2.

    Example:
        >>> " ".join(map(str, chimera(ranks=2, microbatches=4).ranks[0]))
        '0F0 3F1 3B1 0B0 0F2 3F3 3B3 0B2'
    """
    placement = bidirectional(ranks)
    steps: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in range(ranks)]
    for stage in range(placement.num_stages):
        copy, place = placement.copy_of(stage), placement.model_stage(stage)
        for microbatch in range(copy, microbatches, 2):
            unit, within = divmod(microbatch // 2, ranks // 2)
            start = 2 * ranks * unit
            # Of two steps that fall on one slot, a backward goes first, then the older microbatch.
            older = (microbatch // 2, copy)
            forward, backward = _slots(place, within, ranks)
            steps[placement.rank_of(stage)] += [
                ((start + backward, 0, *older), action(stage, Op.FULL_BACKWARD, microbatch)),
                ((start + forward, 1, *older), action(stage, Op.FORWARD, microbatch)),
            ]
    return Program(
        name="chimera",
        placement=placement,
        num_microbatches=microbatches,
        ranks=tuple(
            tuple(act for _, act in sorted(mine, key=lambda timed: timed[0])) for mine in steps
        ),
    )


def _slots(place: int, microbatch: int, ranks: int) -> tuple[int, int]:
    """When 1F1B runs a forward and its backward, where either takes one slot."""
    warm_up = microbatch < ranks - place
    forward = place + (microbatch if warm_up else 2 * microbatch)
    return forward, 2 * ranks - 1 - place + 2 * microbatch
