"""Chimera: two 1F1B pipelines in opposite directions, each in the other's bubbles.

P = 4, M = 4 (tF = tB = tW = 1). Even microbatches go down through stages 0 to 3, odd ones (lower
case) up through stages 4 to 7, a second copy of the model: every rank holds two stages.

    rank 0  F0 F2 .. f1 b1 -- f3 b3 -- .. B0 -- .. .. B2 --
    rank 1  .. F0 f1 F2 f3 .. b1 -- B0 -- b3 -- B2 -- .. ..
    rank 2  .. f1 F0 f3 F2 .. B0 -- b1 -- B2 -- b3 -- .. ..
    rank 3  f1 f3 .. F0 B0 -- F2 B2 -- .. b1 -- .. .. b3 --

Each direction is 1F1B that holds at most P/2 activations per stage (P - s on stage s, where that is
less). In slots of one forward or one backward, a rank runs the oldest ready microbatch.

The bubble is (P - 2)·max(tF, tB + tW) for M = P, and for any multiple of P where forwards and
backwards take equally long. Ranks hold P/2 + 1 activations (the outermost) to P (those in the
middle). After a step the gradients of both copies are summed. P even, M ≥ 2.

Source: arXiv:2107.06925, sec. 3.1 and 3.3 (direct concatenation).
"""

from __future__ import annotations

from math import inf

from penstock.schedule.families.common import program_of
from penstock.schedule.list_schedule import ListScheduler, kind_needs
from penstock.schedule.placement import Placement, bidirectional
from penstock.schedule.program import Program

__all__ = ["chimera"]


def chimera(*, ranks: int, microbatches: int) -> Program:
    """Two 1F1B pipelines in opposite directions, each in the other's bubbles."""
    placement = bidirectional(ranks)
    stages = placement.num_stages
    totals = [len(placement.passing(stage, microbatches)) for stage in range(stages)]
    scheduler = ListScheduler(
        ranks=placement.stage_ranks * 3,
        needs=kind_needs(placement),
        durations=[1.0] * (3 * stages),
        totals=[*totals, *totals, *[0] * stages],
    )
    scheduler.run(_Slots(scheduler, placement))
    return program_of("chimera", placement, microbatches, scheduler.order, full=True)


class _Slots:
    """A policy that picks the oldest ready microbatch of a rank, backwards first."""

    def __init__(self, scheduler: ListScheduler, placement: Placement) -> None:
        self._scheduler, self._placement = scheduler, placement

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The kind for this slot of a rank; None leaves the slot empty."""
        stages = self._placement.num_stages
        ends, ready = self._scheduler.ends, self._scheduler.ready
        own = self._placement.stages_of(rank)
        kinds = [kind for stage in own for kind in (stage, stage + stages)]
        found = [
            (len(ends[kind]), kind < stages, kind)
            for kind in kinds
            if ready[kind] <= now and (kind >= stages or self._has_room(kind))
        ]
        if found:
            return min(found)[-1], inf
        return None, min((ready[kind] for kind in kinds if ready[kind] > now), default=inf)

    def _has_room(self, stage: int) -> bool:
        placement, ends = self._placement, self._scheduler.ends
        half, place = placement.num_ranks // 2, placement.model_stage(stage)
        held = len(ends[stage]) - len(ends[stage + placement.num_stages])
        return held < min(half, placement.num_ranks - place)

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Nothing to record."""
