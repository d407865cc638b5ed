"""The methods of a search; each starts from the programs found by earlier ones.

    first              one pattern for each placement, so that there is an answer
    closed_forms       every registered schedule on a placement of the problem
    retime             list scheduling in their order
    tune_patterns      periodic patterns, tuned on few microbatches, stretched to all
    search_locally     exchanges of neighbours on critical paths of the best orders, in rounds
    polish             CP-SAT, of the whole step or of windows of it
    overlap            neighbours as overlapped pairs, if the costs give the time of such

A worse program never replaces a better one. Shares are fractions of a search's total work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, Overlap, Step
from penstock.schedule.check import problems
from penstock.schedule.passes import merge_backward
from penstock.schedule.program import Program
from penstock.schedule.registry import build, schedules
from penstock.schedule.rules import COMPUTE, INPUT_GRADS
from penstock.search.exact import ExactAnswer, improve
from penstock.search.list_schedule import schedule_by_priority
from penstock.search.local_search import exchange_in_rounds
from penstock.search.patterns import PatternParams, PatternSearch, legs, run_pattern
from penstock.search.problem import SearchProblem, TimedOrder
from penstock.search.state import Budget, Candidate, SearchState, meets
from penstock.simulate.simulation import simulate

__all__ = [
    "Effort",
    "closed_forms",
    "first",
    "overlap",
    "overlapped",
    "polish",
    "retime",
    "search_locally",
    "timed_order",
    "tune_patterns",
]

# The largest steps for exact search, as a whole and by windows, and the size of a window, in
# actions.
_WHOLE, _WINDOWED, _WINDOW = 400, 4_000, 150
# The number of patterns without improvement after which tuning stops, with and without exact
# search.
_STALE_WHOLE, _STALE = 300, 2_000
# The largest steps, in actions, for exchanges of neighbours, and for trying all schedules even if
# late.
_EXCHANGED, _SMALL = 12_000, 10_000
# The most stages per rank for closed forms: some take minutes to build for hundreds.
_CLOSED = 128
# A placement whose best program is worse than the best by more than this factor is dropped.
_NEAR_BEST = 1.05
# The number of patterns run with all microbatches, in a small and in a large step.
_RUN_SMALL, _RUN = 6, 2
# The number of programs per placement tried with overlapped pairs.
_OVERLAPPED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The budget of one round of methods.

    Args:
        share: the round's share of the total work.
        seed: the random seed.
        exact: True if CP-SAT is used.
        size: actions of a program.
        round_s: the time limit of this round on a slow machine, in seconds.
        after_s: seconds to leave after this round.
    """

    share: float
    seed: int
    exact: bool
    size: int
    round_s: float = 0.0
    after_s: float = 0.0

    @property
    def takes_whole(self) -> bool:
        """True if exact search covers the whole step at once."""
        return self.exact and self.size <= _WHOLE

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of patterns, local search and exact search."""
        parts = (0.35, 0.5, 0.15)
        if self.size > _EXCHANGED:
            parts = (1.0, 0.0, 0.0)
        elif not self.exact or self.size > _WINDOWED:
            parts = (0.35, 0.65, 0.0)
        elif self.takes_whole:
            parts = (0.1, 0.05, 0.85)
        tuning, exchanging, polishing = (self.share * part for part in parts)
        return tuning, exchanging, polishing

    def timed(self, budget: Budget, done_share: float) -> Effort:
        """A copy with this round's part of the remaining time."""
        round_s = budget.left_s * self.share / max(self.share, 1 - done_share)
        return replace(self, round_s=round_s, after_s=budget.left_s - round_s)

    def keep_s(self, share: float) -> float:
        """Seconds to leave for a share of the round's work that is still to come."""
        return self.after_s + self.round_s * share / self.share


