"""Says where the gradients of a stage are complete and can be reduced over its replicas.

This module knows nothing of how they are reduced, or whether the stage has replicas at all.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Step, action
from penstock.schedule.check import last_steps
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import WEIGHT_GRADS

__all__ = ["reduce_gradients"]


def reduce_gradients(program: Program) -> Program:
    """Put a REDUCE_GRAD right after the last step that makes a weight gradient of each stage.

        before   0F0 0F1 0B0 0B1        after   0F0 0F1 0B0 0B1 0REDUCE_GRAD

    Keeps the order of all steps. A program without backwards stays as it is.

    Args:
        program: any program without REDUCE_GRAD.

    Returns:
        The program with one REDUCE_GRAD per stage that has a weight gradient.

    Raises:
        ScheduleError: the program has a REDUCE_GRAD already.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(reduce_gradients(parse_csv("0F0,0F1,0B0,0B1\\n"))), end="")
        0F0,0F1,0B0,0B1,0REDUCE_GRAD
    """
    refuse_no_program(program, "reduce_gradients()")
    if any(act.op is Op.REDUCE_GRAD for act in program.actions()):
        raise ScheduleError(
            f"program {program.name!r} says already where gradients are reduced; take its "
            "REDUCE_GRAD actions out, or leave this pass out"
        )
    return program.with_ranks(
        tuple(
            _with_reductions(steps, len(program.placement.stages_of(rank)))
            for rank, steps in enumerate(program.ranks)
        )
    )


def _with_reductions(steps: tuple[Step, ...], num_stages: int) -> tuple[Step, ...]:
    last = last_steps(steps, WEIGHT_GRADS, num_stages)
    reduced = list(steps)
    # From the end, so that the places further in front stay where they are. Of stages whose last
    # weight gradients share a block, the lower is reduced first.
    for stage, index in sorted(last.items(), key=lambda item: (item[1], item[0]), reverse=True):
        reduced.insert(index + 1, action(stage, Op.REDUCE_GRAD))
    return tuple(reduced)
