"""What a program holds on each rank: activations in flight, and bytes over time.

    F starts       I ends             W ends
    ├──────────────┼──────────────────┤
    activation     what W needs       nothing

A rank runs its steps one after the other, so the number of activations follows from their order
alone; the curve of bytes over time is drawn from simulated times. This module simulates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from penstock.schedule.action import Op, Step
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs

__all__ = ["Curve", "memory_curves", "peak_in_flight"]

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""Points (time, amount): from each time on that amount is held, until the next."""

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


def memory_curves(
    program: Program,
    costs: Costs,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
) -> tuple[Curve, ...]:
    """What each rank holds over time, in the unit of ``costs.activation_bytes``.

    Args:
        program: what was run.
        costs: for what an activation takes, before I and after.
        starts: per rank, the start of each of its actions, blocks taken apart.
        ends: likewise, the ends.

    Returns:
        For each rank, a point wherever what it holds changes. Of changes at one time all points
        are kept that raise it above what was held before and is held after: the highest point is
        the peak.
    """
    size = program.num_stages
    before, after = costs.held(num_stages=size)
    backward = any(a.op in _BACKWARD for a in program.actions())
    curves = []
    for rank, steps in enumerate(program.ranks):
        changes: list[tuple[float, float]] = []
        first = 0
        for step in steps:
            stop = first + len(step.parts)
            begun, done = starts[rank][first], ends[rank][stop - 1]
            first = stop
            taken, freed = _changes(step, before, after, backward)
            if taken:
                changes.append((begun, taken))
            if freed:
                changes.append((done, -freed))
        curves.append(_curve(changes))
    return tuple(curves)


def _changes(
    step: Step, before: Sequence[float], after: Sequence[float], backward: bool
) -> tuple[float, float]:
    """What a step takes when it starts, and what it frees when it ends."""
    taken = freed = 0.0
    for part in step.parts:
        match part.op:
            case Op.FORWARD:
                taken += before[part.stage]
                freed += 0.0 if backward else before[part.stage]
            case Op.INPUT_GRAD:
                freed += before[part.stage] - after[part.stage]
            case Op.WEIGHT_GRAD:
                freed += after[part.stage]
            case Op.FULL_BACKWARD:
                freed += before[part.stage]
            case _:
                pass
    return taken, freed


def _curve(changes: list[tuple[float, float]]) -> Curve:
    held, points = 0.0, [(0.0, 0.0)]
    for time, change in changes:
        held += change
        if len(points) > 1 and points[-1][0] == time and points[-1][1] <= held:
            points.pop()
        points.append((time, held))
    return tuple(points)
