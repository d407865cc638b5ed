"""The state of a search: programs and bounds found so far, and the budget left.

Work is counted in actions, so that a search makes the same choices on any machine: a limit in
seconds becomes a number of actions to place, at the rate of a slow machine. The clock ends a search
only on a machine below that rate; the result is then marked as not reproducible.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.schedule.check import check
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.search.problem import Order, SearchProblem
from penstock.search.result import Point, Progress, SearchResult
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.simulation import Simulation, simulate

__all__ = ["Budget", "Candidate", "SearchState", "meets"]

# Placing an action takes 1 to 2.5 µs on the machine that this was written on.
ACTIONS_PER_S = 400_000
# A deterministic second of CP-SAT takes 0.5 to 1.5 seconds there.
SOLVER_S_PER_S = 0.5
# The largest infeasible program that is simulated, in actions: it may serve as a start.
_SMALL = 10_000
# Least seconds per action for checking and simulating a program.
_CLOSING_S = 4e-6


class Budget:
    """The work and time left.

    Args:
        limit_s: the time limit in seconds, from now on.

    Attributes:
        actions: the total number of actions to place.
        solver_s: the deterministic seconds of CP-SAT within the limit.
        cut_short: True if the clock has ended any search.
    """

    def __init__(self, limit_s: float) -> None:
        self.actions = int(limit_s * ACTIONS_PER_S)
        self.solver_s = limit_s * SOLVER_S_PER_S
        self.cut_short = False
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._end - time.monotonic()

    def out_of_time(self, *, keep_s: float) -> bool:
        """True if no more than ``keep_s`` seconds are left; sets ``cut_short``."""
        if self.left_s <= keep_s:
            self.cut_short = True
            return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A simulated program, feasible or not.

    Args:
        program: the program.
        value: the objective.
        peak: the peak of the fullest rank.
        method: the method that found it.
        is_reduced: True if it recomputes or offloads.
    """

    program: Program
    value: float
    peak: float
    method: str
    is_reduced: bool = False


