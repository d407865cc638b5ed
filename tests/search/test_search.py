"""The search: it finds what is proven best, beats no proof, and refuses what makes no sense."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from penstock import Costs, Op, ScheduleError, build, check, search, simulate
from penstock.schedule.placement import bidirectional, linear, looped, v_shape
from penstock.schedule.text import format_csv
from penstock.search import engine
from penstock.search.problem import SearchProblem
from penstock.search.state import Budget
from penstock.simulate.bounds import lower_bounds
from tests.processes import run_ranks
from tests.search.problems import assert_sound, problems

UNEVEN = Costs(
    forward=[1.1, 0.8, 1.3, 0.9, 1.0, 1.2, 0.7, 1.0],
    input_grad=[1.2, 1.0, 1.1, 0.9, 1.3, 1.0, 0.9, 1.1],
    weight_grad=[0.8, 0.6, 1.0, 0.7, 0.9, 0.8, 0.5, 0.9],
    latency=0.1,
)


# --- costs and limits --------------------------------------------------------------------------


def test_a_limit_in_a_large_unit_is_kept() -> None:
    costs = Costs(activation_bytes=1e-12)
    found = search(costs, ranks=4, microbatches=8, memory_limit=2e-12, time_limit_s=1, exact=False)
    assert max(found.simulation.peak_in_flight) == 2


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(("ranks", "microbatches", "best"), [(1, 3, 5), (2, 4, 11)])
def test_blocks_that_overlap_beat_no_bound(ranks: int, microbatches: int, best: int) -> None:
    costs = Costs(overlap=1)
    found = search(costs, ranks=ranks, microbatches=microbatches, time_limit_s=0.5)
    assert_sound(found, costs)
    # A program with overlapped pairs that search doesn't look for.
    assert found.bound <= best <= found.value


@settings(deadline=None, max_examples=25)
@given(problems())
def test_any_costs_and_limits(problem: SearchProblem) -> None:
    found = search(
        problem.costs,
        ranks=problem.placement.num_ranks,
        microbatches=problem.num_microbatches,
        memory_limit=problem.limit,
        objective=problem.objective,
        placements=[problem.placement],
        time_limit_s=0.05,
        exact=False,
    )
    check(found.program)
    assert found.bound <= found.value
    assert found.peak <= problem.limit + 1e-9
    # What is held is what the simulation's own account says, too.
    assert max(found.simulation.peak_bytes) == pytest.approx(found.peak)


@pytest.mark.usefixtures("no_clock")
def test_uneven_stages_over_all_placements() -> None:
    found = search(UNEVEN, ranks=4, microbatches=12, memory_limit=8, time_limit_s=0.5)
    assert_sound(found, UNEVEN)
    assert found.program.placement in (looped(4, 2), v_shape(4))
    for placement in (looped(4, 2), v_shape(4)):
        bounds = lower_bounds(UNEVEN, placement, microbatches=12, memory_limit=8)
        alone = search(
            UNEVEN,
            ranks=4,
            microbatches=12,
            memory_limit=8,
            placements=[placement],
            time_limit_s=0.25,
            exact=False,
        )
        assert bounds.makespan <= alone.bound
        assert found.value <= alone.value * 1.01
    named = ("1f1b-v", "v-half", "zbv", "interleaved-zb")
    programs = [build(name, ranks=4, microbatches=12, virtual=2) for name in named]
    fitting = [p for p in programs if max(simulate(p).peak_in_flight) <= 8]
    assert fitting
    assert all(found.value <= simulate(p, UNEVEN).makespan for p in fitting)


def test_memory_in_bytes() -> None:
    costs = Costs(activation_bytes=[3e9, 1e9, 1e9, 1e9], weight_grad_bytes=0.5e9)
    found = search(costs, ranks=4, microbatches=8, memory_limit=6e9, time_limit_s=1, exact=False)
    assert_sound(found, costs)
    assert found.peak <= 6e9
    assert found.simulation.peak_bytes[0] <= 6e9 < 3e9 * 8


GROWING = Costs(activation_bytes=2, weight_grad_bytes=3)


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("limit", [4, 5, 8, 11, None])
@pytest.mark.parametrize("exact", [False, True])
def test_weight_gradients_that_hold_more_than_forwards_left(
    virtual: int, limit: int | None, exact: bool
) -> None:
    """Full backwards never hold more: a schedule of these may fit where split ones don't."""
    sizes = {"ranks": 3, "microbatches": 6, "virtual": virtual}
    found = search(GROWING, **sizes, memory_limit=limit, time_limit_s=0.2, exact=exact)
    assert_sound(found, GROWING)
    assert found.peak == max(found.simulation.peak_bytes)
    assert limit is None or found.peak <= limit
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "v-half", "v-min", "zbv"):
        try:
            program = build(name, **sizes)
        except ScheduleError:
            continue
        result = simulate(program, GROWING)
        if limit is None or max(result.peak_bytes) <= limit:
            assert found.bound <= found.value <= result.makespan


