"""What a search knows so far: programs, bounds, how much of its time is left.

This module finds nothing itself; the methods of ``penstock.search.methods`` put in what they find.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.schedule.check import check
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.search.budget import Budget
from penstock.search.problem import Order, Problem, program_of, slack
from penstock.search.result import Point, Progress, SearchResult
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.engine import simulate

__all__ = ["Found", "Known", "meets"]

# Up to how many actions a program over the limit is simulated, too: it may be a start.
_SMALL = 10_000
# Seconds per action that the proof and the simulation of a program take at least.
_CLOSING_S = 4e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A program with all microbatches, simulated; within the limit or not.

    Args:
        placement: how its stages lie.
        program: the program.
        value: the objective.
        peak: the most that a rank holds.
        method: what found it.
    """

    placement: Placement
    program: Program
    value: float
    peak: float
    method: str


class Known:
    """What is known so far.

    Args:
        problems: one per placement, with the same limit.
        budget: the work and the time.
        progress: told now and then how far the search is.

    Attributes:
        found: all programs, in the order in which they were found.
        bounds: per placement and limit what no program can beat; methods may raise it.
        done_share: how much of the work is behind.
        closing_s: the seconds that the proof of the winner will take.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        budget: Budget,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problems = list(problems)
        self.budget = budget
        self.found: list[Found] = []
        self.bounds: dict[tuple[Placement, float], float] = {}
        self.done_share = 0.0
        self._progress = progress
        self.closing_s = _CLOSING_S * self.problems[0].size

    @property
    def limit(self) -> float:
        """What a rank may hold now."""
        return self.problems[0].limit

    def best(self, placement: Placement | None = None) -> Found | None:
        """The best within the limit; of equals, what holds less, then what was found first."""
        within = [
            found
            for found in self.found
            if self.keeps(found) and placement in (None, found.placement)
        ]
        return min(within, key=lambda found: (found.value, found.peak), default=None)

    def keeps(self, found: Found) -> bool:
        """Whether a program is within the limit."""
        return found.peak <= self.limit + slack(self.limit)

    def bound(self, problem: Problem) -> float:
        """What no program of this placement can beat within the limit."""
        key = problem.placement, problem.limit
        if key not in self.bounds:
            bounds = lower_bounds(
                problem.costs,
                ranks=problem.placement.num_ranks,
                microbatches=problem.num_microbatches,
                placement=problem.placement,
                memory_limit=None if math.isinf(problem.limit) else problem.limit,
            )
            self.bounds[key] = bounds.makespan if problem.objective == "makespan" else bounds.span
        return self.bounds[key]

    def bound_of_all(self) -> float:
        """What no program of any of the placements can beat."""
        return min(map(self.bound, self.problems))

    def is_over(self) -> bool:
        """Whether the best is proven, or the time is up."""
        best = self.best()
        return best is not None and (meets(best.value, self.bound_of_all()) or self.is_late())

    def is_late(self, *, times: int = 1) -> bool:
        """Whether the clock leaves no time to search on, once there is something to answer.

        Args:
            times: for how many proofs of a winner there must be time.
        """
        if self.best() is None:
            return False
        return self.budget.out_of_time(keep_s=times * self.closing_s)

    def note(self, problem: Problem, program: Program, method: str) -> Found | None:
        """Simulate a program and keep it, with what it comes to.

        A large one that is over the limit is not worth the time: None.
        """
        peak = max(problem.peaks(program))
        if peak > self.limit + slack(self.limit) and problem.size > _SMALL:
            return None
        began = time.monotonic()
        result = simulate(program, problem.costs)
        # The proof takes about as long, and the machine may have got slower by then.
        self.closing_s = max(self.closing_s, 3 * (time.monotonic() - began))
        found = Found(
            placement=problem.placement,
            program=program,
            value=result.makespan if problem.objective == "makespan" else result.span,
            peak=peak,
            method=method,
        )
        self.found.append(found)
        return found

    def note_order(self, problem: Problem, order: Order, method: str) -> Found | None:
        """The same with an order."""
        return self.note(problem, program_of(problem, order, name="searched"), method)

    def tell(self, share: float, method: str) -> None:
        """Say how far this is."""
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
        """What came of it, proven right."""
        best = self.best()
        assert best is not None
        self.tell(1.0, best.method)
        return SearchResult(
            program=check(best.program),
            simulation=simulate(best.program, self.problems[0].costs),
            objective=self.problems[0].objective,
            value=best.value,
            bound=min(best.value, self.bound_of_all()),
            peak=best.peak,
            method=best.method,
            reproducible=not self.budget.cut_short,
            pareto=self.front() if with_pareto else (),
        )

    def front(self) -> tuple[Point, ...]:
        """The programs that none beats in both time and memory, by memory."""
        points: list[Point] = []
        for each in sorted(self.found, key=lambda found: (found.peak, found.value)):
            better = not points or each.value < points[-1].value * (1 - 1e-9)
            if better and self.keeps(each):
                points.append(
                    Point(
                        program=check(each.program),
                        value=each.value,
                        peak=each.peak,
                        method=each.method,
                    )
                )
        return tuple(points)


def meets(value: float, bound: float) -> bool:
    """Whether a value is as good as the bound, but for rounding."""
    return value <= bound * (1 + 1e-9)
