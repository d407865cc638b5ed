"""The result of a search, and its progress."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.program import CheckedProgram
from penstock.search.problem import Objective
from penstock.simulate.simulation import Simulation

__all__ = ["Point", "Progress", "SearchResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a search.

    Args:
        share: the share of its work that is done, from 0 to 1.
        method: the method at work.
        value: the objective of the best program so far; None before the first.
        bound: a lower bound on the objective of programs of one copy of the model.
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
        method: the method that found it.
    """

    program: CheckedProgram
    value: float
    peak: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best program of one copy of the model that a search found.

    Args:
        program: the checked program, without transfers.
        simulation: its times and figures under the costs of the search.
        objective: the figure that was minimized.
        value: its value.
        bound: a lower bound on the objective of programs of one copy of the model, on the given
            placements and within the memory limit.
        peak: the most that a rank holds at once, in the unit of the memory limit.
        method: the method that found it, such as ``"closed form: zbv"`` or ``"exact"``.
        reproducible: whether the same search finds the same program anywhere: False if the clock
            ended a part of it.
        pareto: time against memory, if asked for: from the least memory to the least time.
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
        """Whether no program of one copy of the model is better, of those that neither recompute
        nor offload."""
        return self.gap <= 1e-9
