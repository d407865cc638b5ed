"""What was asked of a search, as problems, one per placement; or what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

from penstock.errors import ScheduleError
from penstock.schedule.placement import Placement, looped, wave
from penstock.search.problem import Objective, Problem, slack
from penstock.simulate.costs import Costs

__all__ = ["problems_of"]


def problems_of(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    virtual: int | None,
    memory_limit: float | None,
    objective: Objective,
    placements: Sequence[Placement] | None,
) -> tuple[Problem, ...]:
    """A problem for each placement on which the limit can be met; arguments as for ``search``.

    Raises:
        ScheduleError: what is asked for makes no sense, or can't be.
    """
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if number is None and what == "virtual":
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"search: {what}={number!r} must be a whole number from 1 on")
    if objective not in get_args(Objective):
        raise ScheduleError(
            f"search: objective={objective!r}; choose 'makespan' (a barrier before the optimizer) "
            "or 'span' (none)"
        )
    placements = _usual(costs, ranks, virtual) if placements is None else tuple(placements)
    _refuse_misfits(placements, ranks, virtual)
    limit = math.inf if memory_limit is None else _limit(memory_limit)
    problems = [_problem(costs, each, microbatches, limit, objective) for each in placements]
    least = min(max(problem.least_memory) for problem in problems)
    if least > limit + slack(limit):
        raise ScheduleError(
            f"search: no program meets memory_limit={memory_limit:g}: on some rank one microbatch "
            f"alone holds {least:g}; give at least that, or fewer stages per rank"
        )
    return tuple(p for p in problems if max(p.least_memory) <= limit + slack(limit))


def _limit(memory_limit: float) -> float:
    try:
        limit = float(memory_limit)
    except (TypeError, ValueError):
        limit = math.nan
    if not limit >= 0:
        raise ScheduleError(f"search: memory_limit={memory_limit!r} is not a number ≥ 0")
    return limit


def _usual(costs: Costs, ranks: int, virtual: int | None) -> tuple[Placement, ...]:
    """Loops, and waves where each goes down and up again."""
    if virtual is None:
        lengths = {
            len(value)
            for field in fields(costs)
            if isinstance(value := getattr(costs, field.name), tuple)
        }
        stages = max(lengths, default=ranks)
        if stages % ranks:
            raise ScheduleError(
                f"search: costs for {stages} stages, which {ranks} ranks can't share evenly; "
                "pass placements, or costs for a multiple of the ranks"
            )
        virtual = stages // ranks
    if virtual % 2 or ranks == 1:
        return (looped(ranks, virtual),)
    return looped(ranks, virtual), wave(ranks, virtual // 2)


def _refuse_misfits(placements: Sequence[Placement], ranks: int, virtual: int | None) -> None:
    if not placements:
        raise ScheduleError("search: placements is empty; leave it out for the usual ones")
    for placement in placements:
        if placement.num_ranks != ranks:
            raise ScheduleError(
                f"search: a placement on {placement.num_ranks} ranks, but ranks={ranks}"
            )
        if placement.copies != 1:
            raise ScheduleError("search: placements with two copies of the model are not searched")
        if virtual is not None and placement.num_stages != ranks * virtual:
            raise ScheduleError(
                f"search: a placement of {placement.num_stages} stages, but {ranks} ranks with "
                f"virtual={virtual} hold {ranks * virtual}"
            )


def _problem(
    costs: Costs, placement: Placement, microbatches: int, limit: float, objective: Objective
) -> Problem:
    before, behind = costs.held(num_stages=placement.num_stages)
    # Room for what W needs is kept from the start, should that be more than what I leaves.
    held = tuple(map(max, before, behind))
    return Problem(
        placement=placement,
        num_microbatches=microbatches,
        costs=costs,
        held=held,
        held_for_weights=behind,
        limit=limit,
        objective=objective,
    )
