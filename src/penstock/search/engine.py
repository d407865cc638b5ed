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
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from penstock.errors import ScheduleError
from penstock.schedule.placement import Placement
from penstock.search.asked import problems_of
from penstock.search.budget import Budget
from penstock.search.known import Known
from penstock.search.methods import Effort, closed_forms, exchange, first, polish, retime, tune
from penstock.search.problem import Objective, Problem, slack
from penstock.search.result import Progress, SearchResult
from penstock.simulate.costs import Costs

__all__ = ["search"]

_UNIT = Costs()
# Of the work, the part of the first search where time is traded against memory; how many others.
_FIRST, _LIMITS = 0.3, 8


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
    known = Known(problems, budget=budget, progress=progress)
    effort = Effort(share=1.0, seed=seed, exact=exact, size=problems[0].size)
    if pareto:
        _go(known, replace(effort, share=_FIRST))
        _trade(known, replace(effort, share=1 - _FIRST))
    else:
        _go(known, effort)
    return known.result(with_pareto=pareto)


def _go(known: Known, effort: Effort) -> None:
    """All methods, as long as there is something to gain."""
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
    known.done_share += effort.share


def _trade(known: Known, effort: Effort) -> None:
    """Search again under lower limits, from the least that can be met on."""
    best, given = known.best(), known.problems
    assert best is not None
    least = min(max(problem.least_memory) for problem in given)
    ratio = max(1.0, best.peak / least)
    limits = sorted({_rounded(least * ratio ** (n / _LIMITS), given) for n in range(_LIMITS)})
    for limit in limits:
        if least <= limit < best.peak and not known.is_late():
            known.problems = [
                problem.limited(limit)
                for problem in given
                if max(problem.least_memory) <= limit + slack(limit)
            ]
            _go(known, replace(effort, share=effort.share / len(limits)))
    known.problems = given


def _rounded(limit: float, problems: Sequence[Problem]) -> float:
    """A limit in whole activations, where these are counted."""
    counted = all(size.is_integer() for problem in problems for size in problem.held)
    return float(math.floor(limit)) if counted else limit
