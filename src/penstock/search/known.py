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
from penstock.search.problem import Order, SearchProblem, program_of, slack
from penstock.search.result import Point, Progress, SearchResult
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.simulation import Simulation, simulate

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
        is_relieved: whether it recomputes or offloads.
    """

    placement: Placement
    program: Program
    value: float
    peak: float
    method: str
    is_relieved: bool = False


class Known:
    """What is known so far.

    Args:
        problems: one per placement, with the same limit.
        budget: the work and the time.
        progress: told now and then how far the search is.
        relieved: whether programs may recompute or offload, so that a bound that a memory limit
            gives is none for them.

    Attributes:
        found: all programs, in the order in which they were found.
        bounds: per placement and limit what no program can beat.
        done_share: how much of the work is behind.
        closing_s: the seconds that the proof of the winner will take.
    """

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        *,
        budget: Budget,
        progress: Callable[[Progress], None] | None,
        relieved: bool = False,
    ) -> None:
        self.problems = list(problems)
        self.budget = budget
        self.found: list[Found] = []
        self.bounds: dict[tuple[Placement, float], float] = {}
        self.done_share = 0.0
        self._progress = progress
        self._relieved = relieved
        self.closing_s = _CLOSING_S * self.problems[0].size

    @property
    def limit(self) -> float:
        """What a rank may hold now."""
        return self.problems[0].limit

    def best(self) -> Found | None:
        """The best within the limit; of equals, what holds less, then what was found first."""
        return min(filter(self.keeps, self.found), key=_merit, default=None)

    def plain(self, placement: Placement | None = None) -> list[Found]:
        """Programs within the limit that keep what forwards leave, the best first."""
        found = [
            each
            for each in self.found
            if self.keeps(each) and not each.is_relieved and placement in (None, each.placement)
        ]
        return sorted(found, key=_merit)

    def keeps(self, found: Found) -> bool:
        """Whether a program is within the limit."""
        return found.peak <= self.limit + slack(self.limit)

    def bound(self, problem: SearchProblem) -> float:
        """What no program of this placement can beat within the limit."""
        key = problem.placement, problem.limit
        if key not in self.bounds:
            unlimited = self._relieved or math.isinf(problem.limit)
            bounds = lower_bounds(
                problem.costs,
                ranks=problem.placement.num_ranks,
                microbatches=problem.num_microbatches,
                placement=problem.placement,
                memory_limit=None if unlimited else problem.limit,
            )
            self.bounds[key] = bounds.makespan if problem.objective == "makespan" else bounds.span
        return self.bounds[key]

    def raise_bound(self, problem: SearchProblem, proven: float) -> None:
        """Take in a bound for the programs of a placement that keep what forwards leave."""
        if not self._relieved:
            key = problem.placement, problem.limit
            self.bounds[key] = max(self.bound(problem), proven)

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

    def note(self, problem: SearchProblem, program: Program, method: str) -> Found | None:
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
        return self.note_simulated(problem, result, peak, method)

    def note_simulated(
        self,
        problem: SearchProblem,
        result: Simulation,
        peak: float,
        method: str,
        *,
        is_relieved: bool = False,
    ) -> Found:
        """Keep a program that has been simulated."""
        found = Found(
            placement=problem.placement,
            program=result.program,
            is_relieved=is_relieved,
            value=result.makespan if problem.objective == "makespan" else result.span,
            peak=peak,
            method=method,
        )
        self.found.append(found)
        return found

    def note_order(self, problem: SearchProblem, order: Order, method: str) -> Found | None:
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
            pareto=tuple(map(_point, self.front())) if with_pareto else (),
        )

    def front(self) -> tuple[Found, ...]:
        """The programs that none beats in both time and memory, by memory."""
        front: list[Found] = []
        for each in sorted(self.found, key=lambda found: (found.peak, found.value)):
            better = not front or each.value < front[-1].value * (1 - 1e-9)
            if better and self.keeps(each):
                front.append(each)
        return tuple(front)


def _point(found: Found) -> Point:
    """A program, proven right."""
    return Point(
        program=check(found.program), value=found.value, peak=found.peak, method=found.method
    )


def _merit(found: Found) -> tuple[float, float]:
    return found.value, found.peak


def meets(value: float, bound: float) -> bool:
    """Whether a value is as good as the bound, but for rounding."""
    return value <= bound * (1 + 1e-9)
