"""What a stage owes, and the chain of a microbatch from it: what lower bounds are made of.

What a rank owes is fixed: of each stage it holds, a forward and a backward per microbatch. What it
may do when is not, but for the chain that a microbatch goes through:

    stage 0   F ╲                       ╱ I  W
    stage 1      F ╲                 ╱ I
    stage 2         F ╲           ╱ I
    stage 3            F ─────► I

    head(r)     from the step's start until the chain first comes to rank r
    turn(s)     from the start of F on stage s until its gradient can be back there
    tail(s)     from the end of I on stage s until the chain has left the pipeline

With costs for a block that overlaps, each action is taken to cost no more than what is left of it
in the best such block. This module knows no memory limit and no program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.simulate.costs import Costs

__all__ = ["StageChain", "chains"]


@dataclass(slots=True, kw_only=True)
class StageChain:
    """What a stage owes, and the chain from it: each time is the least that it can come to."""

    rank: int
    count: int  # microbatches that go through it
    forward: float
    input_grad: float
    backward: float  # I and W together
    owed: float  # F, I and W, less what a block may save
    owed_to_input: float  # F and I, less what a block may save
    held: float
    held_for_weights: float  # the less of what is held before and after I
    work: float  # F where no block saves any of it: the most that it comes to
    head: float = 0.0
    turn: float = 0.0
    tail: float = 0.0  # where there is no backward: after F


def chains(
    costs: Costs, placement: Placement, microbatches: int, backward: bool
) -> list[StageChain]:
    """All stages, by number; each copy of a model is a chain of its own.

    Args:
        costs: what each kind of action costs.
        placement: which rank holds which stage.
        microbatches: how many there are, over all copies.
        backward: whether there are backwards.

    Raises:
        ScheduleError: costs for another number of stages.
    """
    size = placement.num_stages
    costs.refuse_misfits(placement)
    stages = _stages(costs, placement, microbatches)

    def hop(stage: int, other: int) -> float:
        return costs.travel(stage, other, placement)

    for number, stage in enumerate(stages):
        ahead = placement.neighbour(number, -1)
        if ahead is not None:
            lower = stages[ahead]
            stage.head = lower.head + lower.forward + hop(ahead, number)
            last = max(lower.backward, lower.input_grad + lower.tail)
            stage.tail = hop(number, ahead) + last if backward else 0.0
    for number in reversed(range(size)):
        stage, behind = stages[number], placement.neighbour(number, +1)
        stage.turn = stage.forward
        if behind is not None:
            higher, there, back = stages[behind], hop(number, behind), hop(behind, number)
            stage.turn += there + higher.turn + higher.input_grad + back
            if not backward:
                stage.tail = there + higher.forward + higher.tail
    return stages


def _stages(costs: Costs, placement: Placement, microbatches: int) -> list[StageChain]:
    """What each stage owes; nothing yet of the chain."""
    size, copies = placement.num_stages, placement.copies
    forward = costs.of(Op.FORWARD, num_stages=size)
    by_input = costs.of(Op.INPUT_GRAD, num_stages=size)
    full = costs.of(Op.FULL_BACKWARD, num_stages=size)
    before, after = costs.held(num_stages=size)
    blocks = [math.inf] * placement.num_ranks
    longest = [0.0] * placement.num_ranks
    if costs.overlap is not None:
        for stage, length in enumerate(costs.per_stage("overlap", num_stages=size)):
            rank = placement.rank_of(stage)
            blocks[rank] = min(blocks[rank], length)
            longest[rank] = max(longest[rank], full[stage])
    stages = []
    for stage, rank in enumerate(placement.stage_ranks):
        least = blocks[rank]
        # At best each forward stands in the shortest block, with the longest backward.
        saved = max(0.0, forward[stage] + longest[rank] - least)
        stages.append(
            StageChain(
                rank=rank,
                count=len(range(placement.copy_of(stage), microbatches, copies)),
                forward=min(forward[stage], least),
                input_grad=min(by_input[stage], least),
                backward=min(full[stage], least),
                owed=forward[stage] + full[stage] - saved,
                owed_to_input=forward[stage] + by_input[stage] - saved,
                held=before[stage],
                held_for_weights=min(before[stage], after[stage]),
                work=forward[stage],
            )
        )
    return stages
