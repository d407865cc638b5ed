"""Problems to search on, built by hand or drawn at random; what holds for every result."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import strategies as st

from penstock import Costs, check, simulate
from penstock.schedule.placement import Placement, looped, wave
from penstock.search.problem import Objective, SearchProblem
from penstock.search.state import SearchResult

__all__ = ["LATE_COSTS", "assert_sound", "problem_of", "problems"]

# On three ranks in loops, two microbatches, four activations: the best span is 38, with ranks that
# start later than they could. Where all take microbatch 0 first there is none below 39.
LATE_COSTS = Costs(
    forward=[3, 1, 1, 3, 2, 2], input_grad=[1, 1, 4, 2, 2, 4], weight_grad=[1, 3, 4, 1, 4, 2]
)


def problem_of(
    placement: Placement,
    microbatches: int,
    *,
    limit: float = inf,
    costs: Costs | None = None,
    objective: Objective = "makespan",
) -> SearchProblem:
    """A problem that counts activations, or bytes where costs do."""
    costs = Costs() if costs is None else costs
    return SearchProblem(
        placement=placement,
        num_microbatches=microbatches,
        costs=costs,
        limit=limit,
        objective=objective,
    )


@st.composite
def problems(draw: st.DrawFn) -> SearchProblem:
    """Any placement that is searched, uneven costs, bytes, and a limit that can be met."""
    ranks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from([looped(ranks, 1), looped(ranks, 2), wave(ranks, 1)]))
    stages = placement.num_stages
    times = st.lists(st.integers(0, 4).map(lambda n: n / 2), min_size=stages, max_size=stages)
    sizes = st.lists(st.integers(1, 5).map(float), min_size=stages, max_size=stages)
    before, behind = draw(sizes), draw(sizes)
    costs = Costs(
        forward=draw(times),
        input_grad=draw(times),
        weight_grad=draw(times),
        latency=draw(st.sampled_from([0.0, 0.5, 3.0]) | times),
        activation_bytes=before,
        weight_grad_bytes=draw(st.sampled_from([list(map(min, before, behind)), behind])),
    )
    problem = problem_of(
        placement,
        draw(st.integers(1, 9)),
        costs=costs,
        objective=draw(st.sampled_from(["makespan", "span"])),
    )
    least = problem.least_memory
    return replace(
        problem, limit=draw(st.sampled_from([least, least + 2, 1.5 * least, 3 * least, inf]))
    )


def assert_sound(found: SearchResult, costs: Costs | None = None) -> None:
    """The program is right, costs what is said, and beats no bound."""
    costs = Costs() if costs is None else costs
    assert check(found.program) == found.program
    again = simulate(found.program, costs)
    assert getattr(again, found.objective) == found.value
    assert found.simulation.makespan == again.makespan
    assert found.bound <= found.value
    assert found.gap == pytest.approx(1 - found.bound / found.value)
