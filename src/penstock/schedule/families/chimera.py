"""Chimera: two 1F1B pipelines in opposite directions, each in the other's bubbles.

P = 4, M = 4 (tF = tB = tW = 1). Even microbatches go down through stages 0 to 3, odd ones (lower
case) up through stages 4 to 7, which are the model's stages 0 to 3 again: every rank holds two
stages, and the weights are there twice:

    rank 0  F0 F2 .. f1 b1 -- f3 b3 -- .. B0 -- .. .. B2 --
    rank 1  .. F0 f1 F2 f3 .. b1 -- B0 -- b3 -- B2 -- .. ..
    rank 2  .. f1 F0 f3 F2 .. B0 -- b1 -- B2 -- b3 -- .. ..
    rank 3  f1 f3 .. F0 B0 -- F2 B2 -- .. b1 -- .. .. b3 --

Each direction is 1F1B, which holds at most P/2 activations per stage (P - s on the s-th, where that
is less). Both are laid over each other in slots of one forward or one backward: a rank runs what
is ready, of two steps the older microbatch's.

The bubble is (P - 2)·max(tF, tB + tW) for M = P, where 1F1B's is (P - 1)(tF + tB + tW), and for any
multiple of P where forwards and backwards take equally long. Ranks hold P/2 + 1 activations (the
outermost) to P (those in the middle) at their peaks. After a step the gradients of the two copies
are summed, once for each of the P/2 pairs of ranks that hold the same stages.

P even, M ≥ 2.

Source: arXiv:2107.06925, sec. 3.1 and 3.3 (direct concatenation).
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement, bidirectional
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
    """Both directions, played slot by slot.

    Args:
        ranks: number of ranks, even.
        microbatches: number of microbatches, at least 2.

    Example:
        >>> " ".join(map(str, chimera(ranks=2, microbatches=4).ranks[0]))
        '0F0 3F1 3B1 0B0 0F2 3F3 3B3 0B2'
    """
    placement = bidirectional(ranks)
    play = _Play(placement, microbatches)
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    while any(len(steps) < 2 * microbatches for steps in programs):
        slot = [play.next_step(rank) for rank in range(ranks)]
        for steps, act in zip(programs, slot, strict=True):
            if act is not None:
                steps.append(act)
                play.done[act.op][act.stage] += 1
    return Program(
        name="chimera",
        placement=placement,
        num_microbatches=microbatches,
        ranks=tuple(map(tuple, programs)),
    )


class _Play:
    """Which steps are ready, from how many forwards and backwards each stage has done."""

    def __init__(self, placement: Placement, microbatches: int) -> None:
        self._placement = placement
        self._microbatches = microbatches
        self.done = {op: [0] * placement.num_stages for op in (Op.FORWARD, Op.FULL_BACKWARD)}

    def next_step(self, rank: int) -> Action | None:
        """Of what is ready on a rank, the oldest microbatch's; a backward before a forward."""
        found = [
            (number, op is Op.FORWARD, stage)
            for stage in self._placement.stages_of(rank)
            for op in self.done
            if self._is_ready(stage, op, number := self.done[op][stage])
        ]
        if not found:
            return None
        number, is_forward, stage = min(found)
        copies, copy = self._placement.copies, self._placement.copy_of(stage)
        op = Op.FORWARD if is_forward else Op.FULL_BACKWARD
        return action(stage, op, copies * number + copy)

    def _is_ready(self, stage: int, op: Op, number: int) -> bool:
        placement, (forwards, backwards) = self._placement, self.done.values()
        if placement.copies * number + placement.copy_of(stage) >= self._microbatches:
            return False
        offset = -1 if op is Op.FORWARD else +1
        other = placement.neighbour(stage, offset)
        if other is not None and self.done[op][other] <= number:
            return False
        if op is Op.FULL_BACKWARD:
            return forwards[stage] > number
        half, place = placement.num_ranks // 2, placement.model_stage(stage)
        return number - backwards[stage] < min(half, placement.num_ranks - place)