@pytest.mark.usefixtures("no_clock")
def test_where_split_backwards_do_not_fit_none_is_split() -> None:
    # On a rank: 2 from F to B; or else 3 while W runs.
    found = search(GROWING, ranks=2, microbatches=4, memory_limit=2, time_limit_s=0.5)
    assert found.peak == 2 and found.bound <= found.value == 24
    assert {act.op for act in found.program.actions()} == {Op.FORWARD, Op.FULL_BACKWARD}
    with pytest.raises(ScheduleError, match=r"memory_limit=1\.9: .* alone holds 2 on some rank"):
        search(GROWING, ranks=2, microbatches=4, memory_limit=1.9)


def test_the_least_limit_where_weight_gradients_hold_more() -> None:
    costs = Costs(activation_bytes=1, weight_grad_bytes=2)
    sizes = {"ranks": 2, "microbatches": 1, "virtual": 2}
    found = search(costs, **sizes, memory_limit=3, recompute=True, time_limit_s=0.5)
    assert found.peak == max(found.simulation.peak_bytes) <= 3


@pytest.mark.usefixtures("no_clock")
def test_many_microbatches_stretch_the_steady_state() -> None:
    found = search(
        UNEVEN,
        ranks=8,
        microbatches=200,
        memory_limit=8,
        time_limit_s=0.4,
        exact=False,
    )
    assert_sound(found, UNEVEN)
    assert found.gap < 0.02


@pytest.mark.parametrize(
    "messages", [{"transfers_overlap": False}, {"one_message_at_a_time": True}]
)
def test_messages_that_hold_up_ranks_or_each_other(messages: dict[str, bool]) -> None:
    costs = replace(UNEVEN, message_bytes=1.0, bandwidth=2.0, **messages)
    found = search(costs, ranks=4, microbatches=8, memory_limit=8, time_limit_s=0.5)
    assert_sound(found, costs)
    for name in ("interleaved-1f1b", "interleaved-zb", "zbv", "v-half"):
        result = simulate(build(name, ranks=4, microbatches=8, virtual=2), costs)
        assert max(result.peak_in_flight) > 8 or found.value <= result.makespan


# --- time --------------------------------------------------------------------------------------


def test_the_time_limit_is_kept_and_the_answer_says_if_the_clock_cut_it() -> None:
    started = time.monotonic()
    found = search(UNEVEN, ranks=8, microbatches=256, memory_limit=7, time_limit_s=0.05)
    # One method ends what it has begun: a few passes over the program.
    assert time.monotonic() - started < 5
    assert_sound(found, UNEVEN)


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("exact", [False, True])
def test_a_seed_gives_the_same_program_again(exact: bool) -> None:
    options: dict[str, Any] = {"ranks": 3, "microbatches": 6, "virtual": 2, "memory_limit": 4}
    costs = Costs(forward=[1.0, 1.3, 0.8, 1.1, 0.9, 1.2], weight_grad=0.7, latency=0.1)
    first, again = (
        search(costs, time_limit_s=0.1, seed=3, exact=exact, **options) for _ in range(2)
    )
    assert first == again and first.reproducible


def test_a_large_seed() -> None:
    """Larger than CP-SAT takes."""
    found = search(ranks=3, microbatches=4, virtual=2, memory_limit=3, seed=2**40, time_limit_s=0.2)
    assert found.peak <= 3


def searched_elsewhere(rank: int, num_ranks: int) -> tuple[str, float]:
    """A search, with other hashes of strings in each process."""
    Budget.left_s = property(lambda self: 1e6)  # type: ignore[assignment,method-assign]
    found = search(UNEVEN, ranks=4, microbatches=6, time_limit_s=0.1, seed=5)
    return format_csv(found.program), found.value


@pytest.mark.timeout(240)
def test_a_seed_gives_the_same_program_in_another_process() -> None:
    found = run_ranks(searched_elsewhere, 2, timeout_s=200)  # no clock ends it
    one, other = (outcome.result() for outcome in found)
    assert one == other


@pytest.mark.parametrize("limit_s", [0.3, 0.8])
@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_the_time_limit_is_kept(limit_s: float, options: dict[str, bool]) -> None:
    """In seconds of this process: others may take the machine from it."""
    began, began_cpu = time.monotonic(), time.process_time()
    found = search(
        UNEVEN, ranks=8, microbatches=32, memory_limit=4, time_limit_s=limit_s, **options
    )
    took = min(time.monotonic() - began, time.process_time() - began_cpu)
    assert took < 1.5 * limit_s + 0.5
    assert_sound(found, UNEVEN)


