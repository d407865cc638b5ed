"""Passes over computations: which of them run, and when activations are kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.messages import is_count
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE, INPUT_GRADS

__all__ = ["forward_only", "merge_backward", "offload", "recompute"]


def forward_only(program: Program) -> Program:
    """Keep only the forwards, in their order: no backwards, transfers, sharding or reductions.

        before   0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0B1        after   0F0 0F1

    Forwards depend only on forwards, so the result of a valid program is valid.
    """
    refuse_no_program(program, "forward_only()")
    return program.with_ranks(
        [act for step in steps for act in step.parts if act.op is Op.FORWARD]
        for steps in program.ranks
    )


def merge_backward(program: Program) -> Program:
    """Merge each W that directly follows its I into a full backward.

        before   0F0 0F1 0I0 0W0 0I1 0I2 0W1        after   0F0 0F1 0B0 0I1 0I2 0W1

    Keeps the order of all other steps, and leaves overlapped pairs as they are. In a program with
    transfers, an I whose gradient is sent before its W is kept, since the send separates them.
    """
    refuse_no_program(program, "merge_backward()")
    ranks = []
    for steps in program.ranks:
        merged: list[Step] = []
        for step in steps:
            if isinstance(step, Action) and step.op is Op.WEIGHT_GRAD:
                before = action(step.stage, Op.INPUT_GRAD, step.microbatch)
                if merged[-1:] == [before]:
                    merged.pop()
                    step = action(step.stage, Op.FULL_BACKWARD, step.microbatch)
            merged.append(step)
        ranks.append(merged)
    return program.with_ranks(ranks)


def recompute(program: Program, *, stages: Iterable[int] | None = None) -> Program:
    """Recompute the forward of stages, right before the backward that needs their activations.

        before   0F0 0F1 0B0 0B1        after   0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1

    From F to RECOMPUTE a stage holds only the microbatch's inputs. The recomputation for an
    overlapped pair comes before the pair.

    Args:
        program: any program with backwards, with or without transfers.
        stages: the stages that recompute; None for all.

    Raises:
        ScheduleError: a stage does not exist, or is already recomputed or offloaded.

    Source: arXiv:1604.06174.
    """
    chosen = _chosen(program, stages, "recompute()")
    if not any(act.op in INPUT_GRADS for act in program.actions()):
        raise ScheduleError(
            f"program {program.name!r} has no backwards: there is nothing to recompute for"
        )

    def before(step: Step) -> list[Step]:
        return [
            action(act.stage, Op.RECOMPUTE, act.microbatch)
            for act in step.parts
            if act.op in INPUT_GRADS and act.stage in chosen
        ]

    return program.with_ranks(
        [each for step in steps for each in (*before(step), step)] for steps in program.ranks
    )


def offload(program: Program, *, stages: Iterable[int] | None = None, ahead: int = 1) -> Program:
    """Offload activations to the host after the forward, and reload them for the backward.

        before   0F0            0F1          0F2          0B0 0B1
        after    0F0 0OFFLOAD0  0F1 0RELOAD0 0F2 0RELOAD1 0B0 0B1

    An OFFLOAD stands right after its F, a RELOAD ``ahead`` computations before its backward, so
    that both copies run beside the compute. An activation stays on the device if its backward comes
    too soon to offload it for at least one computation.

    Args:
        program: any program with or without transfers.
        stages: the stages whose activations are offloaded; None for all.
        ahead: the number of computations between a RELOAD and its backward, at least 1.

    Raises:
        ScheduleError: a stage does not exist, or is already recomputed or offloaded; or ``ahead``
            is below 1.

    Source: arXiv:2503.01328, sec. 3.
    """
    chosen = _chosen(program, stages, "offload()")
    if not is_count(ahead):
        raise ScheduleError(
            f"offload(ahead={ahead!r}): expected a whole number of computations, at least 1"
        )
    return program.with_ranks(_offloaded(steps, chosen, ahead) for steps in program.ranks)


def _offloaded(steps: tuple[Step, ...], stages: frozenset[int], ahead: int) -> list[Step]:
    computing = [i for i, step in enumerate(steps) if any(a.op in COMPUTE for a in step.parts)]
    forwards: dict[tuple[int, int | None], int] = {}
    after: defaultdict[int, list[Step]] = defaultdict(list)
    before: defaultdict[int, list[Step]] = defaultdict(list)
    for place, index in enumerate(computing):
        for act in steps[index].parts:
            key = (act.stage, act.microbatch)
            if act.stage not in stages:
                continue
            if act.op is Op.FORWARD:
                forwards[key] = place
            elif act.op in INPUT_GRADS and place - ahead > forwards.get(key, place) + 1:
                made, needed = computing[forwards[key]], computing[place - ahead]
                after[made].append(action(act.stage, Op.OFFLOAD, act.microbatch))
                before[needed].append(action(act.stage, Op.RELOAD, act.microbatch))
    moved: list[Step] = []
    for index, step in enumerate(steps):
        moved += [*before[index], step, *after[index]]
    return moved


def _chosen(program: Program, stages: Iterable[int] | None, caller: str) -> frozenset[int]:
    """The requested stages, all if None; refuses stages that a pass has already changed."""
    refuse_no_program(program, caller)
    if stages is not None and not isinstance(stages, Iterable):
        raise ScheduleError(f"stages={stages!r}: expected numbers of stages, such as [0, 2]")
    every = range(program.num_stages)
    chosen = frozenset(every if stages is None else stages)
    unknown = sorted(chosen - set(every))
    if unknown:
        raise ScheduleError(
            f"program {program.name!r} has no stages {unknown}; its stages are 0 to {every[-1]}"
        )
    ops = (Op.RECOMPUTE, Op.OFFLOAD)
    taken = sorted({a.stage for a in program.actions() if a.op in ops and a.stage in chosen})
    if taken:
        raise ScheduleError(
            f"program {program.name!r}: stages {taken} are recomputed or offloaded already; "
            "pass stages= to choose others"
        )
    return chosen
