"""Passes over computations: keep only the forwards, or merge split backwards."""

from __future__ import annotations

from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.program import Program, refuse_no_program

__all__ = ["forward_only", "merge_backward"]


def forward_only(program: Program) -> Program:
    """Keep only the forwards, in their order: no backwards, transfers, sharding or reductions.

        before   0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0B1        after   0F0 0F1

    Forwards depend only on forwards, so the result of a valid program is valid.

    Args:
        program: any program.

    Returns:
        The program of its forwards.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(forward_only(parse_csv("0F0,0F1,0B0,0B1\\n"))), end="")
        0F0,0F1
    """
    refuse_no_program(program, "forward_only()")
    return program.with_ranks(
        tuple(
            tuple(act for step in steps for act in step.parts if act.op is Op.FORWARD)
            for steps in program.ranks
        )
    )


def merge_backward(program: Program) -> Program:
    """Merge each W that directly follows its I into a full backward.

        before   0F0 0F1 0I0 0W0 0I1 0I2 0W1        after   0F0 0F1 0B0 0I1 0I2 0W1

    Keeps the order of all other steps, and leaves overlapped pairs as they are. In a program with
    transfers, an I whose gradient is sent before its W is kept, since the send separates them.

    Args:
        program: any program.

    Returns:
        The program with B instead of each such pair.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(merge_backward(parse_csv("0F0,0I0,0W0\\n"))), end="")
        0F0,0B0
    """
    refuse_no_program(program, "merge_backward()")
    return program.with_ranks(tuple(_merged(steps) for steps in program.ranks))


def _merged(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    merged: list[Step] = []
    for step in steps:
        if isinstance(step, Action) and step.op is Op.WEIGHT_GRAD and merged:
            before = merged[-1]
            if before == action(step.stage, Op.INPUT_GRAD, step.microbatch):
                merged[-1] = action(step.stage, Op.FULL_BACKWARD, step.microbatch)
                continue
        merged.append(step)
    return tuple(merged)
