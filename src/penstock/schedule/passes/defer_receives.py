"""Posts receives no earlier than they have to be; knows no costs."""

from __future__ import annotations

from penstock.schedule.passes.insert_transfers import insert_transfers
from penstock.schedule.passes.remove_transfers import remove_transfers
from penstock.schedule.program import Program, refuse_no_program

__all__ = ["defer_receives"]


def defer_receives(program: Program) -> Program:
    """Post each receive one computation ahead of its use, so that its buffer is held no longer.

        before   1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2
        after    1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2

    Transfers are placed anew, as ``insert_transfers`` does: a send right after what it sends, a
    receive earlier only where ranks would otherwise wait for each other. Keeps the order of all
    other steps.

    Args:
        program: any program with transfers, such as one from a file.

    Returns:
        The same computations, with transfers as late as they can be.

    Raises:
        ScheduleError: ``check`` finds problems in the program's computations.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> ahead = "1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2\\n"
        >>> eager = parse_csv("0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2\\n" + ahead)
        >>> print(format_csv(defer_receives(eager)), end="")
        0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2
        1RECV_F0,1RECV_F1,1F0,1RECV_F2,1F1,1F2
    """
    refuse_no_program(program, "defer_receives()")
    return insert_transfers(remove_transfers(program))
