"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.program import CheckedProgram, Program
from penstock.search.problem import Objective
from penstock.simulate.simulation import Simulation

__all__ = ["Point", "SearchResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A program found by a search.

    Args:
        program: the program.
        value: its objective.
        peak: the peak of the fullest rank, in the unit of the memory limit.
        method: the method that found it.
    """

    program: Program
    value: float
    peak: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search: the best program of one copy of the model.

    Args:
        program: the checked program, without transfers.
        simulation: its times and figures under the costs of the search.
        objective: the minimized figure.
        value: its value.
        bound: a lower bound on the objective of programs of one copy of the model, on the given
            placements and within the memory limit.
        peak: the peak of the fullest rank, in the unit of the memory limit.
        method: the method that found it, such as ``"closed form: zbv"`` or ``"exact"``.
        reproducible: True if the same search finds the same program on any machine; False if the
            time limit cut it short.
    """

    program: CheckedProgram
    simulation: Simulation
    objective: Objective
    value: float
    bound: float
    peak: float
    method: str
    reproducible: bool

    @property
    def gap(self) -> float:
        """The largest possible gap to the optimum: (value - bound) ÷ value."""
        return max(0.0, 1 - self.bound / self.value) if self.value else 0.0

    @property
    def is_proven(self) -> bool:
        """True if the program is proven optimal among programs of one copy of the model, on the
        placements searched, without recomputation and offload."""
        return self.gap <= 1e-9
