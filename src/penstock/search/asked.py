"""What was asked of a search, as problems, one per placement; or what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import get_args

from penstock.errors import ScheduleError
from penstock.schedule.family import refuse_sizes
from penstock.schedule.messages import number_of
from penstock.schedule.placement import Placement, looped, wave
from penstock.search.problem import Objective, SearchProblem, slack
from penstock.search.relief import Relief, least_relieved, reliefs
from penstock.simulate.costs import Costs, as_number

__all__ = ["can_offload", "problems_of"]

# More than anything holds, costs being at most what they may be.
_NO_LIMIT = 1e120


def problems_of(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    virtual: int | None,
    memory_limit: float | None,
    objective: Objective,
    placements: Sequence[Placement] | None,
    allowed: Sequence[Relief],
) -> tuple[SearchProblem, ...]:
    """A problem for each placement on which the limit can be met; arguments as for ``search``.

    Where programs may be relieved of activations these are all placements: what the least is that
    they hold is known when they are found.

    Raises:
        ScheduleError: what is asked for makes no sense, or can't be.
    """
    stages = {} if virtual is None else {"virtual": virtual}
    refuse_sizes("search", ranks=ranks, microbatches=microbatches, **stages)
    if objective not in get_args(Objective):
        raise ScheduleError(
            f"search: objective={objective!r}; choose 'makespan' (a barrier before the optimizer) "
            "or 'span' (none)"
        )
    placements = _usual(costs, ranks, virtual) if placements is None else _several(placements)
    _refuse_misfits(placements, ranks, virtual)
    limit = math.inf if memory_limit is None else _limit(memory_limit)
    problems = [_problem(costs, each, microbatches, limit, objective) for each in placements]
    least = min(max(problem.least_memory) for problem in problems)
    relieved = {relief.name: least_relieved(problems, relief) for relief in allowed}
    if min(least, *relieved.values(), least) > limit + slack(limit):
        raise ScheduleError(_too_little(problems, limit, least, relieved), parameter="memory_limit")
    return tuple(problem for problem in problems if allowed or problem.can_be_met)


def _too_little(
    problems: Sequence[SearchProblem], limit: float, least: float, relieved: Mapping[str, float]
) -> str:
    """What to say of a limit that no program meets."""
    text = (
        f"search: no program meets memory_limit={limit:g}: on some rank one microbatch alone "
        f"holds {least:g}"
    )
    for name, amount in relieved.items():
        text += f", with {name} {amount:g}"
    text += "; give at least that, or fewer stages per rank"
    for relief in reliefs(recompute=True, offload=can_offload(problems[0].costs)):
        would = least if relief.name in relieved else least_relieved(problems, relief)
        if would < min(least, *relieved.values(), least):
            text += f"; with {relief.argument}=True, {would:g} would do"
    return text


def can_offload(costs: Costs) -> bool:
    """Whether costs say what offload costs."""
    return any(each is not None for each in (costs.offload, costs.reload, costs.offload_bandwidth))


def _limit(memory_limit: float) -> float:
    limit = as_number(memory_limit)
    if not limit >= 0:
        raise ScheduleError(
            f"search: memory_limit={memory_limit!r} is not a number ≥ 0", parameter="memory_limit"
        )
    return limit if limit <= _NO_LIMIT else math.inf


def _several(placements: object) -> tuple[Placement, ...]:
    several = tuple(placements) if isinstance(placements, Iterable) else (placements,)
    if isinstance(placements, Placement) or not all(isinstance(p, Placement) for p in several):
        raise ScheduleError(
            f"search: placements={placements!r}: expected a sequence of placements, such as "
            "[linear(4), v_shape(4)] of penstock.schedule.placement"
        )
    return several


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
                f"search: a placement on {number_of(placement.num_ranks, 'rank')}, but "
                f"ranks={ranks}"
            )
        if placement.copies != 1:
            raise ScheduleError("search: placements with two copies of the model are not searched")
        if virtual is not None and placement.num_stages != ranks * virtual:
            raise ScheduleError(
                f"search: a placement of {number_of(placement.num_stages, 'stage')}, but "
                f"ranks={ranks} with virtual={virtual} hold {ranks * virtual}"
            )


def _problem(
    costs: Costs, placement: Placement, microbatches: int, limit: float, objective: Objective
) -> SearchProblem:
    before, behind = costs.held(num_stages=placement.num_stages)
    problem = SearchProblem(
        placement=placement,
        num_microbatches=microbatches,
        costs=costs,
        held=before,
        held_for_weights=behind,
        limit=limit,
        objective=objective,
    )
    # Where W holds more than F left, full backwards may be all that fits.
    return replace(problem, splits=problem.can_be_met or not any(problem.growths))
