"""Says when the sharded parameters of a stage are gathered on its rank, and when let go.

This module knows nothing of how they are sharded, or of the sizes of stages.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Step, action
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE

__all__ = ["insert_sharding"]

_SHARDING = (Op.UNSHARD, Op.RESHARD)


def insert_sharding(program: Program, *, max_unsharded_stages: int = 3) -> Program:
    """Put UNSHARD before a stage is needed, and RESHARD when others are needed sooner.

        before, at most 1   0F0 2F0 2B0 0B0
        after               0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD

    Before each step, a rank holds the stages that it needs next, the nearest
    ``max_unsharded_stages`` of them: with two or more, the next stage is gathered while this one
    computes. Keeps the order of all other steps.

    Args:
        program: any program without UNSHARD and RESHARD.
        max_unsharded_stages: the most stages of a rank whose parameters are whole at a time; an
            overlapped block that computes on more holds as many as it needs.

    Returns:
        The program; every stage is resharded at its end.

    Raises:
        ScheduleError: the program has sharding already, or ``max_unsharded_stages`` is below 1.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(insert_sharding(parse_csv("0F0,1F0\\n"))), end="")
        0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,1RESHARD
    """
    refuse_no_program(program, "insert_sharding()")
    if max_unsharded_stages < 1:
        raise ScheduleError(f"max_unsharded_stages is {max_unsharded_stages}; at least 1 is needed")
    if any(act.op in _SHARDING for act in program.actions()):
        raise ScheduleError(
            f"program {program.name!r} says already when stages are unsharded; take its UNSHARD "
            "and RESHARD actions out, or leave this pass out"
        )
    return program.with_ranks(
        tuple(_with_sharding(steps, max_unsharded_stages) for steps in program.ranks)
    )


def _with_sharding(steps: tuple[Step, ...], most: int) -> tuple[Step, ...]:
    sharded: list[Step] = []
    present: tuple[int, ...] = ()
    for step, wanted in zip(steps, _windows(steps, most), strict=True):
        if wanted != present:
            # Letting go first keeps within the limit.
            sharded += [action(s, Op.RESHARD) for s in present if s not in wanted]
            sharded += [action(s, Op.UNSHARD) for s in wanted if s not in present]
            present = wanted
        sharded.append(step)
    sharded += [action(s, Op.RESHARD) for s in present]
    return tuple(sharded)


def _windows(steps: tuple[Step, ...], most: int) -> list[tuple[int, ...]]:
    """For each step the stages that this and the following steps compute on, nearest first."""
    windows: list[tuple[int, ...]] = []
    upcoming: tuple[int, ...] = ()
    for step in reversed(steps):
        needed = tuple(dict.fromkeys(a.stage for a in step.parts if a.op in COMPUTE))
        if needed != upcoming[: len(needed)]:
            upcoming = needed + tuple(s for s in upcoming if s not in needed)
        windows.append(upcoming[: max(most, len(needed))])
    return windows[::-1]
