"""The memory rule: the memory that stages hold over time.

    F starts       I ends             W ends
    ├──────────────┼──────────────────┤
    activation     weight_grad        nothing

A full backward holds the activation to its end. A recomputed activation is held while F runs; then
``recompute_bytes`` of it are held until RECOMPUTE. An offloaded activation is on the host from the
end of its copy, and no earlier than the end of the rank's next computation, to its RELOAD.
A rank holds the sum over its stages.

The peaks of a program follow from the order of its steps alone if each copy ends with the rank's
next computation. The curve over time follows from simulated times, and is never lower.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias, assert_never

from penstock.schedule.action import Op, Step
from penstock.schedule.program import Program
from penstock.schedule.rules import BACKWARDS, COMPUTE
from penstock.simulate.costs import Costs

__all__ = ["Curve", "StageMemory", "exceeds", "memory_curves", "peak_in_flight", "peaks"]

Curve: TypeAlias = tuple[tuple[float, float], ...]
"""Points (time, amount): the amount held from each time until the next point."""

# Sums of fractions, such as thirds, may exceed a limit by this share.
_ROUNDING = 1e-9
# The other actions free memory at their end.
_TAKING = frozenset({Op.FORWARD, Op.RECOMPUTE, Op.RELOAD})


def exceeds(held: float, limit: float | None) -> bool:
    """True if an amount is above a memory limit by more than rounding; None is no limit."""
    return limit is not None and held > limit * (1 + _ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory of each stage per microbatch, one number per stage.

    Args:
        activation: held from the start of F to the end of I, or of a full backward.
        weight_grad: held from the end of I to the end of W.
        recompute: held from the end of F to RECOMPUTE, if the activation is recomputed.
    """

    activation: tuple[float, ...]
    weight_grad: tuple[float, ...]
    recompute: tuple[float, ...]

    @classmethod
    def of(cls, costs: Costs, num_stages: int) -> StageMemory:
        """The memory given by costs, in their unit; by default each activation counts 1.

        Examples:
            >>> memory = StageMemory.of(Costs(activation_bytes=8, weight_grad_bytes=2), 1)
            >>> [memory.change(op, 0) for op in (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)]
            [8.0, -6.0, -2.0]
        """
        activation = (1.0,) * num_stages
        if costs.activation_bytes is not None:
            activation = costs.per_stage("activation_bytes", num_stages=num_stages)
        weight_grad = activation
        if costs.weight_grad_bytes is not None:
            weight_grad = costs.per_stage("weight_grad_bytes", num_stages=num_stages)
        kept = costs.per_stage("recompute_bytes", num_stages=num_stages)
        return cls(activation=activation, weight_grad=weight_grad, recompute=kept)

    def change(self, op: Op, stage: int) -> float:
        """The change of a rank's memory: an increase at an action's start, a decrease at its end.

        If W holds more than F left, I increases the memory at its end.
        """
        match op:
            case Op.FORWARD | Op.RELOAD:
                return self.activation[stage]
            case Op.RECOMPUTE:
                return self.activation[stage] - self.recompute[stage]
            case Op.INPUT_GRAD:
                return self.weight_grad[stage] - self.activation[stage]
            case Op.WEIGHT_GRAD:
                return -self.weight_grad[stage]
            case Op.FULL_BACKWARD | Op.OFFLOAD:
                return -self.activation[stage]
            case Op.SEND_F | Op.RECV_F | Op.SEND_B | Op.RECV_B:
                return 0.0
            case Op.UNSHARD | Op.RESHARD | Op.REDUCE_GRAD:
                return 0.0
            case _:
                assert_never(op)

    def changes(
        self, step: Step, recomputed: Container[tuple[int, int | None]], *, backward: bool
    ) -> tuple[float, float]:
        """The memory that a step allocates at its start, and frees at its end.

        ``recomputed`` holds the stages and microbatches whose forwards are recomputed. In a program
        without backwards, F frees its memory at its end.
        """
        taken = freed = 0.0
        for part in step.parts:
            stage, change = part.stage, self.change(part.op, part.stage)
            if part.op is Op.FORWARD and not backward:
                taken, freed = taken + change, freed + change
            elif part.op is Op.FORWARD and (stage, part.microbatch) in recomputed:
                taken, freed = taken + change, freed + change - self.recompute[stage]
            elif part.op in _TAKING:
                taken += change
            else:
                freed -= change
        return taken, freed


def peaks(program: Program, memory: StageMemory) -> tuple[float, ...]:
    """The peak memory of each rank, from the order of its steps, with or without transfers.

    An offloaded activation counts until the end of the rank's next computation, during which it is
    copied.
    """
    times = [range(1 + sum(len(step.parts) for step in steps)) for steps in program.ranks]
    curves = memory_curves(program.ranks, memory, times, [each[1:] for each in times])
    return tuple(max(held for _, held in curve) for curve in curves)


def peak_in_flight(program: Program) -> tuple[int, ...]:
    """The peak number of activations in flight on each rank, from F to W.

    A program without any backward holds an activation for the length of its F only; likewise for a
    recomputed F, whose activation counts again from RECOMPUTE on.

    Examples:
        >>> from penstock.schedule.registry import build
        >>> peak_in_flight(build("1f1b", ranks=4, microbatches=8))
        (4, 3, 2, 1)
    """
    return tuple(map(int, peaks(program, StageMemory.of(Costs(), program.num_stages))))


def memory_curves(
    ranks: Sequence[Sequence[Step]],
    memory: StageMemory,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
) -> tuple[Curve, ...]:
    """The memory of each rank over time, from its steps and the times of its actions (pairs taken
    apart).

    Returns:
        For each rank, a point wherever its memory changes, from time 0 on. A free followed by an
        allocation at the same time is one point. An allocation followed by a free stays two points,
        so that the highest point is the peak.
    """
    acts = [act for steps in ranks for step in steps for act in step.parts]
    recomputed = {(act.stage, act.microbatch) for act in acts if act.op is Op.RECOMPUTE}
    backward = any(act.op in BACKWARDS for act in acts)
    curves = []
    for steps, begun, ended in zip(ranks, starts, ends, strict=True):
        changes: list[tuple[float, float]] = []
        # The end of the copy and the memory of activations on their way to the host.
        leaving: list[tuple[float, float]] = []
        first, now = 0, 0.0
        for step in steps:
            taken, freed = memory.changes(step, recomputed, backward=backward)
            stop, op = first + len(step.parts), step.parts[0].op
            if taken:
                # The copy back may wait for others, after its memory is allocated.
                changes.append((now if op is Op.RELOAD else begun[first], taken))
            if op is Op.OFFLOAD:
                leaving.append((ended[first], freed))
            elif op in COMPUTE:
                now = ended[stop - 1]
                changes += [(max(copied, now), -size) for copied, size in leaving]
                if freed:
                    changes.append((now, -freed))
                leaving = []
            first = stop
        changes += [(copied, -size) for copied, size in leaving]
        # Copies run beside the steps, so sort by time; without copies the order is already right.
        changes.sort(key=itemgetter(0))
        held, points = 0.0, [(0.0, 0.0)]
        for time, change in changes:
            held += change
            if len(points) > 1 and points[-1][0] == time and points[-1][1] <= held:
                points.pop()
            points.append((time, held))
        curves.append(tuple(points))
    return tuple(curves)
