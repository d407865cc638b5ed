"""What a search came to, and what it tells on the way. This module searches nothing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.program import CheckedProgram
from penstock.search.problem import Objective
from penstock.simulate.simulation import Simulation

__all__ = ["Point", "Progress", "SearchResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is.

    Args:
        share: of the work that it is given, from 0 to 1.
        method: what is at work.
        value: the objective of the best program so far; None before the first.
        bound: what no program of one copy of the model can beat.
    """

    share: float
    method: str
    value: float | None
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A program that no other known one beats in both time and memory.

    Args:
        program: the program.
        value: its objective.
        peak: the most that a rank holds at once, in the unit of the memory limit.
        method: what found it.
    """

    program: CheckedProgram
    value: float
    peak: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best program of one copy of the model that a search found.

    Args:
        program: the program, proven right, without transfers.
        simulation: its times and figures under the costs that were searched for.
        objective: what was made small.
        value: how small.
        bound: no program of one copy of the model, on the placements that were asked for, has a
            smaller objective within the memory limit.
        peak: the most that a rank holds at once, in the unit of the memory limit.
        method: what found it, such as ``"closed form: zbv"`` or ``"exact"``.
        reproducible: whether the same search finds the same program anywhere: False where the
            clock ended a part of it.
        pareto: time against memory, where asked for: from the least memory to the least time.
    """

    program: CheckedProgram
    simulation: Simulation
    objective: Objective
    value: float
    bound: float
    peak: float
    method: str
    reproducible: bool
    pareto: tuple[Point, ...] = ()

    @property
    def gap(self) -> float:
        """How far the value may be from the best: (value - bound) ÷ value."""
        return max(0.0, 1 - self.bound / self.value) if self.value else 0.0

    @property
    def is_proven(self) -> bool:
        """Whether no program of one copy of the model is better, of those that keep what forwards
        leave on the rank."""
        return self.gap <= 1e-9
