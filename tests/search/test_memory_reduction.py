"""Recomputation and offload where memory is tight: found when allowed, named when not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Costs, Op, ScheduleError, check, search, simulate
from penstock.schedule.passes import recompute
from penstock.search.problem import SearchProblem
from penstock.search.state import SearchResult
from tests.search.problems import problems

COPIES = Costs(offload=0.5, reload=0.5)


pytestmark = pytest.mark.usefixtures("no_clock")


def find(costs: Costs | None = None, **options: Any) -> SearchResult:
    sizes = {"ranks": 4, "microbatches": 8, "time_limit_s": 0.4, "exact": False}
    return search(Costs() if costs is None else costs, **{**sizes, **options})


def ops_of(found: SearchResult) -> set[Op]:
    return {act.op for act in found.program.actions()}


@pytest.mark.parametrize(
    ("virtual", "limit", "plain", "most"),
    # Recomputed, a whole step takes 32 V and what warms up and cools down.
    [(1, 1, 72, 36), (1, 2, 41, 35), (2, 2, 101, 68), (2, 1, None, 68)],
)
def test_recomputation_where_memory_is_tight(
    virtual: int, limit: int, plain: float | None, most: float
) -> None:
    options: dict[str, Any] = {"virtual": virtual, "memory_limit": limit}
    found = find(recompute=True, **options)
    assert Op.RECOMPUTE in ops_of(found)
    assert check(found.program) == found.program
    assert found.bound <= found.value <= most
    assert max(simulate(found.program).peak_in_flight) == found.peak <= limit
    assert found.method.startswith("recompute, after ")
    if plain is None:
        with pytest.raises(ScheduleError, match=r"alone holds 2 on .* or allow recompute"):
            find(**options)
    else:
        assert find(**options).value >= plain > found.value


def test_offload_where_memory_is_tight() -> None:
    options: dict[str, Any] = {"virtual": 2, "memory_limit": 4}
    found, without = find(COPIES, offload=True, **options), find(COPIES, **options)
    assert {Op.OFFLOAD, Op.RELOAD} <= ops_of(found)
    assert found.bound <= found.value < without.value
    assert max(simulate(found.program, COPIES).peak_in_flight) == found.peak <= 4


def test_copies_that_take_longer_than_a_computation_hold_memory_meanwhile() -> None:
    costs = Costs(offload=1.5, reload=0.5)
    found = find(costs, offload=True, memory_limit=3)
    assert found.peak == max(found.simulation.peak_bytes) <= 3
    assert max(simulate(found.program, costs).peak_in_flight) <= 3


def test_nothing_is_relieved_where_memory_is_enough_or_that_costs_more() -> None:
    assert ops_of(find(memory_limit=8, recompute=True)).isdisjoint({Op.RECOMPUTE, Op.OFFLOAD})
    slow = find(Costs(recompute=50, offload=99), memory_limit=3, recompute=True, offload=True)
    assert ops_of(slow).isdisjoint({Op.RECOMPUTE, Op.OFFLOAD})
    assert slow.value == find(memory_limit=3).value


def test_inputs_that_are_kept_count() -> None:
    costs = Costs(activation_bytes=10, recompute_bytes=2, offload=2, reload=2)
    with pytest.raises(ScheduleError, match="alone holds 20 on some rank; raise the limit"):
        find(costs, virtual=2, memory_limit=19)
    with pytest.raises(ScheduleError, match="alone holds 12 on some rank; raise the limit"):
        find(costs, virtual=2, memory_limit=11, recompute=True)
    found = find(costs, virtual=2, memory_limit=12, recompute=True)
    assert found.peak == max(found.simulation.peak_bytes) == 12


def test_offload_at_no_known_cost_is_refused() -> None:
    with pytest.raises(ScheduleError, match="offload=True, but costs say nothing of it"):
        find(memory_limit=3, offload=True)


@settings(deadline=None, max_examples=20)
@given(problems(), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_any_costs_and_limits(problem: SearchProblem, within: bool, kept: float) -> None:
    """The limit is kept as the simulation counts it, and the bound is beaten by none."""
    costs = problem.costs
    before = costs.activation_bytes
    assert isinstance(before, tuple)
    costs = Costs(
        forward=costs.forward,
        input_grad=costs.input_grad,
        weight_grad=costs.weight_grad,
        latency=costs.latency,
        activation_bytes=before,
        weight_grad_bytes=costs.weight_grad_bytes,
        recompute_bytes=[min(kept, size) for size in before],
        offload=[size / 4 for size in before],
        reload=[size / 4 for size in before],
    )
    limit = problem.least_memory if within else 0.9 * problem.least_memory
    try:
        found = search(
            costs,
            ranks=problem.placement.num_ranks,
            microbatches=problem.num_microbatches,
            memory_limit=limit,
            objective=problem.objective,
            placements=[problem.placement],
            time_limit_s=0.05,
            exact=False,
            recompute=True,
            offload=True,
        )
    except ScheduleError as error:
        assert not within and "no program meets" in str(error)
        return
    check(found.program)
    assert found.peak == max(found.simulation.peak_bytes) <= limit + 1e-9
    assert found.bound <= found.value + 1e-9


def test_a_recomputed_forward_counts_while_it_runs() -> None:
    program = recompute(find(memory_limit=4).program)
    assert simulate(program).peak_bytes == simulate(program).peak_in_flight
