"""``search``: the best program for given costs, by methods from cheap to exact.

    closed forms       every registered schedule; in large steps the best, list-scheduled, too
    periodic patterns  tuned on few microbatches, the best stretched to all
    local search       neighbours on the critical path of several orders, if the step is not large
    exact              CP-SAT, started from the best, if the step is small
    window search      CP-SAT on one stretch of time after another, in the smallest steps
    memory reduction   if allowed: ranks that hold too much recompute or offload stages

Each method starts from the programs found before; a worse program never replaces a better one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.registry import build, schedules
from penstock.schedule.rules import COMPUTE, INPUT_GRADS
from penstock.schedule.workload import schedule_by_priority
from penstock.search.exact import improve, improve_windows
from penstock.search.local_search import anneal
from penstock.search.memory_reduction import reduce_memory, refuse_infeasible
from penstock.search.patterns import PatternParams, PatternSearch, run_pattern
from penstock.search.problem import Objective, Order, SearchProblem, problems_of
from penstock.search.state import Budget, SearchResult, SearchState, meets
from penstock.simulate.costs import Costs, build_for, refuse_no_costs

__all__ = ["search"]

Improved: TypeAlias = tuple[float, Order]
"""An objective, and its order."""

_UNIT = Costs()
# The share of the search without a limit if programs may be reduced.
_LOOSE = 0.4
# The largest steps for exact search, and those that it can often prove, in actions.
_EXACT, _PROVEN = 400, 200
# The largest steps, in actions, for local search, and for trying all schedules even if late.
_EXCHANGED, _SMALL = 12_000, 10_000
# The most stages per rank for closed forms: some take minutes to build for hundreds.
_CLOSED = 128
# A placement whose best program is worse than the best by more than this factor is dropped.
_NEAR_BEST = 1.05
# The number of patterns without improvement after which tuning stops.
_STALE = 500
# The number of patterns run with all microbatches, in a small and in a large step.
_RUN_SMALL, _RUN = 6, 2
# The part of the work of each round of improvement; one order in so many goes on to the next.
_ROUNDS, _GO_ON = (0.3, 0.3, 0.4), 3
# How many orders of a method enter local search, and how much worse than the best they may be.
_OF_A_METHOD, _START_NEAR_BEST = 3, 1.1
# The share of the time after which the clock of local search counts, and how far ahead of the share
# of the work it then is.
_RATED, _AHEAD = 0.1, 1.2


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
    recompute: bool = False,
    offload: bool = False,
) -> SearchResult:
    """Search for the best program of one copy of the model within the time limit.

    Args:
        costs: the cost of each kind of action, and the size of activations.
        ranks: number of ranks.
        microbatches: microbatches per step.
        virtual: stages per rank; if None, follows from costs per stage, else 1.
        memory_limit: the most activations that a rank may hold at once, in bytes if
            ``costs.activation_bytes`` is given; None for no limit.
        objective: ``"makespan"``, the time from the first start to the last end over all ranks, for
            steps with a barrier before the optimizer; or ``"span"``, the longest such time of a
            single rank, for steps without a barrier.
        placements: the placements to search; None for loops, and waves if ``virtual`` is even.
        time_limit_s: the time limit of the search, in seconds.
        seed: the random seed. The same seed finds the same program unless the time limit cuts the
            search short, as on slow or busy machines (see ``SearchResult.reproducible``).
        exact: if True, improves small steps with OR-Tools CP-SAT (``penstock[search]``).
        recompute: if True, stages may recompute their activations (``costs.recompute``,
            ``costs.recompute_bytes``).
        offload: if True, stages may offload their activations, at the times given in ``costs``.

    Returns:
        The best program, its figures, and a lower bound for programs of one copy of the model on
        these placements; schedules with two copies, such as DualPipe, may be faster. Messages that
        wait for each other (``costs.one_message_at_a_time``) count in all values, but only closed
        forms and comparisons take them into account: the methods treat messages as delays.

    Raises:
        ScheduleError: no program fits the memory limit (the message gives the smallest feasible
            limit); offload has no cost; numbers, costs or placements contradict each other; or
            OR-Tools is required but not installed.

    Examples:
        >>> found = search(ranks=4, microbatches=8, memory_limit=4, exact=False)
        >>> found.value, found.peak
        (27.0, 4.0)

    Source: arXiv:2401.10241, sec. 3.1 (search under a memory limit); arXiv:2405.15362 (patterns).
    """
    refuse_no_costs(costs, "search()")
    if not (isinstance(time_limit_s, (int, float)) and 0 < time_limit_s < math.inf):
        raise ScheduleError(
            f"search: time_limit_s={time_limit_s!r} must be a finite number above 0",
            parameter="time_limit_s",
        )
    if exact and find_spec("ortools") is None:
        raise ScheduleError(
            "search: exact search needs OR-Tools; pip install 'penstock[search]', or pass "
            "exact=False to search without"
        )
    if offload and costs.offload is None and costs.reload is None:
        raise ScheduleError(
            "search: offload=True, but costs say nothing of it; pass Costs(offload=..., "
            "reload=...)",
            parameter="offload",
        )
    allowed = [way for way, may in (("recompute", recompute), ("offload", offload)) if may]
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
    refuse_infeasible(problems, allowed)
    feasible = [problem for problem in problems if problem.is_feasible]
    state = SearchState(
        problems if allowed else feasible, budget=budget, seed=seed, reduces=bool(allowed)
    )
    if allowed:
        # Searches without a limit first: a fast program may become feasible by memory reduction.
        loose = [replace(problem, limit=math.inf) for problem in problems]
        _run_methods(state, loose, budget.part(_LOOSE), exact=exact)
        reduce_memory(state, problems, allowed)
        budget = budget.part(1 - _LOOSE, of=1 - _LOOSE)
    if feasible:
        _run_methods(state, feasible, budget, exact=exact, closed_forms=not allowed)
    if allowed:
        reduce_memory(state, problems, allowed)
    return state.result()


def _run_methods(
    state: SearchState,
    problems: list[SearchProblem],
    budget: Budget,
    *,
    exact: bool,
    closed_forms: bool = True,
) -> None:
    """Run all methods in turn, until the best program is proven or time is up."""
    state.problems = problems
    for problem in problems:
        # One program per placement; after the first, only as time allows.
        if state.is_late(times=2):
            break
        state.note_order(problem, run_pattern(problem, PatternParams()).order, "periodic patterns")
    if closed_forms:
        _closed_forms(state)
    size = problems[0].size
    if size > _EXCHANGED and not state.is_late(times=4):
        # Too large for local search: list-schedule the best order so far, by its times.
        best = state.ranked()[0].program
        problem = next(each for each in problems if each.placement == best.placement)
        if played := problem.replay(problem.order(best)):
            order = schedule_by_priority(problem, played.ends).order
            state.note_order(problem, order, "list scheduling")
    # The parts of the work.
    parts = [0.35, 0.65] if size <= _EXCHANGED else [1.0]
    if exact and size <= _EXACT:
        parts = [0.1, 0.05, 0.4, 0.35, 0.1] if size <= _PROVEN else [0.2, 0.5, 0.3]
    methods = _tune_patterns, _search_locally, _search_exactly, _search_windows, _search_locally
    left = 1.0
    for method, share in zip(methods, parts, strict=False):
        if not state.is_over():
            method(state, budget.part(share, of=left))
        left -= share


def _closed_forms(state: SearchState) -> None:
    """Add every registered schedule that solves one of the problems."""
    some = state.problems[0]
    placements = [problem.placement for problem in state.problems]
    virtuals = sorted({placement.num_stages // placement.num_ranks for placement in placements})
    # Schedules that are built for given costs come last: they take longer. In a large step they are
    # built for none.
    families = sorted(schedules(), key=lambda family: bool(family.costs))
    build_one = partial(build_for, some.costs) if some.size <= _EXCHANGED else build
    for family, virtual in product(families, virtuals):
        # In a small step all schedules are tried, so that no result is worse than any of them.
        if some.size > _SMALL and state.is_late(times=2):
            return
        if family.num_directions > 1 or virtual > _CLOSED:
            continue
        try:
            program = build_one(
                family.name,
                ranks=some.placement.num_ranks,
                microbatches=some.num_microbatches,
                virtual=virtual,
            )
        except ScheduleError:
            continue
        ops = {act.op for act in program.actions()}
        same = program.num_microbatches == some.num_microbatches
        is_plain = ops <= COMPUTE - {Op.RECOMPUTE} and ops & INPUT_GRADS
        if same and is_plain and program.placement in placements:
            problem = state.problems[placements.index(program.placement)]
            state.note(problem, program, f"closed form: {family.name}")


def _tune_patterns(state: SearchState, budget: Budget) -> None:
    """Tune patterns on few microbatches, and run the best with all.

    Half of the work is spread over all placements, the other half goes to those near the best.
    """
    searches = [PatternSearch(problem, seed=state.seed) for problem in state.problems]
    is_large = state.problems[0].size > _EXCHANGED
    for half in (0.0, 0.5):
        least = min((each.best[0][0] for each in searches if each.best), default=math.inf)
        chosen = [s for s in searches if not s.best or s.best[0][0] <= _NEAR_BEST * least]
        for number, tuned in enumerate(chosen):
            share = 0.5 / len(chosen)
            before = half + number * share
            part, bound = budget.part(share, of=1 - before), state.bound(tuned.whole)
            until = tuned.placed + part.actions - is_large * _RUN * tuned.whole.size
            while tuned.placed < until and tuned.stale < _STALE:
                # In a large step, with all microbatches a pattern takes as long as two checks.
                if state.is_late(part, times=2 + is_large * 2 * _RUN * len(searches)):
                    break
                tuned.step()
                if meets(tuned.best[0][0], bound):
                    break
    for tuned in searches:
        for _, params in tuned.best[: _RUN if is_large else _RUN_SMALL]:
            if state.is_late(times=2):
                return
            order = run_pattern(tuned.whole, params).order
            state.note_order(tuned.whole, order, "periodic patterns")


def _search_locally(state: SearchState, budget: Budget) -> None:
    """Improve orders by exchanges of neighbours."""

    def improve(problem: SearchProblem, order: Order, part: Budget, seed: int) -> Improved:
        share_used = _share_used(state, part)
        return anneal(problem, order, seed=seed, work=part.actions, share_used=share_used)

    _improve_in_rounds(state, budget, improve, "local search", of_a_method=_OF_A_METHOD)


def _search_windows(state: SearchState, budget: Budget) -> None:
    """Improve orders window by window."""

    def improve(problem: SearchProblem, order: Order, part: Budget, seed: int) -> Improved:
        bound, played = state.bound(problem), problem.replay(order)
        assert played is not None, "a feasible order can be played"
        return improve_windows(
            problem, played, effort_s=part.solver_s, seed=seed,
            is_over=lambda value: meets(value, bound) or state.is_late(part),
        )  # fmt: skip

    _improve_in_rounds(state, budget, improve, "window search", of_a_method=1)


def _improve_in_rounds(
    state: SearchState,
    budget: Budget,
    improve: Callable[[SearchProblem, Order, Budget, int], Improved],
    method: str,
    *,
    of_a_method: int,
) -> None:
    """Improve the best orders of all methods and placements; promising ones get more work.

    The best initial order does not always lead to the best result.
    """
    entrants, before = _entrants(state, of_a_method), 0.0
    for number, share in enumerate(_ROUNDS):
        ended: list[tuple[float, SearchProblem, Order]] = []
        for problem, order in entrants:
            if state.is_over():
                break
            each = share / len(entrants)
            part = budget.part(each, of=max(each, 1 - before))
            before += each
            value, better = improve(problem, order, part, state.seed + number)
            ended.append((value, problem, better))
        if ended:
            ended.sort(key=lambda entrant: entrant[0])
            state.note_order(*ended[0][1:], method)
        entrants = [each[1:] for each in ended[: -(-len(ended) // _GO_ON)]]


def _share_used(state: SearchState, part: Budget) -> Callable[[float], float]:
    """A clock for ``anneal``: the share of a part's time that is used, if the machine is too slow
    for the work, else 0."""
    limit_s = max(part.left_s, 1e-9)

    def share_used(done: float) -> float:
        used = 1.0 if state.is_late(times=2) else 1 - part.left_s / limit_s
        if used < max(_RATED, _AHEAD * done):
            return 0.0
        state.cut_short = True
        return used

    return share_used


def _entrants(state: SearchState, of_a_method: int) -> list[tuple[SearchProblem, Order]]:
    """The best feasible orders by method, on placements that may hold a better one.

    Orders found by one method are similar. A registered schedule may start out worse, yet lead to a
    better result.
    """
    entrants: dict[Order, SearchProblem] = {}
    entered: Counter[str] = Counter()
    rivals = {each.placement: each for each in state.problems if state.may_improve(each)}
    ranked = state.ranked()
    for found in ranked:
        problem, method = rivals.get(found.program.placement), found.method.partition(":")[0]
        near = found.value <= ranked[0].value * _START_NEAR_BEST
        if problem is not None and near and entered[method] < of_a_method:
            order = problem.order(found.program)
            entered[method] += order not in entrants
            entrants.setdefault(order, problem)
    return [(problem, order) for order, problem in entrants.items()]


def _search_exactly(state: SearchState, budget: Budget) -> None:
    """Run exact search from the best order of each placement that may hold a better one."""
    best = state.best()
    assert best is not None
    rivals = [
        problem
        for problem in state.problems
        if state.may_improve(problem)
        and (plain := state.ranked(problem.placement))
        and plain[0].value <= _NEAR_BEST * best.value
    ]
    for number, problem in enumerate(rivals):
        if state.is_over():
            return
        part = budget.part(1 / len(rivals), of=1 - number / len(rivals))
        start = problem.replay(problem.order(state.ranked(problem.placement)[0].program))
        assert start is not None, "a program that ends with full backwards ends with split ones"
        answer = improve(
            problem,
            start,
            effort_s=part.solver_s,
            clock_s=max(0.1, part.left_s - state.closing_s),
            seed=state.seed,
            at_least=state.bound(problem),
        )
        state.cut_short |= answer.cut_short
        state.raise_bound(problem, answer.bound)
        if answer.order is not None:
            state.note_order(problem, answer.order, "exact")
