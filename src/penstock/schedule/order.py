"""One sequence of all ranks' steps in which nothing ever waits: how one process plays them all.

    rank 0   0F0 0F1 . . 0B0 0B1         (rank 0) 0F0 0F1, (rank 1) 1F0 1B0 1F1 1B1,
    rank 1   .  1F0 1B0 1F1 1B1          (rank 0) 0B0 0B1

This module knows no times and no transports.
"""

from __future__ import annotations

from penstock.schedule.action import Step
from penstock.schedule.check import check
from penstock.schedule.encoding import encode
from penstock.schedule.play import ProgramPlayer
from penstock.schedule.program import CheckedProgram, Program

__all__ = ["global_order"]


def global_order(program: Program) -> tuple[tuple[int, Step], ...]:
    """All steps of all ranks, each after everything that it needs.

    Each rank goes as far as it can before the next one goes on, so that the order of a rank's
    own steps is kept and the result is the same on every machine. A send comes after its receive
    was posted, and what uses a received value after its send.

    Args:
        program: a program; one that is not a ``CheckedProgram`` is checked first.

    Returns:
        Pairs of a rank and its step.

    Raises:
        ScheduleError: the program has problems.

    Example:
        >>> from penstock.schedule.text import parse_csv
        >>> program = parse_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> " ".join(f"{rank}:{step}" for rank, step in global_order(program))
        '0:0F0 0:0F1 1:1F0 1:1B0 1:1F1 1:1B1 0:0B0 0:0B1'
    """
    checked = program if isinstance(program, CheckedProgram) else check(program)
    coded = encode(checked)
    player = ProgramPlayer(coded, coded.coding.needs(transfers=checked.has_transfers))
    ended = player.play()
    assert ended, "a checked program plays to its end"
    return tuple(
        (rank, step)
        for rank, start, stop in player.runs
        for step in checked.ranks[rank][start:stop]
    )
