"""What a simulated step came to.

This module knows how the figures follow from times; it does not know how times come about.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.program import Program
from penstock.simulate.memory import peak_in_flight
from penstock.trace import Span, Trace

__all__ = ["Simulation"]


# Not slotted: the cached figures live in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The outcome of a simulated step. Times are in the unit of the costs.

    Args:
        program: what was simulated.
        starts: per rank, the start of each of its actions, overlapped blocks taken apart.
        ends: likewise, the ends. A receive ends when its message has come.
        messages: number of messages between ranks.
        busy: compute time of all ranks together.
        makespan: time from the first start to the last end of compute, over all ranks.
        span: the longest of the ranks' own times from first start to last end of compute.
    """

    program: Program
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    messages: int
    busy: float
    makespan: float
    span: float

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

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most stage-microbatch activations held at once, from F to W."""
        return peak_in_flight(self.program)

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
        )
