"""Makes the evaluation program of a training program; knows nothing of how it is run."""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.program import Program, refuse_no_program

__all__ = ["forward_only"]


def forward_only(program: Program) -> Program:
    """The forwards alone, in their order: no backwards, transfers, sharding or reductions.

        before   0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0B1        after   0F0 0F1

    What a forward needs is a forward, so the result of a valid program is valid.

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
