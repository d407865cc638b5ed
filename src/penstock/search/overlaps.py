"""Pairs backwards with the forwards right after them, where a block of both takes less time.

    rank 0  F0 F1 B0 F2 B1 F3 B2 B3       F0 F1 (F2;B0) (F3;B1) B2 B3
    rank 1  F0 B0 F1 B1 F2 B2 F3 B3       F0 (F1;B0) (F2;B1) (F3;B2) B3

A block holds the activations of both, and yields both results at its end only: whether that is
worth it, the simulation tells; whether it can be played at all, the checker. This module looks for
no order itself.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, Overlap, Step
from penstock.schedule.check import problems
from penstock.schedule.passes.merge_backward import merge_backward
from penstock.schedule.program import Program
from penstock.schedule.rules import INPUT_GRADS
from penstock.search.known import Known
from penstock.search.problem import SearchProblem

__all__ = ["overlap", "overlapped"]

# How many programs of each placement are tried.
_TRIED = 16


def overlap(known: Known) -> None:
    """Note the best programs of each placement with blocks, where costs tell of such."""
    for problem in known.problems:
        mine = [
            each
            for each in known.found
            if each.placement == problem.placement and not each.is_relieved
        ]
        for each in sorted(mine, key=lambda found: found.value)[:_TRIED]:
            blocks = overlapped(problem, each.program)
            if blocks is None:
                continue
            if known.is_late(times=3):
                return
            # Blocks may wait for each other.
            if not problems(blocks):
                known.note(problem, blocks, f"overlap, after {each.method}")


def overlapped(problem: SearchProblem, program: Program) -> Program | None:
    """The program with such pairs as blocks; None where there are none to gain from.

    Args:
        problem: the placement and the costs.
        program: compute only.
    """
    size = problem.placement.num_stages
    if problem.costs.overlap is None:
        return None
    lengths = problem.costs.per_stage("overlap", num_stages=size)
    durations = {op: problem.costs.of(op, num_stages=size) for op in (Op.FORWARD, *INPUT_GRADS)}

    def gains(backward: Step, forward: Step) -> bool:
        if not (isinstance(backward, Action) and isinstance(forward, Action)):
            return False
        if backward.op not in INPUT_GRADS or forward.op is not Op.FORWARD:
            return False
        apart = durations[forward.op][forward.stage] + durations[backward.op][backward.stage]
        return lengths[forward.stage] < apart

    ranks = []
    for steps in merge_backward(program).ranks:
        paired: list[Step] = []
        for step in steps:
            if paired and gains(paired[-1], step):
                paired[-1] = Overlap(parts=(*step.parts, *paired[-1].parts))
            else:
                paired.append(step)
        ranks.append(tuple(paired))
    blocks = program.with_ranks(tuple(ranks))
    return blocks if len(blocks.blocks) > len(program.blocks) else None