def first(state: SearchState) -> None:
    """Find a feasible program for each placement; after the first, only as time allows."""
    for problem in state.problems:
        if state.is_late(times=2):
            return
        stretch = (0.0,) * (2 * max(legs(problem)) + 2)
        tight = PatternParams(stretch=stretch, packed=True, width=1.0)
        state.note_order(problem, run_pattern(problem, tight).order, "periodic patterns")


def closed_forms(state: SearchState) -> None:
    """Add every registered schedule that solves one of the problems."""
    some = state.problems[0]
    virtuals = sorted({each.virtual for each in state.problems if each.virtual <= _CLOSED})
    # Schedules that run a search of their own for given costs come last.
    families = sorted(schedules(), key=lambda family: "forward" in family.options)
    for family, virtual in product(families, virtuals):
        # In a small step all schedules are tried, so that no result is worse than any of them.
        if some.size > _SMALL and state.is_late(times=2):
            return
        if family.num_directions > 1:
            continue
        try:
            program = build(
                family.name,
                ranks=some.placement.num_ranks,
                microbatches=some.num_microbatches,
                virtual=virtual,
            )
        except ScheduleError:
            continue
        for problem in state.problems:
            if _solves(program, problem):
                state.note(problem, program, f"closed form: {family.name}")


def _solves(program: Program, problem: SearchProblem) -> bool:
    """True if a program belongs to the search space of a problem."""
    if program.placement != problem.placement:
        return False
    if program.num_microbatches != problem.num_microbatches:
        return False
    ops = {act.op for act in program.actions()}
    return ops <= COMPUTE and bool(ops & INPUT_GRADS)


def retime(state: SearchState) -> None:
    """List-schedule the orders of the best closed forms, feasible or not."""
    for problem in state.problems:
        closed = [
            each
            for each in state.found
            if each.placement == problem.placement and each.method.startswith("closed form")
        ]
        for each in sorted(closed, key=lambda found: found.value)[:3]:
            if state.is_late(times=2):
                return
            priorities: list[list[float]] = [[] for _ in range(problem.num_kinds)]
            for kinds in problem.order(each.program):
                for position, kind in enumerate(kinds):
                    priorities[kind].append(position)
            order = schedule_by_priority(problem, priorities).order
            state.note_order(problem, order, f"greedy: in the order of {each.program.name}")


def tune_patterns(state: SearchState, effort: Effort) -> None:
    """Tune patterns on few microbatches, and run the best with all.

    Half of the work is spread over all placements, the other half goes to those near the best.
    """
    mine, *others = effort.shares
    keep_s = effort.keep_s(sum(others))
    searches = [PatternSearch(problem, seed=effort.seed) for problem in state.problems]
    for half in range(2):
        least = min((each.best[0].estimate for each in searches if each.best), default=math.inf)
        chosen = [s for s in searches if not s.best or s.best[0].estimate <= _NEAR_BEST * least]
        for number, search in enumerate(chosen):
            share = mine / 2
            done = state.done_share + share * (half + number / len(chosen))
            state.tell(done, "periodic patterns")
            _tune(state, effort, search, state.budget.actions * share / len(chosen), keep_s)
    for search in searches:
        for tried in search.best[: _RUN_SMALL if effort.size <= _EXCHANGED else _RUN]:
            if state.is_late(times=2):
                return
            order = run_pattern(search.whole, tried.params).order
            state.note_order(search.whole, order, "periodic patterns")


def _tune(
    state: SearchState, effort: Effort, search: PatternSearch, work: float, keep_s: float
) -> None:
    """Try parameters until the work is used up or improvement is unlikely."""
    problem, bound = search.whole, state.bound(search.whole)
    most_stale = _STALE_WHOLE if effort.takes_whole else _STALE
    until = search.placed + work - (_RUN if problem.size > _EXCHANGED else 0) * problem.size
    while search.placed < until or search.tried < 4:
        # The first pattern of a placement is worth exceeding the time.
        if state.is_late(times=3 if search.tried else 2) or (
            search.tried and state.budget.out_of_time(keep_s=keep_s)
        ):
            return
        search.step()
        if search.stale > most_stale or meets(search.best[0].estimate, bound):
            return