def test_more_than_a_machine_holds_is_refused() -> None:
    with pytest.raises(ScheduleError, match="more than a machine holds"):
        search(ranks=10**6, microbatches=10**6, exact=False)


@pytest.mark.parametrize("limit", [None, 1000])
def test_the_time_limit_is_kept_with_a_thousand_stages(limit: int | None) -> None:
    began, began_cpu = time.monotonic(), time.process_time()
    found = search(ranks=4, microbatches=4, virtual=500, memory_limit=limit, time_limit_s=1.5)
    took = min(time.monotonic() - began, time.process_time() - began_cpu)
    assert took < 4
    assert found.peak <= (limit or found.peak)
    assert found.bound <= found.value < 1.5 * found.bound


def test_a_slow_edge_is_searched_around() -> None:
    costs = Costs(latency=[2, 0])
    found = search(costs, ranks=2, microbatches=3, time_limit_s=1)
    assert found.simulation.trace == simulate(found.program, costs).trace
    assert found.bound <= found.value == found.simulation.makespan


def test_methods_are_at_work_in_the_order_that_is_documented(
    no_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    order = ["_closed_forms", "_tune_patterns", "_search_locally", "_search_exactly"]

    def noting(name: str) -> Callable[..., None]:
        method = getattr(engine, name)

        def noted(*given: Any) -> None:
            began.append(name)
            method(*given)

        return noted

    for name in order:
        monkeypatch.setattr(engine, name, noting(name))
    search(UNEVEN, ranks=4, microbatches=6, memory_limit=4, time_limit_s=0.1)
    assert list(dict.fromkeys(began)) == order


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 1, "virtual": 2}, "no program meets memory_limit=1: .* alone holds 2"),
        ({"memory_limit": float("nan")}, "memory_limit=nan is not a number"),
        ({"memory_limit": -1}, "memory_limit=-1 is not a number"),
        ({"memory_limit": True}, "memory_limit=True is not a number"),
        ({"memory_limit": "2"}, "memory_limit='2' is not a number"),
        ({"ranks": 0}, "ranks=0 must be a whole number"),
        ({"microbatches": 2.5}, "microbatches=2.5 must be a whole number"),
        ({"virtual": True}, "virtual=True must be a whole number"),
        ({"objective": "speed"}, "objective='speed'; choose 'makespan'"),
        ({"time_limit_s": 0}, "time_limit_s=0 must be"),
        ({"time_limit_s": float("nan")}, "time_limit_s=nan must be"),
        ({"time_limit_s": float("inf")}, "time_limit_s=inf must be a finite number"),
        ({"placements": []}, "placements is empty"),
        ({"placements": [linear(3)]}, "on 3 ranks, but ranks=4"),
        ({"placements": [linear(4)], "virtual": 2}, "a placement of 4 stages"),
        ({"placements": [bidirectional(4)]}, "two copies"),
        ({"costs": Costs(forward=[1, 2, 3])}, "costs for 3 stages, which 4 ranks can't share"),
        ({"costs": Costs(forward=[1.0] * 8), "virtual": 1}, "has 8 numbers"),
    ],
)
def test_contradictory_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        search(**{"ranks": 4, "microbatches": 8, **options})


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_costs(cost: float) -> None:
    with pytest.raises(ScheduleError, match="not a finite number"):
        search(Costs(input_grad=cost), ranks=2, microbatches=2)


def test_the_least_that_is_said_can_be_met() -> None:
    costs = Costs(activation_bytes=[5, 7, 11, 13])
    with pytest.raises(ScheduleError, match="alone holds 18") as caught:
        search(costs, ranks=2, microbatches=4, memory_limit=17.5)
    assert "looped" not in str(caught.value)
    found = search(costs, ranks=2, microbatches=4, memory_limit=18, time_limit_s=1)
    assert found.peak == 18


def test_the_least_in_a_large_unit_can_be_met() -> None:
    costs = Costs(activation_bytes=314152265)
    with pytest.raises(ScheduleError, match="alone holds 314152265 on some rank"):
        search(costs, ranks=4, microbatches=8, memory_limit=1)
    found = search(costs, ranks=4, microbatches=8, memory_limit=314152265, time_limit_s=0.1)
    assert found.peak == 314152265


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(ScheduleError, match=r"pip install 'penstock\[search\]'.*exact=False"):
        search(ranks=4, microbatches=8)
    assert search(ranks=4, microbatches=8, exact=False).value == 27
