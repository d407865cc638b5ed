"""What a simulated step came to.

This module knows which figures follow from times; it does not know how times come about.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.program import Program
from penstock.simulate.bounds import LowerBounds, lower_bounds
from penstock.simulate.costs import Costs
from penstock.simulate.memory import Curve, memory_curves, peak_in_flight
from penstock.simulate.path import Waits
from penstock.trace import Span, Trace

__all__ = ["Simulation"]


# Not slotted: the cached figures live in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The outcome of a simulated step. Times are in the unit of the costs.

    Args:
        program: what was simulated.
        costs: what it was simulated with.
        starts: per rank, the start of each of its actions, overlapped blocks taken apart.
        ends: likewise, the ends. A receive ends when its message has come.
        makespan: time from the first start to the last end of compute, over all ranks.
        span: the longest of the ranks' own times from first start to last end of compute.
        busy_per_rank: per rank, the time that it computes.
    """

    program: Program
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
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
        total = self.program.num_ranks * self.makespan
        return 1 - self.busy / total if total else 0.0

    @property
    def span_bubble_ratio(self) -> float:
        """As ``bubble_ratio``, over the span: what is idle where steps need no barrier."""
        total = self.program.num_ranks * self.span
        return 1 - self.busy / total if total else 0.0

    @property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """Per rank, its idle time ÷ makespan."""
        whole = self.makespan
        return tuple(1 - busy / whole if whole else 0.0 for busy in self.busy_per_rank)

    @cached_property
    def messages(self) -> int:
        """Number of messages between ranks."""
        placement = self.program.placement

        def crossings(stage: int, offset: int) -> int:
            other = placement.neighbour(stage, offset)
            return int(other is not None and not placement.same_rank(stage, other))

        stages = range(placement.num_stages)
        taken = {Op.FORWARD: [crossings(stage, -1) for stage in stages]}
        taken[Op.FULL_BACKWARD] = [crossings(stage, +1) for stage in stages]
        taken[Op.INPUT_GRAD] = taken[Op.FULL_BACKWARD]
        return sum(taken[a.op][a.stage] for a in self.program.actions() if a.op in taken)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most stage-microbatch activations held at once, from F to W."""
        return peak_in_flight(self.program)

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Per rank, what it holds: (time, amount) wherever the amount changes, by time.

        Amounts are in bytes where the costs say how large an activation is, else in activations.
        """
        return memory_curves(self.program, self.costs, self.starts, self.ends)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most that it holds at once, in the unit of ``memory``."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.memory)

    @cached_property
    def bounds(self) -> LowerBounds | None:
        """What no program with these stages, costs and microbatches can beat.

        It is one for programs whose blocks hold a forward and a backward: None where there are
        others, and ``costs.overlap`` says how long they take.
        """
        if self.costs.overlap is not None and not all(map(_is_pair, self.program.blocks)):
            return None
        return lower_bounds(
            self.costs,
            ranks=self.program.num_ranks,
            microbatches=self.program.num_microbatches,
            placement=self.program.placement,
            backward=self.program.has_backward,
        )

    @cached_property
    def _waits(self) -> Waits:
        return Waits(self.program, self.costs, self.starts, self.ends)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The computations that the makespan comes from, by start: each but the first started
        when the one before it had ended, on its own rank, or when that one's message came."""
        return self._waits.critical_path()

    def waited_for(self, span: Span) -> Action | None:
        """What an action was held up by after its rank was free.

        Args:
            span: a span of ``trace``.

        Returns:
            The action whose result it waited for; None where it began as soon as its rank had
            done the step before.
        """
        return self._waits.waited_for(span)

    @cached_property
    def trace(self) -> Trace:
        """Every action's time, by rank and then by start: what pictures are drawn from."""
        spans: list[Span] = []
        for rank, steps in enumerate(self.program.ranks):
            actions = (part for step in steps for part in step.parts)
            times = zip(actions, self.starts[rank], self.ends[rank], strict=True)
            spans += (Span(rank=rank, action=a, start=start, end=end) for a, start, end in times)
        return Trace(
            name=self.program.name,
            num_ranks=self.program.num_ranks,
            unit="1",
            spans=tuple(spans),
            blocks=self.program.blocks,
        )


def _is_pair(block: Overlap) -> bool:
    """Whether a block holds a forward and a backward, and nothing more."""
    forwards = [part.op is Op.FORWARD for part in block.parts]
    return sorted(forwards) == [False, True]
