"""Turns programs into codes (``penstock.schedule.coding``), and says what can't be turned into one.

What is found here is wrong wherever it stands on its rank; orders and numbers are not looked at.
"""

from __future__ import annotations

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Action, Op, Overlap, Step
from penstock.schedule.coding import WHOLE_STAGE, Coded, Coding
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE

__all__ = ["encode", "fault_of"]


def fault_of(step: Step, rank: int, program: Program) -> str | None:
    """What makes a step impossible at any place of its rank, or None.

    Args:
        step: the step.
        rank: the rank that is to take it.
        program: the program whose placement and microbatches count.
    """
    if isinstance(step, Overlap):
        if not step.parts:
            return "a block without actions"
        others = [str(a) for a in step.parts if a.op not in COMPUTE]
        if others:
            return f"a block holds computation only, and this has {', '.join(others)}"
    placement = program.placement
    for act in step.parts:
        if not 0 <= act.stage < placement.num_stages:
            return (
                f"stage {act.stage} does not exist: the placement has stages 0 to "
                f"{placement.num_stages - 1}"
            )
        if placement.rank_of(act.stage) != rank:
            return f"stage {act.stage} lies on rank {placement.rank_of(act.stage)}, not here"
        if act.op in WHOLE_STAGE:
            if act.microbatch is not None:
                return f"{act.op.value} is about a whole stage and takes no microbatch"
        elif act.microbatch is None:
            return f"{act.op.value} takes a microbatch, as in {act.stage}{act.op.value}0"
        elif not 0 <= act.microbatch < program.num_microbatches:
            return (
                f"microbatch {act.microbatch} does not exist: the program has microbatches 0 to "
                f"{program.num_microbatches - 1}"
            )
        elif not placement.passes(act.microbatch, act.stage):
            copy = act.microbatch % placement.copies
            return (
                f"microbatch {act.microbatch} does not go through stage {act.stage}, but through "
                f"copy {copy} of the model (stages {placement.entries[copy]} to "
                f"{placement.exits[copy]})"
            )
    return None


def encode(program: Program) -> Coded:
    """The program in integers.

    Args:
        program: any program, right or wrong in its order.

    Returns:
        Its codes.

    Raises:
        ScheduleError: an action that no place of its rank can make right (``fault_of``).

    Example:
        >>> from penstock.schedule.action import action
        >>> from penstock.schedule.placement import linear
        >>> steps = (action(0, Op.FORWARD, 0), action(0, Op.FULL_BACKWARD, 0))
        >>> program = Program(
        ...     name="one", placement=linear(1), num_microbatches=1, ranks=(steps,)
        ... )
        >>> encode(program).queues
        [[0, 1]]
    """
    coding = Coding(
        placement=program.placement,
        num_microbatches=program.num_microbatches,
        num_splits=program.num_splits,
    )
    blocks: list[tuple[int, ...]] = []
    queues = [_encode_rank(program, rank, coding, blocks) for rank in range(program.num_ranks)]
    return Coded(coding=coding, queues=queues, blocks=blocks)


def _encode_rank(
    program: Program, rank: int, coding: Coding, blocks: list[tuple[int, ...]]
) -> list[int]:
    # The first code of each op and stage held here: what is not found is at fault, which costs
    # less than looking into every field of every action.
    held = program.placement.stages_of(rank)
    starts = {op: {s: coding.code(op, s) for s in held} for op in Op}
    each = {op: {} if op in WHOLE_STAGE else starts[op] for op in Op}
    whole = {op: starts[op] if op in WHOLE_STAGE else {} for op in Op}
    num_microbatches, copies = program.num_microbatches, program.placement.copies
    copy_of = {s: program.placement.copy_of(s) for s in held}
    queue: list[int] = []
    for step in program.ranks[rank]:
        start: int | None = None
        if type(step) is Action:
            microbatch = step.microbatch
            if microbatch is None:
                start = whole[step.op].get(step.stage)
            elif 0 <= microbatch < num_microbatches:
                start = each[step.op].get(step.stage)
                if start is not None:
                    here = copies == 1 or microbatch % copies == copy_of[step.stage]
                    start = start + microbatch if here else None
        elif fault_of(step, rank, program) is None:
            start = ~len(blocks)
            blocks.append(tuple(coding.code(a.op, a.stage, a.microbatch or 0) for a in step.parts))
        if start is None:
            message = f"{fault_of(step, rank, program)}"
            raise ScheduleError(message, where=Where(rank=rank, action=str(step)))
        queue.append(start)
    return queue
