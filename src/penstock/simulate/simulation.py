"""Simulate a program under costs; makespan, bubble and memory follow from its times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import sub

from penstock.schedule.index import index_program
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE
from penstock.simulate.bounds import LowerBounds, lower_bounds
from penstock.simulate.costs import Costs, refuse_no_costs
from penstock.simulate.critical_path import StepCauses
from penstock.simulate.memory import Curve, StageMemory, memory_curves, peak_in_flight
from penstock.simulate.timeline import RankTimes, play_timeline
from penstock.trace import Span, Trace

__all__ = ["Simulation", "simulate"]

_UNIT = Costs()


def simulate(program: Program, costs: Costs = _UNIT) -> Simulation:
    """Simulate a program: each step starts as soon as its rank is free and its inputs are there.

    A posted receive blocks only the action that uses its message. An overlapped pair starts when
    both actions are ready, and yields both results at its end. Collectives are not simulated:
    UNSHARD, RESHARD and REDUCE_GRAD take no time and wait for no replica.

    Args:
        program: compute-only or with transfers, which take the same time.
        costs: the cost of each kind of action; by default 1 each, and no latency.

    Returns:
        The times of all actions, and the figures that follow from them.

    Raises:
        ScheduleError: the program deadlocks (the message lists the waiting ranks) or repeats an
            action; the costs are for another number of stages; or ``program`` or ``costs`` has the
            wrong type.

    Examples:
        >>> from penstock.schedule.registry import build
        >>> result = simulate(build("gpipe", ranks=4, microbatches=8))
        >>> result.makespan, result.peak_in_flight
        (33.0, (8, 8, 8, 8))
    """
    refuse_no_program(program, "simulate()")
    refuse_no_costs(costs, "simulate()")
    starts, ends, computes_only = play_timeline(program, costs)
    firsts, lasts, busy = list[float](), list[float](), list[float]()
    for steps, begun, done in zip(program.ranks, starts, ends, strict=True):
        if not computes_only:
            computes = [part.op in COMPUTE for step in steps for part in step.parts]
            begun, done = tuple(compress(begun, computes)), tuple(compress(done, computes))
        busy.append(float(sum(map(sub, done, begun))))
        firsts += begun[:1]
        lasts += done[-1:]
    return Simulation(
        program=program,
        costs=costs,
        starts=starts,
        ends=ends,
        makespan=max(lasts, default=0.0) - min(firsts, default=0.0),
        span=max((b - a for a, b in zip(firsts, lasts, strict=True)), default=0.0),
        busy_per_rank=tuple(busy),
    )


# Not slotted: the cached figures live in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated step, with times in the unit of the costs.

    Args:
        program: the simulated program.
        costs: the costs of the simulation.
        starts: per rank, the start of each of its actions, overlapped pairs taken apart.
        ends: per rank, the end of each of its actions. A receive ends when its message has arrived.
        makespan: time from the first start to the last end of compute, over all ranks.
        span: the longest of the ranks' own times from first start to last end of compute.
        busy_per_rank: per rank, its compute time.
    """

    program: Program
    costs: Costs
    starts: RankTimes
    ends: RankTimes
    makespan: float
    span: float
    busy_per_rank: tuple[float, ...]

    @property
    def busy(self) -> float:
        """Compute time of all ranks together."""
        return sum(self.busy_per_rank)

    @property
    def bubble_ratio(self) -> float:
        """The ranks' idle time ÷ (ranks x makespan)."""
        return _idle_share(self.busy, self.program.num_ranks * self.makespan)

    @property
    def span_bubble_ratio(self) -> float:
        """The bubble ratio over the span: the idle share of steps that need no barrier."""
        return _idle_share(self.busy, self.program.num_ranks * self.span)

    @property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """Per rank, its idle time ÷ makespan."""
        return tuple(_idle_share(busy, self.makespan) for busy in self.busy_per_rank)

    @cached_property
    def messages(self) -> int:
        """Number of messages between ranks."""
        indexed = index_program(self.program)
        received, width = indexed.receives(), indexed.num_microbatches
        return sum(len(received[number // width]) for number in indexed.ids())

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the peak number of activations in flight, from F to W."""
        return peak_in_flight(self.program)

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Per rank, its memory over time: (time, amount) at each change, by time.

        Amounts are in bytes if the costs give the size of an activation, else in activations.
        """
        memory = StageMemory.of(self.costs, self.program.num_stages)
        return memory_curves(self.program.ranks, memory, self.starts, self.ends)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, its peak memory, in the unit of ``memory``."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.memory)

    @cached_property
    def bounds(self) -> LowerBounds:
        """Lower bounds on any program of these stages, costs and microbatches."""
        return lower_bounds(
            self.costs,
            self.program.placement,
            microbatches=self.program.num_microbatches,
            backward=self.program.has_backward,
        )

    @cached_property
    def causes(self) -> StepCauses:
        """The cause of each computation's and each copy's start."""
        return StepCauses(self.trace, costs=self.costs, placement=self.program.placement)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The computations on the critical path, by start: each but the first starts at the end of
        the one before it on its rank, or when the message of the one before it arrives."""
        return self.causes.critical_path()

    @cached_property
    def trace(self) -> Trace:
        """Every action's time, by rank and start: the input of all pictures."""
        spans = []
        for rank, steps in enumerate(self.program.ranks):
            actions = (part for step in steps for part in step.parts)
            times = zip(actions, self.starts[rank], self.ends[rank], strict=True)
            spans += [Span(rank=rank, action=act, start=a, end=b) for act, a, b in times]
        return Trace(
            name=self.program.name,
            num_ranks=self.program.num_ranks,
            unit="1",
            spans=tuple(spans),
            overlapped_pairs=self.program.overlapped_pairs,
        )


def _idle_share(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole else 0.0
