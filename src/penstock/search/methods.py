"""The methods of a search, each starting from what those before it found.

    first              one pattern for each placement, so that there is an answer
    closed_forms       every registered schedule on a placement of the problem
    retime             list scheduling in their order
    tune_patterns      periodic patterns, tuned on few microbatches, stretched to all
    search_locally     exchanges of neighbours on critical paths of the best orders, in rounds
    polish             CP-SAT, of the whole step or of windows of it
    overlap            neighbours as overlapped pairs, if the costs give the time of such

A worse program never replaces a better one. Shares are shares of all the work of a search.
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

# Up to how many actions exact search takes all of a step, and windows of it; actions of a window.
_WHOLE, _WINDOWED, _WINDOW = 400, 4_000, 150
# After how many patterns that are no better tuning stops, for steps that are searched whole or not.
_STALE_WHOLE, _STALE = 300, 2_000
# Up to how many actions neighbours are exchanged, and all schedules are tried, late or not.
_EXCHANGED, _SMALL = 12_000, 10_000
# Up to how many stages per rank closed forms are built: some take minutes for hundreds.
_CLOSED = 128
# How much worse than the best one a placement may be to be searched on.
_NEAR_BEST = 1.05
# How many patterns are run with all microbatches, in a small and in a large step.
_RUN_SMALL, _RUN = 6, 2
# How many programs of each placement are tried with overlapped pairs.
_OVERLAPPED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The work of a round of methods.

    Args:
        share: its share of all the work.
        seed: of random choices.
        exact: whether CP-SAT takes part.
        size: actions of a program.
        round_s: seconds that this round may take, on a machine that is slow.
        after_s: seconds to leave when it is over.
    """

    share: float
    seed: int
    exact: bool
    size: int
    round_s: float = 0.0
    after_s: float = 0.0

    @property
    def takes_whole(self) -> bool:
        """Whether exact search takes all of a step at once."""
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
        """The same, with its part of the time that is left."""
        round_s = budget.left_s * self.share / max(self.share, 1 - done_share)
        return replace(self, round_s=round_s, after_s=budget.left_s - round_s)

    def keep_s(self, share: float) -> float:
        """Seconds to leave if this share of all the work of the round is to come."""
        return self.after_s + self.round_s * share / self.share


def first(state: SearchState) -> None:
    """Notes a program within the limit for each placement, while the clock allows more than one."""
    for problem in state.problems:
        if state.is_late(times=2):
            return
        stretch = (0.0,) * (2 * max(legs(problem)) + 2)
        tight = PatternParams(stretch=stretch, packed=True, width=1.0)
        state.note_order(problem, run_pattern(problem, tight).order, "periodic patterns")


def closed_forms(state: SearchState) -> None:
    """Notes every registered schedule that is a program of one of the problems."""
    some = state.problems[0]
    virtuals = sorted({each.virtual for each in state.problems if each.virtual <= _CLOSED})
    # Schedules that are built for given costs are searched for themselves: they come last.
    families = sorted(schedules(), key=lambda family: "forward" in family.options)
    for family, virtual in product(families, virtuals):
        # Those of a small step are tried in any case: no result is worse than any of them.
        if some.size > _SMALL and state.is_late(times=2):
            return
        if family.copies > 1:
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
    """Whether a program is one of those that are searched among."""
    if program.placement != problem.placement:
        return False
    if program.num_microbatches != problem.num_microbatches:
        return False
    ops = {act.op for act in program.actions()}
    return ops <= COMPUTE and bool(ops & INPUT_GRADS)


def retime(state: SearchState) -> None:
    """List scheduling in the order of the best closed forms, within the limit or not."""
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
    """Tunes patterns on few microbatches, and runs the best with all.

    Half of the work goes to all placements alike, the other half to those that are near the best.
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
    """Tries parameters as long as there is work left, and hope."""
    problem, bound = search.whole, state.bound(search.whole)
    most_stale = _STALE_WHOLE if effort.takes_whole else _STALE
    until = search.placed + work - (_RUN if problem.size > _EXCHANGED else 0) * problem.size
    while search.placed < until or search.tried < 4:
        # The first pattern of a placement is worth more than time to spare.
        if state.is_late(times=3 if search.tried else 2) or (
            search.tried and state.budget.out_of_time(keep_s=keep_s)
        ):
            return
        search.step()
        if search.stale > most_stale or meets(search.best[0].estimate, bound):
            return


def search_locally(state: SearchState, effort: Effort) -> None:
    """Exchanges of neighbours on critical paths of the best orders, in steps that are not large."""
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
    """The order of a program, full backwards taken apart, and its simulated times.

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
    """The best program on a placement whose split order is within the limit, too."""
    for each in state.plain(problem.placement):
        if problem.keeps_limit(problem.order(each.program)):
            return each
    return None


def polish(state: SearchState, effort: Effort) -> None:
    """Exact search around the best order of each placement that may still hold a better one."""
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
    """All of a small step at once: it may be proven optimal.

    A bound on the span is that of ranks that start when they like, and takes a search of its own.
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
    """One exact search of all of a step; returns the effort that it took."""
    answer = _improved(state, problem, start, None, effort_s, seed, late_starts=late_starts)
    state.raise_bound(problem, answer.bound)
    if answer.order is not None:
        state.note_order(problem, answer.order, "exact")
    return answer.used_s


def _polish_windows(
    state: SearchState, problem: SearchProblem, start: TimedOrder, effort_s: float, seed: int
) -> None:
    """Windows of a larger step, from the end to the beginning, as long as that helps."""
    bound, used = state.bound(problem), 0.0
    whole = max(max(ends) for ends in start.ends)
    length = whole * _WINDOW / problem.size
    high, unchanged = whole, 0.0
    while used < effort_s and unchanged < whole:
        if meets(start.value, bound) or state.is_late():
            return
        window = (high - length, high + 1e-9 * whole)
        answer = _improved(state, problem, start, window, min(1.0, effort_s - used), seed)
        # A window that is solved at once still takes a while to set up.
        used += answer.used_s + 0.05
        unchanged += length / 2
        if answer.order is not None:
            found = state.note_order(problem, answer.order, "exact windows")
            # CP-SAT counts in rounded costs and sizes: by the true ones it may be no better.
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
    """One exact search, within the clock."""
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
    """Notes the best programs of each placement with overlapped pairs, if the costs give these."""
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
    """The program with each backward and the forward right after it as a pair, if that is shorter.

        rank 0  F0 F1 B0 F2 B1 F3 B2 B3       F0 F1 (F2;B0) (F3;B1) B2 B3
        rank 1  F0 B0 F1 B1 F2 B2 F3 B3       F0 (F1;B0) (F2;B1) (F3;B2) B3

    A pair holds the activations of both, and yields both results at its end only: the simulation
    tells whether it is worth it.

    Args:
        problem: the placement and the costs.
        program: compute only.

    Returns:
        The program; None without pairs to gain from.
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
    return pairs if len(pairs.blocks) > len(program.blocks) else None