def search_locally(state: SearchState, effort: Effort) -> None:
    """Exchange neighbours on critical paths of the best orders, unless the step is large."""
    tuning, mine, polishing = effort.shares
    if effort.size <= _EXCHANGED:
        exchange_in_rounds(
            state,
            share=mine,
            keep_s=effort.keep_s(polishing),
            done_share=state.done_share + tuning,
            seed=effort.seed,
        )


def timed_order(problem: SearchProblem, program: Program) -> TimedOrder:
    """The order of a program with split backwards, and its simulated times.

    Args:
        problem: a problem with the program's placement and number of microbatches.
        program: compute only.
    """
    order = problem.order(program)
    result = simulate(problem.program(order, name=program.name), problem.costs)
    ends: list[list[float]] = [[] for _ in range(problem.num_kinds)]
    runs = problem.num_kinds if problem.splits else 2 * problem.placement.num_stages
    for kinds, times in zip(order, result.ends, strict=True):
        coming, end = iter(times), 0.0
        for kind in kinds:
            end = next(coming) if kind < runs else end
            ends[kind].append(end)
    return TimedOrder(
        order=order,
        value=result.makespan if problem.objective == "makespan" else result.span,
        ends=tuple(map(tuple, ends)),
    )


def _start(state: SearchState, problem: SearchProblem) -> Candidate | None:
    """The best program on a placement whose order with split backwards is also feasible."""
    for each in state.plain(problem.placement):
        if problem.keeps_limit(problem.order(each.program)):
            return each
    return None


def polish(state: SearchState, effort: Effort) -> None:
    """Run exact search around the best order of each placement that may hold a better one."""
    *_, mine = effort.shares
    best = state.best()
    assert best is not None
    rivals: list[tuple[SearchProblem, TimedOrder]] = []
    for problem in state.problems:
        start = _start(state, problem)
        if start is None or problem.size > _WINDOWED or start.value > _NEAR_BEST * best.value:
            continue
        if not meets(best.value, state.bound(problem)):
            rivals.append((problem, timed_order(problem, start.program)))
    for number, (problem, order) in enumerate(rivals):
        if state.is_over():
            return
        part = mine / len(rivals)
        state.tell(state.done_share + effort.share - mine + number * part, "exact")
        search = _polish_whole if effort.takes_whole else _polish_windows
        search(state, problem, order, part * state.budget.solver_s, effort.seed)


def _polish_whole(
    state: SearchState, problem: SearchProblem, start: TimedOrder, effort_s: float, seed: int
) -> None:
    """Search the whole of a small step at once, which may prove it optimal.

    A bound on the span needs a separate search in which ranks choose their start.
    """
    if problem.objective == "span":
        used = _find_whole(state, problem, start, effort_s / 2, seed)
        best = _start(state, problem)
        if best is None or state.is_over() or meets(best.value, state.bound(problem)):
            return
        start, effort_s = timed_order(problem, best.program), effort_s - used
    _find_whole(state, problem, start, effort_s, seed, late_starts=problem.objective == "span")


def _find_whole(
    state: SearchState,
    problem: SearchProblem,
    start: TimedOrder,
    effort_s: float,
    seed: int,
    *,
    late_starts: bool = False,
) -> float:
    """Run one exact search of a whole step; return the effort used."""
    answer = _improved(state, problem, start, None, effort_s, seed, late_starts=late_starts)
    state.raise_bound(problem, answer.bound)
    if answer.order is not None:
        state.note_order(problem, answer.order, "exact")
    return answer.used_s


