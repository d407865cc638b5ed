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
from penstock.schedule.list_schedule import kind_needs
from penstock.schedule.placement import bidirectional
from penstock.schedule.program import Program
from penstock.schedule.workload import Workload, schedule_by_priority

__all__ = ["chimera"]


def chimera(*, ranks: int, microbatches: int) -> Program:
    """Two 1F1B pipelines in opposite directions, each in the other's bubbles."""
    placement = bidirectional(ranks)
    stages, each = placement.num_stages, -(-microbatches // 2)
    work = Workload(
        placement=placement,
        num_microbatches=each,
        durations=(*[1.0] * (2 * stages), *[0.0] * stages),
        needs=kind_needs(placement),
        changes=(0.0,) * (3 * stages),
    )
    # The oldest microbatch, backwards first; after their backward, weight gradients take no time.
    # Of an odd number of microbatches, the upward direction has one less.
    priorities = []
    for later in (0.5, 0.0, -inf):
        for stage in range(stages):
            own = len(placement.passing(stage, microbatches))
            priorities.append([n + later if n < own else inf for n in range(each)])
    most = [min(ranks // 2, ranks - placement.model_stage(stage)) for stage in range(stages)]
    order = schedule_by_priority(work, priorities, windows=most).order
    return program_of("chimera", placement, microbatches, order, full=True)
