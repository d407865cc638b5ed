"""The methods of a search, in the order of ``engine``; each starts from the programs found before.

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
from penstock.search.exact import improve
from penstock.search.local_search import exchange_in_rounds
from penstock.search.patterns import PatternParams, PatternSearch, local_stage_index, run_pattern
from penstock.search.priority_schedule import schedule_by_priority
from penstock.search.problem import SearchProblem
from penstock.search.state import Budget, SearchState, meets

__all__ = ["Effort", "closed_forms", "first", "overlap", "overlapped", "polish", "retime"]
__all__ += ["search_locally", "tune_patterns"]

# The largest steps for exact search, and those that it can often prove, in actions.
_EXACT, _PROVEN = 400, 200
# The number of patterns without improvement after which tuning stops, with and without exact
# search.
_STALE_EXACT, _STALE = 300, 2_000
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
    """The budget of one round of methods."""

    share: float  # of the total work
    seed: int
    exact: bool  # True if CP-SAT is used
    size: int  # actions of a program
    round_s: float = 0.0  # the time limit of this round on a slow machine
    after_s: float = 0.0  # the time to leave after this round

    @property
    def takes_exact(self) -> bool:
        """True if exact search takes part: if the step is small."""
        return self.exact and self.size <= _EXACT

    @property
    def parts(self) -> tuple[float, float, float]:
        """The parts of the work for patterns, local search and exact search."""
        if self.takes_exact:
            return (0.1, 0.05, 0.85) if self.size <= _PROVEN else (0.2, 0.5, 0.3)
        return (0.35, 0.65, 0.0) if self.size <= _EXCHANGED else (1.0, 0.0, 0.0)

    def timed(self, budget: Budget, done_share: float) -> Effort:
        """A copy with this round's part of the remaining time."""
        round_s = budget.left_s * self.share / max(self.share, 1 - done_share)
        return replace(self, round_s=round_s, after_s=budget.left_s - round_s)

    def keep_s(self, part: float) -> float:
        """Seconds to leave for a part of the round's work that is still to come."""
        return self.after_s + self.round_s * part


def first(state: SearchState) -> None:
    """Find a feasible program for each placement; after the first, only as time allows."""
    for problem in state.problems:
        if state.is_late(times=2):
            return
        stretch = (0.0,) * (2 * max(local_stage_index(problem)) + 2)
        tight = PatternParams(stretch=stretch, packed=True, width=1.0)
        state.note_order(problem, run_pattern(problem, tight).order, "periodic patterns")


def closed_forms(state: SearchState) -> None:
    """Add every registered schedule that solves one of the problems."""
    some = state.problems[0]
    placements = [problem.placement for problem in state.problems]
    virtuals = sorted({placement.num_stages // placement.num_ranks for placement in placements})
    # Schedules that run a search of their own for given costs come last.
    families = sorted(schedules(), key=lambda family: "forward" in family.options)
    for family, virtual in product(families, virtuals):
        # In a small step all schedules are tried, so that no result is worse than any of them.
        if some.size > _SMALL and state.is_late(times=2):
            return
        if family.num_directions > 1 or virtual > _CLOSED:
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
        ops = {act.op for act in program.actions()}
        same = program.num_microbatches == some.num_microbatches
        if same and ops <= COMPUTE and ops & INPUT_GRADS and program.placement in placements:
            problem = state.problems[placements.index(program.placement)]
            state.note(problem, program, f"closed form: {family.name}")


def retime(state: SearchState) -> None:
    """List-schedule the orders of the best closed forms, feasible or not."""
    for problem in state.problems:
        found = state.found_on(problem.placement)
        closed = [each for each in found if each.method.startswith("closed form")]
        for each in closed[:3]:
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
    part, *others = effort.parts
    share, keep_s = effort.share * part / 2, effort.keep_s(sum(others))
    searches = [PatternSearch(problem, seed=effort.seed) for problem in state.problems]
    for half in range(2):
        least = min((each.best[0].estimate for each in searches if each.best), default=math.inf)
        chosen = [s for s in searches if not s.best or s.best[0].estimate <= _NEAR_BEST * least]
        for number, search in enumerate(chosen):
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
    most_stale = _STALE_EXACT if effort.takes_exact else _STALE
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
    tuning, mine, exact = effort.parts
    if mine:
        exchange_in_rounds(
            state,
            share=effort.share * mine,
            keep_s=effort.keep_s(exact),
            done_share=state.done_share + effort.share * tuning,
            seed=effort.seed,
        )


def polish(state: SearchState, effort: Effort) -> None:
    """Run exact search from the best order of each placement that may hold a better one."""
    if not effort.takes_exact:
        return
    share, best = effort.share * effort.parts[-1], state.best()
    assert best is not None
    rivals = [
        problem
        for problem in state.problems
        if state.may_improve(problem)
        and (plain := state.plain(problem.placement))
        and plain[0].value <= _NEAR_BEST * best.value
    ]
    for number, problem in enumerate(rivals):
        if state.is_over():
            return
        part = share / len(rivals)
        state.tell(state.done_share + effort.share - share + number * part, "exact")
        effort_s = part * state.budget.solver_s
        if problem.objective == "span":
            # A bound on the span needs a separate search in which ranks choose their start.
            used_s = _find_exact(state, problem, effort_s / 2, effort.seed)
            if state.is_over() or not state.may_improve(problem):
                continue
            effort_s -= used_s
        _find_exact(state, problem, effort_s, effort.seed, late_starts=problem.objective == "span")


def _find_exact(
    state: SearchState,
    problem: SearchProblem,
    effort_s: float,
    seed: int,
    *,
    late_starts: bool = False,
) -> float:
    """Run one exact search from the best order of a placement; return the effort used."""
    start = problem.replay(problem.order(state.plain(problem.placement)[0].program))
    assert start is not None, "a program that ends with full backwards ends with split ones"
    answer = improve(
        problem,
        start,
        effort_s=effort_s,
        clock_s=max(0.1, state.budget.left_s - state.closing_s),
        seed=seed,
        at_least=state.bound(problem),
        late_starts=late_starts,
    )
    state.budget.cut_short |= answer.cut_short
    state.raise_bound(problem, answer.bound)
    if answer.order is not None:
        state.note_order(problem, answer.order, "exact")
    return answer.used_s


def overlap(state: SearchState) -> None:
    """Add the best programs of each placement with overlapped pairs, if costs give their time."""
    for problem in state.problems:
        mine = [each for each in state.found_on(problem.placement) if not each.is_reduced]
        for each in mine[:_OVERLAPPED]:
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
