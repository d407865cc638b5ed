"""Moves activations to the host while they are not needed; knows no costs."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Step, action
from penstock.schedule.passes.common import refuse_kept_otherwise, stages_of
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE, INPUT_GRADS

__all__ = ["offload"]


def offload(program: Program, *, stages: Iterable[int] | None = None, ahead: int = 1) -> Program:
    """Copy what forwards keep to the host, and back in time for the backward.

        before   0F0            0F1          0F2          0B0 0B1
        after    0F0 0OFFLOAD0  0F1 0RELOAD0 0F2 0RELOAD1 0B0 0B1

    An OFFLOAD stands right after its F, a RELOAD ``ahead`` computations before its backward, so
    that both copies run beside the compute. A microbatch that is needed again before it could be
    away for one computation stays. Keeps the order of all steps.

    Args:
        program: any program with or without transfers.
        stages: the stages whose activations are offloaded; None for all.
        ahead: how many computations a RELOAD is asked for ahead of its backward, at least 1.

    Returns:
        The program with an OFFLOAD and a RELOAD for each such microbatch.

    Raises:
        ScheduleError: no such stage, a stage that is recomputed or offloaded already, or
            ``ahead`` below 1.

    Source: arXiv:2503.01328, sec. 3.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> program = parse_csv("0F0,0F1,0F2,0B0,0B1,0B2\\n")
        >>> print(format_csv(offload(program)), end="")
        0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0F2,0OFFLOAD2,0RELOAD1,0B0,0RELOAD2,0B1,0B2
    """
    refuse_no_program(program, "offload()")
    if not isinstance(ahead, int) or ahead < 1:
        raise ScheduleError(
            f"offload(ahead={ahead!r}): expected a whole number of computations, at least 1"
        )
    chosen = stages_of(program, stages)
    refuse_kept_otherwise(program, chosen)
    return program.with_ranks(tuple(_offloaded(steps, chosen, ahead) for steps in program.ranks))


def _offloaded(steps: tuple[Step, ...], stages: frozenset[int], ahead: int) -> tuple[Step, ...]:
    computing = [i for i, step in enumerate(steps) if any(a.op in COMPUTE for a in step.parts)]
    forwards: dict[tuple[int, int | None], int] = {}
    after: dict[int, list[Step]] = {}
    before: dict[int, list[Step]] = {}
    for place, index in enumerate(computing):
        for act in steps[index].parts:
            key = (act.stage, act.microbatch)
            if act.stage not in stages:
                continue
            if act.op is Op.FORWARD:
                forwards[key] = place
            elif act.op in INPUT_GRADS and place - ahead > forwards.get(key, place) + 1:
                made = computing[forwards[key]]
                after.setdefault(made, []).append(action(act.stage, Op.OFFLOAD, act.microbatch))
                asked = computing[place - ahead]
                before.setdefault(asked, []).append(action(act.stage, Op.RELOAD, act.microbatch))
    moved: list[Step] = []
    for index, step in enumerate(steps):
        moved += before.get(index, ())
        moved.append(step)
        moved += after.get(index, ())
    return tuple(moved)