def _polish_windows(
    state: SearchState, problem: SearchProblem, start: TimedOrder, effort_s: float, seed: int
) -> None:
    """Search windows of a larger step from end to beginning, while that improves it."""
    bound, used = state.bound(problem), 0.0
    whole = max(max(ends) for ends in start.ends)
    length = whole * _WINDOW / problem.size
    high, unchanged = whole, 0.0
    while used < effort_s and unchanged < whole:
        if meets(start.value, bound) or state.is_late():
            return
        window = (high - length, high + 1e-9 * whole)
        answer = _improved(state, problem, start, window, min(1.0, effort_s - used), seed)
        # Even a trivial window takes a while to set up.
        used += answer.used_s + 0.05
        unchanged += length / 2
        if answer.order is not None:
            found = state.note_order(problem, answer.order, "exact windows")
            # CP-SAT rounds costs and sizes; under the true ones its order may be no better.
            if found is not None and found.value <= start.value and state.keeps(found):
                if found.value < start.value * (1 - 1e-9):
                    unchanged = 0.0
                start = timed_order(problem, found.program)
        high = high - length / 2 if high > length else whole


def _improved(
    state: SearchState,
    problem: SearchProblem,
    start: TimedOrder,
    window: tuple[float, float] | None,
    effort_s: float,
    seed: int,
    *,
    late_starts: bool = False,
) -> ExactAnswer:
    """Run one exact search within the time limit."""
    answer = improve(
        problem,
        start,
        window=window,
        effort_s=effort_s,
        clock_s=max(0.1, state.budget.left_s - state.closing_s),
        seed=seed,
        at_least=state.bound(problem),
        late_starts=late_starts,
    )
    state.budget.cut_short |= answer.cut_short
    return answer


def overlap(state: SearchState) -> None:
    """Add the best programs of each placement with overlapped pairs, if costs give their time."""
    for problem in state.problems:
        mine = [
            each
            for each in state.found
            if each.placement == problem.placement and not each.is_reduced
        ]
        for each in sorted(mine, key=lambda found: found.value)[:_OVERLAPPED]:
            pairs = overlapped(problem, each.program)
            if pairs is None:
                continue
            if state.is_late(times=3):
                return
            # Pairs may deadlock.
            if not problems(pairs):
                state.note(problem, pairs, f"overlap, after {each.method}")


def overlapped(problem: SearchProblem, program: Program) -> Program | None:
    """Pair each backward with the forward right after it, if that shortens the program.

        rank 0  F0 F1 B0 F2 B1 F3 B2 B3       F0 F1 (F2;B0) (F3;B1) B2 B3
        rank 1  F0 B0 F1 B1 F2 B2 F3 B3       F0 (F1;B0) (F2;B1) (F3;B2) B3

    A pair holds the activations of both, and yields both results only at its end. Simulation
    decides if the pairing pays.

    Args:
        problem: the placement and the costs.
        program: compute only.

    Returns:
        The program; None if no pair shortens it.
    """
    size = problem.placement.num_stages
    if problem.costs.overlap is None:
        return None
    lengths = problem.costs.per_stage("overlap", num_stages=size)
    durations = {op: problem.costs.of(op, num_stages=size) for op in (Op.FORWARD, *INPUT_GRADS)}

    def gains(backward: Step, forward: Step) -> bool:
        if not (isinstance(backward, Action) and isinstance(forward, Action)):
            return False
        if backward.op not in INPUT_GRADS or forward.op is not Op.FORWARD:
            return False
        apart = durations[forward.op][forward.stage] + durations[backward.op][backward.stage]
        return lengths[forward.stage] < apart

    ranks = []
    for steps in merge_backward(program).ranks:
        paired: list[Step] = []
        for step in steps:
            if paired and gains(paired[-1], step):
                paired[-1] = Overlap(parts=(*step.parts, *paired[-1].parts))
            else:
                paired.append(step)
        ranks.append(tuple(paired))
    pairs = program.with_ranks(tuple(ranks))
    return pairs if len(pairs.overlapped_pairs) > len(program.overlapped_pairs) else None
