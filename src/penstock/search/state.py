"""The state of a search: programs and bounds found so far, and the budget; and its result.

So that a search makes the same choices on any machine, its limit in seconds becomes a number of
actions to place, at the rate of a slow machine. The clock ends a search only below that rate; the
result is then marked as not reproducible.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.check import check
from penstock.schedule.placement import Placement
from penstock.schedule.program import CheckedProgram, Program
from penstock.search.problem import Objective, Order, SearchProblem
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.simulation import Simulation, simulate

__all__ = ["Budget", "Point", "SearchResult", "SearchState", "meets"]

# Placing an action takes 1 to 2.5 µs on a server's core.
_ACTIONS_PER_S = 400_000
# A deterministic second of CP-SAT takes 0.5 to 1.5 seconds there.
_SOLVER_S_PER_S = 0.5
# The largest infeasible program that is simulated, in actions: it may serve as a start.
_SMALL = 10_000
# Least seconds per action for checking and simulating a program.
_CLOSING_S = 4e-6


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


class Budget:
    """The work and the time of a search, or of a part of it.

    ``limit_s`` is the time from now on; ``work_s`` (None for the same) determines the work: the
    number of actions to place, and ``solver_s``, deterministic seconds of CP-SAT.
    """

    def __init__(self, limit_s: float, work_s: float | None = None) -> None:
        self.work_s = limit_s if work_s is None else work_s
        self.actions = int(self.work_s * _ACTIONS_PER_S)
        self.solver_s = self.work_s * _SOLVER_S_PER_S
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._end - time.monotonic()

    def part(self, share: float, *, of: float = 1.0) -> Budget:
        """A budget of ``share`` of the work, and ``share / of`` of the time left."""
        return Budget(self.left_s * share / of, self.work_s * share)


class SearchState:
    """The programs and bounds found so far.

    Args:
        problems: one per placement, with the same limit.
        budget: the work and the time of the whole search.
        seed: the random seed.
        reduces: True if programs may recompute or offload, and so evade bounds from the limit.

    Attributes:
        plain: the programs that neither recompute nor offload, feasible or not.
        reduced: the programs that do.
        cut_short: True if the clock has ended any method.
        closing_s: the estimated seconds to check the winner.
    """

    def __init__(
        self, problems: Sequence[SearchProblem], *, budget: Budget, seed: int, reduces: bool = False
    ) -> None:
        self.problems, self.budget, self.seed = list(problems), budget, seed
        self.plain: list[Point] = []
        self.reduced: list[Point] = []
        self.cut_short = False
        self.closing_s = _CLOSING_S * self.problems[0].size
        self._bounds: dict[tuple[Placement, float], float] = {}
        self._reduces = reduces

    def _fits(self, found: Point) -> bool:
        return found.peak <= self.problems[0].most

    def best(self) -> Point | None:
        """The best feasible program; ties go to the lower peak, then to the earlier discovery."""
        return min(filter(self._fits, (*self.plain, *self.reduced)), key=_merit, default=None)

    def ranked(self, placement: Placement | None = None, *, feasible: bool = True) -> list[Point]:
        """The plain programs of a placement, best first."""
        found = [each for each in self.plain if placement in (None, each.program.placement)]
        return sorted(filter(self._fits, found) if feasible else found, key=_merit)

    def bound(self, problem: SearchProblem) -> float:
        """A lower bound on the objective of feasible programs on this placement."""
        placement, limit = problem.placement, problem.limit
        if (placement, limit) not in self._bounds:
            bounds = lower_bounds(
                problem.costs,
                placement,
                microbatches=problem.num_microbatches,
                memory_limit=None if self._reduces or math.isinf(limit) else limit,
            )
            self._bounds[placement, limit] = getattr(bounds, problem.objective)
        return self._bounds[placement, limit]

    def raise_bound(self, problem: SearchProblem, proven: float) -> None:
        """Record a bound on the programs of a placement that neither recompute nor offload."""
        if not self._reduces:
            key = problem.placement, problem.limit
            self._bounds[key] = max(self.bound(problem), proven)

    def may_improve(self, problem: SearchProblem) -> bool:
        """True if a program of this placement may beat the best one."""
        best = self.best()
        return best is None or not meets(best.value, self.bound(problem))

    def is_over(self) -> bool:
        """True if the best program is proven optimal, or time is up."""
        return not any(map(self.may_improve, self.problems)) or self.is_late()

    def is_late(self, part: Budget | None = None, *, times: int = 1) -> bool:
        """True if no time is left in ``part``, or in all but for ``times`` checks of the winner;
        never before the first program."""
        late = self.budget.left_s <= times * self.closing_s or (part and part.left_s <= 0)
        if not late or self.best() is None:
            return False
        self.cut_short = True
        return True

    def note(self, problem: SearchProblem, program: Program, method: str) -> None:
        """Simulate and keep a program, unless it is large and infeasible."""
        peak = max(problem.peaks(program))
        if peak > problem.most and problem.size > _SMALL:
            return
        began = time.monotonic()
        result = simulate(program, problem.costs)
        # The final check takes about as long, and the machine may have slowed down by then.
        self.closing_s = max(self.closing_s, 3 * (time.monotonic() - began))
        value = getattr(result, problem.objective)
        self.plain.append(Point(program=program, value=value, peak=peak, method=method))

    def note_order(self, problem: SearchProblem, order: Order, method: str) -> None:
        """Simulate and keep the program of an order."""
        self.note(problem, problem.program(order, name="searched"), method)

    def result(self) -> SearchResult:
        """The search result, with the best program, checked."""
        best, problem = self.best(), self.problems[0]
        assert best is not None
        return SearchResult(
            program=check(best.program),
            simulation=simulate(best.program, problem.costs),
            objective=problem.objective,
            value=best.value,
            bound=min(best.value, *map(self.bound, self.problems)),
            peak=best.peak,
            method=best.method,
            reproducible=not self.cut_short,
        )


def _merit(found: Point) -> tuple[float, float]:
    return found.value, found.peak


def meets(value: float, bound: float) -> bool:
    """True if a value equals the bound, up to rounding."""
    return value <= bound * (1 + 1e-9)
