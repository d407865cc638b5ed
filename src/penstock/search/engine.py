"""Searches for the best program, from what costs next to nothing to what is exact.

    closed forms     every schedule of the catalog on these placements and within the limit
    retimed          their orders as urgencies, so that uneven costs take no more gaps than needed
    blocks           list scheduling by building blocks, their knobs tuned on few microbatches and
                     the best stretched to all
    exchanges        neighbours on the critical path of several orders, where the step is not large
    exact            CP-SAT, warm-started from the best: the whole step where it is small, else
                     windows of it, the cool-down first
    overlap          where costs tell of it: forwards and backwards side by side as blocks
    relief           where asked for: what holds too much, with stages recomputed or offloaded

Each method starts from what those before it found, and nothing worse ever takes its place. This
module knows what follows what; how each method works is the affair of its own module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from penstock.errors import ScheduleError
from penstock.schedule.placement import Placement
from penstock.search.asked import can_offload, problems_of
from penstock.search.budget import Budget
from penstock.search.known import Known
from penstock.search.methods import Effort, closed_forms, exchange, first, polish, retime, tune
from penstock.search.overlaps import overlap
from penstock.search.problem import Objective, SearchProblem
from penstock.search.relief import Relief, least_relieved, reliefs, relieve
from penstock.search.result import Progress, SearchResult
from penstock.simulate.costs import Costs

__all__ = ["search"]

_UNIT = Costs()
# Of the work, the part of the first search where time is traded against memory; how many others.
_FIRST, _LIMITS = 0.3, 8
# Of the work, the part without a limit where programs may be relieved of what they hold.
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
    """The best program of one copy of the model that can be found for these costs in this time.

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
        seed: of random choices. The same seed finds the same program as long as work ends the
            search, not the clock, as it does on slow or busy machines: the result says which
            (``SearchResult.reproducible``).
        exact: whether to polish small steps with OR-Tools CP-SAT (``penstock[search]``).
        recompute: whether stages may run their forward again instead of holding what it keeps
            (``costs.recompute``, ``costs.recompute_bytes``).
        offload: whether they may copy it to the host and back; ``costs`` say what that costs.
        pareto: whether to look for programs that take more time in less memory, too.
        progress: called now and then with how far the search is.

    Returns:
        The best program, its figures, and a bound that no program of one copy of the model can
        beat; schedules with two, such as DualPipe, may be faster.

    Raises:
        ScheduleError: a memory limit that no program can meet (the message says the least that
            one can, and whether recomputation or offload would help); offload at no known cost;
            numbers, costs or placements that don't go together; OR-Tools is asked for
            and missing.

    Example:
        >>> found = search(ranks=4, microbatches=8, memory_limit=4, exact=False)
        >>> found.value, found.peak
        (27.0, 4.0)

    Source: arXiv:2401.10241, sec. 3.1 (search under a memory limit); arXiv:2405.15362 (blocks).
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
    allowed = reliefs(recompute=recompute, offload=offload)
    budget = Budget(time_limit_s)
    problems = problems_of(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        virtual=virtual,
        memory_limit=memory_limit,
        objective=objective,
        placements=placements,
        allowed=allowed,
    )
    known = Known(problems, budget=budget, progress=progress, relieved=bool(allowed))
    effort = Effort(share=1.0, seed=seed, exact=exact, size=problems[0].size)
    if allowed:
        # Without a limit first: what is fast may be relieved of what it holds too much.
        known.problems = [problem.limited(math.inf) for problem in problems]
        _go(known, replace(effort, share=_LOOSE))
        known.problems = list(problems)
        _relieve(known, allowed, pareto=pareto)
        effort = replace(effort, share=1 - _LOOSE)
    known.problems = [problem for problem in problems if problem.can_be_met]
    if known.problems:
        _plain(known, effort, pareto=pareto)
    known.problems = list(problems)
    if allowed:
        _relieve(known, allowed, pareto=pareto)
    return known.result(with_pareto=pareto)


def _plain(known: Known, effort: Effort, *, pareto: bool) -> None:
    """Programs that keep what forwards leave."""
    if pareto:
        _go(known, replace(effort, share=effort.share * _FIRST))
        _trade(known, replace(effort, share=effort.share * (1 - _FIRST)))
    else:
        _go(known, effort)


def _relieve(known: Known, allowed: Sequence[Relief], *, pareto: bool) -> None:
    """Relieve what was found until it is within the limit; and for a front, within lower ones."""
    given = known.problems
    starts = tuple(found for found in known.found if not found.is_relieved)
    known.tell(known.done_share, "relief")
    relieve(known, starts, allowed)
    if pareto:
        least = min(least_relieved(given, relief) for relief in allowed)
        # None is within the limit yet where it takes no relief, but a search under it.
        most = max((found.peak for found in known.front()), default=0.0)
        for limit in _lower_limits(given, least, most):
            known.tell(known.done_share, "relief")
            known.problems = [problem.limited(limit) for problem in given]
            relieve(known, starts, allowed)
        known.problems = given


def _go(known: Known, effort: Effort) -> None:
    """All methods, as long as there is something to gain."""
    effort = effort.timed(known.budget, known.done_share)
    known.tell(known.done_share, "closed forms")
    first(known)
    if not known.done_share:
        closed_forms(known)
    if not known.is_over():
        retime(known)
    if not known.is_over():
        tune(known, effort)
    if not known.is_over():
        exchange(known, effort)
    if effort.exact and not known.is_over():
        polish(known, effort)
    if not known.is_over():
        overlap(known)
    known.done_share += effort.share


def _trade(known: Known, effort: Effort) -> None:
    """Search again under lower limits, from the least that can be met on."""
    given = known.problems
    least = min(max(problem.least_memory) for problem in given)
    # The clock may leave none but those that were relieved.
    most = next((found.peak for found in known.plain()), 0.0)
    limits = _lower_limits(given, least, most)
    for limit in limits:
        lower = [problem.limited(limit) for problem in given]
        known.problems = [problem for problem in lower if problem.can_be_met]
        if known.problems and not known.is_late():
            _go(known, replace(effort, share=effort.share / len(limits)))
    known.problems = given


def _lower_limits(given: Sequence[SearchProblem], least: float, most: float) -> list[float]:
    """Limits from the least that can be met on, up to what is held where none is lower."""
    if least <= 0:
        return []
    ratio = max(1.0, most / least)
    limits = {_rounded(least * ratio ** (n / _LIMITS), given) for n in range(_LIMITS)}
    return [limit for limit in sorted(limits) if least <= limit < most]


def _rounded(limit: float, problems: Sequence[SearchProblem]) -> float:
    """A limit in whole activations, where these are counted."""
    counted = all(size.is_integer() for problem in problems for size in problem.held)
    return float(math.floor(limit)) if counted else limit
