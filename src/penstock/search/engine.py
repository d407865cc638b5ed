"""Searches for the best program, from what costs next to nothing to what is exact.

    closed forms     every schedule of the catalog on these placements and within the limit
    retimed          their orders as urgencies, so that uneven costs take no more gaps than needed
    blocks           list scheduling by building blocks, their knobs tuned on few microbatches and
                     the best stretched to all
    exchanges        neighbours on the critical path, where the step is not large
    exact            CP-SAT, warm-started from the best: the whole step where it is small, else
                     windows of it, the cool-down first

Each method starts from what those before it found, and nothing worse ever takes its place. This
module knows what follows what; how each method works is the affair of its own module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.catalog import build, schedules
from penstock.schedule.check import check
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE
from penstock.search.asked import problems_of
from penstock.search.budget import Budget
from penstock.search.exact import Exact, improve
from penstock.search.greedy import Placed, place, played
from penstock.search.problem import Objective, Order, Problem, order_of, program_of, slack
from penstock.search.result import Point, Progress, SearchResult
from penstock.search.swaps import Swapper
from penstock.search.tune import Tuner, run_block
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.costs import Costs
from penstock.simulate.engine import simulate

__all__ = ["search"]

_UNIT = Costs()
# Numbers of actions: up to which a program over the limit is simulated, too; up to which exact
# search takes all of a step, or windows of it; in one window.
_SMALL, _WHOLE, _WINDOWED, _WINDOW = 10_000, 400, 4_000, 150
# Of the work, the part of the first search where time is traded against memory.
_FIRST = 0.3
# After how many blocks that are no better tuning stops, where exact search goes on and where not.
_STALE_WHOLE, _STALE = 300, 2_000
# How many exchanges are tried at most.
_SWAPS = 10_000
# Seconds per action that the proof and the simulation of a program take at least.
_CLOSING_S = 4e-6


def search(
    costs: Costs = _UNIT,
    *,
    ranks: int,
    microbatches: int,
    virtual: int | None = None,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
    placements: Sequence[Placement] | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    exact: bool = True,
    pareto: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best program for these costs, within this memory, that can be found in this time.

    Args:
        costs: what each kind of action costs, and what activations take.
        ranks: number of ranks.
        microbatches: microbatches per step.
        virtual: stages per rank; None for what costs given per stage imply, or else 1.
        memory_limit: the most that a rank may hold at once of what is kept from F to W: in
            activations, or in bytes where ``costs.activation_bytes`` is given; None for no limit.
        objective: ``"makespan"``, from the first start to the last end over all ranks (there is a
            barrier before the optimizer), or ``"span"``, the longest of the ranks' own (none).
        placements: how stages may lie on ranks; None for loops, and waves where ``virtual`` is
            even.
        time_limit_s: how long to search, in seconds.
        seed: of random choices. The same seed finds the same program on every machine that is
            not much slower than ours (see ``SearchResult.reproducible``).
        exact: whether to polish small steps with OR-Tools CP-SAT (``penstock[search]``).
        pareto: whether to look for programs that take more time in less memory, too.
        progress: called now and then with how far the search is.

    Returns:
        The best program, its figures, and a bound that no program can beat.

    Raises:
        ScheduleError: a memory limit that no program can meet (the message says the least that
            one can); numbers, costs or placements that don't go together; OR-Tools is asked for
            and missing.

    Example:
        >>> found = search(ranks=4, microbatches=8, memory_limit=3, exact=False)
        >>> found.value, found.peak
        (31.0, 3.0)

    Source: arXiv:2401.10241, sec. 3.1 (search under a memory limit); arXiv:2405.15362 (blocks).
    """
    if not (isinstance(time_limit_s, (int, float)) and time_limit_s > 0):
        raise ScheduleError(f"search: time_limit_s={time_limit_s!r} must be a number above 0")
    if exact and find_spec("ortools") is None:
        raise ScheduleError(
            "search: exact search needs OR-Tools; pip install 'penstock[search]', or pass "
            "exact=False to search without"
        )
    budget = Budget(time_limit_s)
    problems = problems_of(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        virtual=virtual,
        memory_limit=memory_limit,
        objective=objective,
        placements=placements,
    )
    run = _Search(problems, budget=budget, seed=seed, exact=exact, progress=progress)
    run.go(share=_FIRST if pareto else 1.0)
    if pareto:
        run.trade(steps=8)
    return run.result(with_pareto=pareto)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A program with all microbatches, simulated; within the limits or not."""

    placement: Placement
    program: Program
    value: float
    peak: float
    method: str


class _Search:
    """What is known so far."""

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        budget: Budget,
        seed: int,
        exact: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problems = list(problems)
        self.budget, self.seed, self.exact, self.progress = budget, seed, exact, progress
        self.found: list[_Found] = []
        self.bounds: dict[tuple[Placement, float], float] = {}
        self.has_closed_forms: set[Placement] = set()
        self.done_share = 0.0
        self.closing_s = _CLOSING_S * self.problems[0].size

    # --- what is known ----------------------------------------------------------------------

    @property
    def limit(self) -> float:
        """What a rank may hold now."""
        return self.problems[0].limit

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of the work, what goes into blocks, exchanges and exact search."""
        size = self.problems[0].size
        if size > _WINDOWED:
            return 1.0, 0.0, 0.0
        if not self.exact:
            return 0.7, 0.3, 0.0
        return (0.1, 0.05, 0.85) if size <= _WHOLE else (0.6, 0.2, 0.2)

    def best(self, placement: Placement | None = None) -> _Found | None:
        """The best within the limit; of equals, what holds less, then what was found first."""
        most = self.limit + slack(self.limit)
        within = [
            found
            for found in self.found
            if found.peak <= most and placement in (None, found.placement)
        ]
        return min(within, key=lambda found: (found.value, found.peak), default=None)

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
        return best is not None and (_meets(best.value, self.bound_of_all()) or self.is_late())

    def is_late(self, *, times: int = 1) -> bool:
        """Whether the clock leaves no time to search on, once there is something to answer.

        Args:
            times: for how many proofs of a winner there must be time.
        """
        if self.best() is None:
            return False
        return self.budget.out_of_time(keep_s=times * self.closing_s)

    def note(self, problem: Problem, program: Program, method: str) -> None:
        """Simulate a program and keep it, with what it comes to.

        A large one that is over the limit is not worth the time.
        """
        peak = max(problem.peaks(program))
        if peak > problem.limit + slack(problem.limit) and problem.size > _SMALL:
            return
        began = time.monotonic()
        result = simulate(program, problem.costs)
        # The proof takes about as long, and the machine may have got slower by then.
        self.closing_s = max(self.closing_s, 3 * (time.monotonic() - began))
        value = result.makespan if problem.objective == "makespan" else result.span
        self.found.append(
            _Found(
                placement=problem.placement,
                program=program,
                value=value,
                peak=peak,
                method=method,
            )
        )

    def note_order(self, problem: Problem, order: Order, method: str) -> None:
        """The same with an order."""
        self.note(problem, program_of(problem, order, name="searched"), method)

    def tell(self, share: float, method: str) -> None:
        """Say how far this is."""
        if self.progress is not None:
            best = self.best()
            self.progress(
                Progress(
                    share=min(1.0, share),
                    method=method,
                    value=None if best is None else best.value,
                    bound=self.bound_of_all(),
                )
            )

    # --- the methods, in turn ---------------------------------------------------------------

    def go(self, *, share: float) -> None:
        """Search all placements with a share of the work."""
        self.tell(self.done_share, "closed forms")
        for problem in self.problems:
            if problem.placement not in self.has_closed_forms:
                self.has_closed_forms.add(problem.placement)
                self.closed_forms(problem)
        if not self.is_over():
            self.retime()
        if not self.is_over():
            self.tune(share)
        if not self.is_over():
            self.exchange(share)
        if self.exact and not self.is_over():
            self.polish(share)
        self.done_share += share

    def closed_forms(self, problem: Problem) -> None:
        """Every schedule of the catalog that is a program of this problem."""
        for family in schedules():
            if self.is_late(times=2):
                return
            try:
                program = build(
                    family.name,
                    ranks=problem.placement.num_ranks,
                    microbatches=problem.num_microbatches,
                    virtual=problem.virtual,
                )
            except ScheduleError:
                continue
            if _solves(program, problem):
                self.note(problem, program, f"closed form: {family.name}")

    def retime(self) -> None:
        """List scheduling in the order of the best closed forms, within the limit or not."""
        for problem in self.problems:
            closed = [each for each in self.found if each.placement == problem.placement]
            for each in sorted(closed, key=lambda found: found.value)[:3]:
                if self.is_late(times=2):
                    return
                urgency: list[list[float]] = [[] for _ in range(problem.num_kinds)]
                for kinds in order_of(problem, each.program):
                    for position, kind in enumerate(kinds):
                        urgency[kind].append(position)
                method = f"greedy: in the order of {each.program.name}"
                self.note_order(problem, place(problem, urgency).order, method)

    def tune(self, share: float) -> None:
        """Blocks, on few microbatches; then the best ones on all."""
        mine = share * self.shares[0]
        work = self.budget.actions * mine / len(self.problems)
        most_stale = _STALE_WHOLE if self.exact and self.problems[0].size <= _WHOLE else _STALE
        for number, problem in enumerate(self.problems):
            tuner, bound = Tuner(problem, seed=self.seed), self.bound(problem)
            told = 0.0
            while tuner.placed < work - 3 * problem.size or tuner.tried < 4:
                tuner.step()
                done = min(1.0, tuner.placed / work)
                if done > told + 0.05:
                    told = done
                    part = mine * (number + done) / len(self.problems)
                    self.tell(self.done_share + part, "building blocks")
                if tuner.stale > most_stale or _meets(tuner.best[0].estimate, bound):
                    break
                if self.is_late(times=4):
                    break
            for tuned in tuner.best[:2]:
                if self.is_late(times=2):
                    break
                order = run_block(problem, tuned.knobs).order
                self.note_order(problem, order, "building blocks")

    def rivals(self) -> list[tuple[Problem, Placed]]:
        """Where something better may be found yet, and the best order there to begin with."""
        best = self.best()
        assert best is not None
        found = []
        for problem in self.problems:
            start = self.best(problem.placement)
            if start is None or problem.size > _WINDOWED:
                continue
            if not _meets(best.value, self.bound(problem)):
                found.append((problem, played(problem, start.program)))
        return found

    def exchange(self, share: float) -> None:
        """Neighbours on the critical path of the best order of each placement."""
        mine, rivals = share * self.shares[1], self.rivals()
        for number, (problem, start) in enumerate(rivals):
            part = mine / len(rivals)
            self.tell(self.done_share + share * self.shares[0] + number * part, "exchanges")
            steps = min(_SWAPS, int(self.budget.actions * part / problem.size))
            swapper = Swapper(problem, start, seed=self.seed, steps=steps)
            for _ in range(steps):
                if not swapper.step() or self.is_late(times=2):
                    break
            if swapper.best.value < start.value:
                self.note_order(problem, swapper.best.order, "exchanges")

    def polish(self, share: float) -> None:
        """Exact search around the best order of each placement."""
        mine, rivals = share * self.shares[2], self.rivals()
        for number, (problem, start) in enumerate(rivals):
            if self.is_over():
                return
            part = mine / len(rivals)
            self.tell(self.done_share + share - mine + number * part, "exact")
            polish = self.polish_whole if problem.size <= _WHOLE else self.polish_windows
            polish(problem, start, part * self.budget.solver_s)

    def polish_whole(self, problem: Problem, start: Placed, effort_s: float) -> None:
        """All of a small step at once: it may be proven best."""
        answer = self.improved(problem, start, None, effort_s)
        key = problem.placement, problem.limit
        self.bounds[key] = max(self.bounds[key], answer.bound)
        if answer.order is not None:
            self.note_order(problem, answer.order, "exact")

    def polish_windows(self, problem: Problem, start: Placed, effort_s: float) -> None:
        """Windows of a larger one, from the end to the beginning, as long as that helps."""
        bound, used = self.bound(problem), 0.0
        whole = max(max(ends) for ends in start.ends)
        length = whole * _WINDOW / problem.size
        high, unchanged = whole, 0.0
        while used < effort_s and unchanged < whole:
            if _meets(start.value, bound) or self.is_late():
                return
            window = (high - length, high + 1e-9 * whole)
            answer = self.improved(problem, start, window, min(1.0, effort_s - used))
            # A window that is solved at once still takes a while to be put up.
            used += answer.used_s + 0.05
            unchanged += length / 2
            if answer.order is not None:
                self.note_order(problem, answer.order, "exact windows")
                better = played(problem, self.found[-1].program)
                if better.value < start.value * (1 - 1e-9):
                    unchanged = 0.0
                start = better
            high = high - length / 2 if high > length else whole

    def improved(
        self,
        problem: Problem,
        start: Placed,
        window: tuple[float, float] | None,
        effort_s: float,
    ) -> Exact:
        """One exact search, within the clock."""
        answer = improve(
            problem,
            start,
            window=window,
            effort_s=effort_s,
            clock_s=max(0.1, self.budget.left_s - self.closing_s),
            seed=self.seed,
            at_least=self.bound(problem),
        )
        self.budget.cut_short |= answer.cut_short
        return answer

    # --- time against memory ----------------------------------------------------------------

    def trade(self, *, steps: int) -> None:
        """Search again under lower limits, from the least that can be met on."""
        best, given = self.best(), self.problems
        assert best is not None
        least = min(max(problem.least_memory) for problem in given)
        ratio = max(1.0, best.peak / least)
        limits = sorted({_whole(least * ratio ** (n / steps), given) for n in range(steps)})
        for limit in limits:
            if least <= limit < best.peak and not self.is_late():
                self.problems = [
                    problem.limited(limit)
                    for problem in given
                    if max(problem.least_memory) <= limit + slack(limit)
                ]
                self.go(share=(1 - _FIRST) / len(limits))
        self.problems = given

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
            if better and each.peak <= self.limit + slack(self.limit):
                points.append(
                    Point(
                        program=check(each.program),
                        value=each.value,
                        peak=each.peak,
                        method=each.method,
                    )
                )
        return tuple(points)


def _meets(value: float, bound: float) -> bool:
    return value <= bound * (1 + 1e-9)


def _solves(program: Program, problem: Problem) -> bool:
    """Whether a program of the catalog is one of those that are searched among."""
    return (
        program.placement == problem.placement
        and program.num_microbatches == problem.num_microbatches
        and all(act.op in COMPUTE for act in program.actions())
        and any(act.op is Op.FORWARD for act in program.actions())
        and any(act.op in (Op.FULL_BACKWARD, Op.INPUT_GRAD) for act in program.actions())
    )


def _whole(limit: float, problems: Sequence[Problem]) -> float:
    """A limit in whole activations, where these are counted."""
    counted = all(size.is_integer() for problem in problems for size in problem.held)
    return float(math.floor(limit)) if counted else limit
