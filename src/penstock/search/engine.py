"""``search``: the best program for given costs, by methods from cheap to exact.

    closed forms       every registered schedule on these placements and within the limit
    list scheduling    in the orders of the closed forms, to close gaps that uneven costs leave
    periodic patterns  tuned on few microbatches, the best stretched to all
    local search       neighbours on the critical path of several orders, if the step is not large
    exact              CP-SAT, started from the best, if the step is small
    overlap            forwards and backwards as overlapped pairs, if the costs give the time
    memory reduction   if allowed: ranks that hold too much recompute or offload stages

This module holds the order of the methods, and how they share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from penstock.errors import ScheduleError
from penstock.schedule.placement import Placement
from penstock.search.memory_reduction import (
    can_offload,
    least_reduced,
    reduce_memory,
    refuse_infeasible,
)
from penstock.search.methods import (
    Effort,
    closed_forms,
    first,
    overlap,
    polish,
    retime,
    search_locally,
    tune_patterns,
)
from penstock.search.problem import Objective, SearchProblem, problems_of
from penstock.search.result import Progress, SearchResult
from penstock.search.state import Budget, SearchState
from penstock.simulate.costs import Costs

__all__ = ["search"]

_UNIT = Costs()
# The share of the first search if time is traded against memory; how many others follow.
_FIRST, _LIMITS = 0.3, 8
# The share of the search without a limit if programs may be reduced.
_LOOSE = 0.4


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
    pareto: bool = False,
    progress: Callable[[Progress], None] | None = None,
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
        pareto: if True, also searches for programs that trade time for memory.
        progress: a callback that receives the progress now and then.

    Returns:
        The best program, its figures, and a lower bound for programs of one copy of the model;
        schedules with two copies, such as DualPipe, may be faster.

    Raises:
        ScheduleError: no program fits the memory limit (the message gives the smallest feasible
            limit, and says if recomputation or offload would help); offload has no cost; numbers,
            costs or placements contradict each other; or OR-Tools is required but not installed.

    Example:
        >>> found = search(ranks=4, microbatches=8, memory_limit=4, exact=False)
        >>> found.value, found.peak
        (27.0, 4.0)

    Source: arXiv:2401.10241, sec. 3.1 (search under a memory limit); arXiv:2405.15362 (patterns).
    """
    if not isinstance(costs, Costs):
        raise ScheduleError(f"search: costs={costs!r} are no penstock.Costs; leave them out for 1")
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
    if offload and not can_offload(costs):
        raise ScheduleError(
            "search: offload=True, but costs say nothing of it; pass Costs(offload=..., "
            "reload=...), or activation_bytes and offload_bandwidth",
            parameter="offload",
        )
    ways = {"recompute": recompute, "offload": offload}
    allowed = [way for way, is_allowed in ways.items() if is_allowed]
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
        problems if allowed else feasible, budget=budget, progress=progress, reduced=bool(allowed)
    )
    effort = Effort(share=1.0, seed=seed, exact=exact, size=problems[0].size)
    if allowed:
        # Searches without a limit first: a fast program may become feasible by memory reduction.
        state.problems = [problem.limited(math.inf) for problem in problems]
        _run_methods(state, replace(effort, share=_LOOSE))
        state.problems = problems
        _reduce(state, allowed, pareto=pareto)
        effort = replace(effort, share=1 - _LOOSE)
    state.problems = feasible
    if feasible and pareto:
        _run_methods(state, replace(effort, share=effort.share * _FIRST))
        _trade(state, replace(effort, share=effort.share * (1 - _FIRST)))
    elif feasible:
        _run_methods(state, effort)
    if allowed:
        state.problems = problems
        _reduce(state, allowed, pareto=pareto)
    return state.result(with_pareto=pareto)


def _run_methods(state: SearchState, effort: Effort) -> None:
    """Run all methods in turn, until the best program is proven or time is up."""
    effort = effort.timed(state.budget, state.done_share)
    state.tell(state.done_share, "closed forms")
    first(state)
    if not state.done_share:
        closed_forms(state)
    if not state.is_over():
        retime(state)
    for method in (tune_patterns, search_locally, polish):
        if not state.is_over():
            method(state, effort)
    if not state.is_over():
        overlap(state)
    state.done_share += effort.share


def _reduce(state: SearchState, allowed: Sequence[str], *, pareto: bool) -> None:
    """Reduce the memory of programs to the limit, and for a Pareto front also to lower limits."""
    given = state.problems
    starts = [found for found in state.found if not found.is_reduced]
    state.tell(state.done_share, "memory reduction")
    reduce_memory(state, starts, allowed)
    if pareto:
        least = min(least_reduced(given, way) for way in allowed)
        # The reduced methods found no program, but a search under the limit may find one.
        most = max((found.peak for found in state.front()), default=0.0)
        for limit in _lower_limits(given, least, most):
            state.tell(state.done_share, "memory reduction")
            state.problems = [problem.limited(limit) for problem in given]
            reduce_memory(state, starts, allowed)
        state.problems = given


def _trade(state: SearchState, effort: Effort) -> None:
    """Search again under lower limits, from the smallest feasible one up."""
    given = state.problems
    least = min(problem.least_memory for problem in given)
    # If time ran out, the reduced programs may be the only ones.
    most = next((found.peak for found in state.plain()), 0.0)
    limits = _lower_limits(given, least, most)
    for limit in limits:
        lower = [problem.limited(limit) for problem in given]
        state.problems = [problem for problem in lower if problem.is_feasible]
        if state.problems and not state.is_late():
            _run_methods(state, replace(effort, share=effort.share / len(limits)))
    state.problems = given


def _lower_limits(given: Sequence[SearchProblem], least: float, most: float) -> list[float]:
    """A geometric grid of memory limits between the smallest feasible one and the current peak;
    whole numbers if activations are counted."""
    if least <= 0:
        return []
    ratio = max(1.0, most / least)
    limits = {least * ratio ** (n / _LIMITS) for n in range(_LIMITS)}
    if all(size.is_integer() for problem in given for size in problem.memory.activation):
        limits = {float(math.floor(limit)) for limit in limits}
    return [limit for limit in sorted(limits) if least <= limit < most]
