"""Trades time for memory: what a forward keeps is dropped, and made again before the backward."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Step, action
from penstock.schedule.passes.common import refuse_kept_otherwise, stages_of
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import INPUT_GRADS

__all__ = ["recompute"]


def recompute(program: Program, *, stages: Iterable[int] | None = None) -> Program:
    """Let stages run their forward again, right before the backward that needs its activations.

        before   0F0 0F1 0B0 0B1        after   0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1

    From F to RECOMPUTE a stage holds the microbatch's inputs alone. Keeps the order of all steps;
    of a block that overlaps, the recomputation comes before the block.

    Args:
        program: any program with backwards, with or without transfers.
        stages: the stages that recompute; None for all.

    Returns:
        The program with a RECOMPUTE for each microbatch of those stages.

    Raises:
        ScheduleError: no such stage, or a stage that is recomputed or offloaded already.

    Source: arXiv:1604.06174.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(recompute(parse_csv("0F0,0B0\\n1F0,1I0,1W0\\n"))), end="")
        0F0,0RECOMPUTE0,0B0
        1F0,1RECOMPUTE0,1I0,1W0
    """
    refuse_no_program(program, "recompute()")
    chosen = stages_of(program, stages)
    refuse_kept_otherwise(program, chosen)
    if not any(act.op in INPUT_GRADS for act in program.actions()):
        raise ScheduleError(
            f"program {program.name!r} has no backwards: there is nothing to recompute for"
        )
    return program.with_ranks(tuple(_recomputed(steps, chosen) for steps in program.ranks))


def _recomputed(steps: tuple[Step, ...], stages: frozenset[int]) -> tuple[Step, ...]:
    recomputed: list[Step] = []
    for step in steps:
        recomputed += (
            action(act.stage, Op.RECOMPUTE, act.microbatch)
            for act in step.parts
            if act.op in INPUT_GRADS and act.stage in stages
        )
        recomputed.append(step)
    return tuple(recomputed)
