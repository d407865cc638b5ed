"""What a program holds on each rank: activations in flight, and bytes over time.

    F starts       I ends             W ends
    ├──────────────┼──────────────────┤
    activation     what W needs       nothing

A rank runs its steps one after the other, so the number of activations follows from their order
alone; the curve of bytes over time is drawn from simulated times. This module simulates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TypeAlias

from penstock.schedule.action import Op, Step
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, WEIGHT_GRADS
from penstock.simulate.costs import Costs

__all__ = ["Curve", "memory_curves", "peak_in_flight"]

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""Points (time, amount): from each time on that amount is held, until the next."""

_TAKES = frozenset({Op.RECOMPUTE, Op.RELOAD})


def peak_in_flight(program: Program) -> tuple[int, ...]:
    """The most stage-microbatch activations that each rank holds at once.

    An activation is held from the start of its F to the end of its W, or of its full backward.
    Where forward and backward are one block, the block holds both. A program without any backward
    holds an activation for the length of its F only. What is recomputed is held for the length of
    its F, and again from RECOMPUTE on; what is offloaded until the rank's next computation is
    over, beside which it is copied, and again from RELOAD on.

    Args:
        program: with or without transfers.

    Returns:
        For each rank, its peak.

    Example:
        >>> from penstock.schedule.registry import build
        >>> peak_in_flight(build("1f1b", ranks=4, microbatches=8))
        (4, 3, 2, 1)
    """
    if not program.has_backward:
        return tuple(int(bool(steps)) for steps in program.ranks)
    return tuple(_peak(program, rank) for rank in range(program.num_ranks))


def _peak(program: Program, rank: int) -> int:
    steps = program.ranks[rank]
    dropped = {(a.stage, a.microbatch) for s in steps for a in s.parts if a.op is Op.RECOMPUTE}
    held = peak = leaving = 0
    for step in steps:
        released = 0
        computes = False
        for part in step.parts:
            computes = computes or part.op in COMPUTE
            if part.op is Op.FORWARD:
                held += 1
                released += (part.stage, part.microbatch) in dropped
            elif part.op in _TAKES:
                held += 1
            elif part.op in WEIGHT_GRADS:
                released += 1
            elif part.op is Op.OFFLOAD:
                leaving += 1
        peak = max(peak, held)
        held -= released
        if computes:
            held, leaving = held - leaving, 0
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
        For each rank, a point wherever what it holds changes, from (0, 0) on. What is freed and
        taken again at one time is one point; what is taken and freed at once stays two, so that
        the highest point is the peak.
    """
    sizes = _Sizes(program, costs)
    curves = []
    for rank, steps in enumerate(program.ranks):
        changes: list[tuple[float, float]] = []
        first = 0
        for step in steps:
            stop = first + len(step.parts)
            begun, done = starts[rank][first], ends[rank][stop - 1]
            first = stop
            taken, freed = sizes.changes_of(step)
            if taken:
                changes.append((begun, taken))
            if freed:
                changes.append((done, -freed))
        # Copies run beside the steps; else this is the order already.
        changes.sort(key=itemgetter(0))
        curves.append(_curve(changes))
    return tuple(curves)


class _Sizes:
    """What steps take and free, in the unit of the costs."""

    def __init__(self, program: Program, costs: Costs) -> None:
        size = program.num_stages
        self.before, self.after = costs.held(num_stages=size)
        self.kept = costs.per_stage("recompute_bytes", num_stages=size)
        self.backward = program.has_backward
        remade = (act for act in program.actions() if act.op is Op.RECOMPUTE)
        self.remade = {(act.stage, act.microbatch) for act in remade}

    def changes_of(self, step: Step) -> tuple[float, float]:
        """What a step takes when it starts, and what it frees when it ends."""
        taken = freed = 0.0
        for part in step.parts:
            stage = part.stage
            before, after, kept = self.before[stage], self.after[stage], self.kept[stage]
            match part.op:
                case Op.FORWARD if not self.backward:
                    taken, freed = taken + before, freed + before
                case Op.FORWARD:
                    taken += kept if (stage, part.microbatch) in self.remade else before
                case Op.RECOMPUTE:
                    taken += before - kept
                case Op.RELOAD:
                    taken += before
                case Op.OFFLOAD | Op.FULL_BACKWARD:
                    freed += before
                case Op.INPUT_GRAD:
                    freed += before - after
                case Op.WEIGHT_GRAD:
                    freed += after
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