class SearchState:
    """The programs and bounds found so far.

    Args:
        problems: one per placement, with the same limit.
        budget: the work and the time.
        progress: a callback for the progress.
        reduced: True if programs may recompute or offload, and so evade bounds from the limit.

    Attributes:
        found: all programs, in the order of discovery.
        bounds: per placement and limit a lower bound on the objective.
        done_share: the share of the work done.
        closing_s: the estimated seconds to check the winner.
    """

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        *,
        budget: Budget,
        progress: Callable[[Progress], None] | None,
        reduced: bool = False,
    ) -> None:
        self.problems = list(problems)
        self.budget = budget
        self.found: list[Candidate] = []
        self.bounds: dict[tuple[Placement, float], float] = {}
        self.done_share = 0.0
        self._progress = progress
        self._reduced = reduced
        self.closing_s = _CLOSING_S * self.problems[0].size

    def best(self) -> Candidate | None:
        """The best feasible program; ties go to the lower peak, then to the earlier discovery."""
        return min(filter(self.keeps_limit, self.found), key=_merit, default=None)

    def plain(self, placement: Placement | None = None) -> list[Candidate]:
        """Feasible programs that neither recompute nor offload, best first."""
        found = [
            each
            for each in self.found_on(placement)
            if self.keeps_limit(each) and not each.is_reduced
        ]
        return sorted(found, key=_merit)

    def found_on(self, placement: Placement | None) -> list[Candidate]:
        """All programs of a placement, by objective."""
        found = [each for each in self.found if placement in (None, each.program.placement)]
        return sorted(found, key=lambda each: each.value)

    def keeps_limit(self, found: Candidate) -> bool:
        """True if a program is within the limit."""
        return found.peak <= self.problems[0].most

    def bound(self, problem: SearchProblem) -> float:
        """A lower bound on the objective of feasible programs on this placement."""
        placement, limit = problem.placement, problem.limit
        if (placement, limit) not in self.bounds:
            bounds = lower_bounds(
                problem.costs,
                ranks=placement.num_ranks,
                microbatches=problem.num_microbatches,
                placement=placement,
                memory_limit=None if self._reduced or math.isinf(limit) else limit,
            )
            self.bounds[placement, limit] = getattr(bounds, problem.objective)
        return self.bounds[placement, limit]

    def raise_bound(self, problem: SearchProblem, proven: float) -> None:
        """Record a bound on the programs of a placement that neither recompute nor offload."""
        if not self._reduced:
            key = problem.placement, problem.limit
            self.bounds[key] = max(self.bound(problem), proven)

    def bound_of_all(self) -> float:
        """A lower bound over all placements."""
        return min(map(self.bound, self.problems))

    def may_improve(self, problem: SearchProblem) -> bool:
        """True if a program of this placement may beat the best one."""
        best = self.best()
        return best is None or not meets(best.value, self.bound(problem))

    def is_over(self) -> bool:
        """True if the best program is proven optimal, or time is up."""
        return not any(map(self.may_improve, self.problems)) or self.is_late()

    def is_late(self, *, times: int = 1) -> bool:
        """True if no time is left but for ``times`` checks; never before the first program."""
        return self.best() is not None and self.budget.out_of_time(keep_s=times * self.closing_s)

    def note(self, problem: SearchProblem, program: Program, method: str) -> Candidate | None:
        """Simulate and keep a program; None for a large infeasible one."""
        peak = max(problem.peaks(program))
        if peak > problem.most and problem.size > _SMALL:
            return None
        began = time.monotonic()
        result = simulate(program, problem.costs)
        # The final check takes about as long, and the machine may have slowed down by then.
        self.closing_s = max(self.closing_s, 3 * (time.monotonic() - began))
        return self.note_simulated(problem, result, peak, method)

    def note_simulated(
        self,
        problem: SearchProblem,
        result: Simulation,
        peak: float,
        method: str,
        *,
        is_reduced: bool = False,
    ) -> Candidate:
        """Keep a simulated program."""
        found = Candidate(
            program=result.program,
            value=getattr(result, problem.objective),
            peak=peak,
            method=method,
            is_reduced=is_reduced,
        )
        self.found.append(found)
        return found

    def note_order(self, problem: SearchProblem, order: Order, method: str) -> Candidate | None:
        """Simulate and keep the program of an order."""
        return self.note(problem, problem.program(order, name="searched"), method)

    def tell(self, share: float, method: str) -> None:
        """Report the progress."""
        if self._progress is not None:
            best = self.best()
            self._progress(
                Progress(
                    share=min(1.0, share),
                    method=method,
                    value=None if best is None else best.value,
                    bound=self.bound_of_all(),
                )
            )

    def result(self, *, with_pareto: bool) -> SearchResult:
        """The search result, with checked programs."""
        best, problem = self.best(), self.problems[0]
        assert best is not None
        self.tell(1.0, best.method)
        return SearchResult(
            program=check(best.program),
            simulation=simulate(best.program, problem.costs),
            objective=problem.objective,
            value=best.value,
            bound=min(best.value, self.bound_of_all()),
            peak=best.peak,
            method=best.method,
            reproducible=not self.budget.cut_short,
            pareto=tuple(
                Point(program=check(p.program), value=p.value, peak=p.peak, method=p.method)
                for p in (self.front() if with_pareto else ())
            ),
        )

    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of time and memory, by memory."""
        front: list[Candidate] = []
        for each in sorted(self.found, key=lambda found: (found.peak, found.value)):
            better = not front or each.value < front[-1].value * (1 - 1e-9)
            if better and self.keeps_limit(each):
                front.append(each)
        return tuple(front)


def _merit(found: Candidate) -> tuple[float, float]:
    return found.value, found.peak


def meets(value: float, bound: float) -> bool:
    """True if a value equals the bound, up to rounding."""
    return value <= bound * (1 + 1e-9)
