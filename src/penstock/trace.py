"""Times of actions on ranks, in one record for simulated and measured steps.

This module neither measures nor draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.action import Action, Overlap
from penstock.schedule.rules import COMPUTE

__all__ = ["Span", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action's time on its rank.

    Args:
        rank: the rank that ran it.
        action: the action.
        start: start time, in the trace's unit, from the step's start.
        end: end time.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The spans of one step, and the figures that follow from them.

    Args:
        name: the schedule's name.
        num_ranks: number of ranks, including ranks without a span.
        unit: the unit of times: ``"s"`` for a measured step, ``"1"`` for abstract costs.
        spans: all spans, by rank and then by start.
        overlapped_pairs: the program's overlapped pairs; each of their actions has its own span.
    """

    name: str
    num_ranks: int
    unit: str
    spans: tuple[Span, ...]
    overlapped_pairs: tuple[Overlap, ...] = ()

    def compute(self, rank: int) -> tuple[Span, ...]:
        """The spans on ``rank`` that compute, by start."""
        return tuple(s for s in self.spans if s.rank == rank and s.action.op in COMPUTE)

    def pair_of(self) -> dict[Action, Overlap]:
        """By action, its overlapped pair."""
        return {part: pair for pair in self.overlapped_pairs for part in pair.parts}

    def _bounds(self) -> dict[int, tuple[float, float]]:
        """By rank, its first start and its last end of compute."""
        bounds: dict[int, tuple[float, float]] = {}
        for s in self.spans:
            if s.action.op in COMPUTE:
                start, end = bounds.get(s.rank, (s.start, s.end))
                bounds[s.rank] = min(start, s.start), max(end, s.end)
        return bounds

    def _idle_share(self, length: float) -> float:
        busy, reached = 0.0, dict[int, float]()
        for s in self.spans:
            if s.action.op in COMPUTE:
                # The common time of overlapped actions counts once.
                start = max(s.start, reached.get(s.rank, s.start))
                busy += max(0.0, s.end - start)
                reached[s.rank] = max(start, s.end)
        total = self.num_ranks * length
        return 1 - busy / total if total else 0.0

    @property
    def makespan(self) -> float:
        """Time from the first compute start to the last compute end, over all ranks."""
        bounds = self._bounds().values()
        return max((b[1] for b in bounds), default=0.0) - min((b[0] for b in bounds), default=0.0)

    @property
    def span(self) -> float:
        """The longest of the ranks' own times from first start to last end of compute."""
        return max((end - start for start, end in self._bounds().values()), default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """The ranks' idle time ÷ (ranks × makespan)."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble_ratio(self) -> float:
        """The bubble ratio over the span: the idle share of steps that need no barrier."""
        return self._idle_share(self.span)
