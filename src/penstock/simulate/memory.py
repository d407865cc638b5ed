"""How many activations a program holds on each rank.

A rank runs its steps one after the other, so its peak follows from their order alone: this module
knows neither costs nor times.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.program import Program

__all__ = ["peak_in_flight"]

_RELEASES = frozenset({Op.FULL_BACKWARD, Op.WEIGHT_GRAD})
_BACKWARD = _RELEASES | {Op.INPUT_GRAD}


def peak_in_flight(program: Program) -> tuple[int, ...]:
    """The most stage-microbatch activations that each rank holds at once.

    An activation is held from the start of its F to the end of its W, or of its full backward.
    Where forward and backward are one block, the block holds both. A program without any backward
    holds an activation for the length of its F only.

    Args:
        program: with or without transfers.

    Returns:
        For each rank, its peak.

    Example:
        >>> from penstock.schedule.catalog import build
        >>> peak_in_flight(build("1f1b", ranks=4, microbatches=8))
        (4, 3, 2, 1)
    """
    if not any(a.op in _BACKWARD for a in program.actions()):
        return tuple(int(bool(steps)) for steps in program.ranks)
    return tuple(_peak(program, rank) for rank in range(program.num_ranks))


def _peak(program: Program, rank: int) -> int:
    held = peak = 0
    for step in program.ranks[rank]:
        released = 0
        for part in step.parts:
            if part.op is Op.FORWARD:
                held += 1
            elif part.op in _RELEASES:
                released += 1
        peak = max(peak, held)
        held -= released
    return peak
