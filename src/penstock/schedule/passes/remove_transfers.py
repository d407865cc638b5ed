"""Takes the sends and receives out of a program; knows nothing of where they stood or why."""

from __future__ import annotations

from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import TRANSFERS

__all__ = ["remove_transfers"]


def remove_transfers(program: Program) -> Program:
    """The program without its sends and receives.

        before   0RECV_B0 0F0 0SEND_F0 0B0        after   0F0 0B0

    Keeps the order of all other steps, so that ``insert_transfers`` can place them anew.

    Args:
        program: any program.

    Returns:
        The program without transfers.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> program = parse_csv("0F0,0SEND_F0\\n1RECV_F0,1F0\\n")
        >>> print(format_csv(remove_transfers(program)), end="")
        0F0
        1F0
    """
    refuse_no_program(program, "remove_transfers()")
    return program.with_ranks(
        tuple(
            tuple(step for step in steps if not any(a.op in TRANSFERS for a in step.parts))
            for steps in program.ranks
        )
    )
