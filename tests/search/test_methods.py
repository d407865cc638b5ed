"""The methods by themselves: what they make is right, within the limit, and costs what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import Costs, Op, Program, build, check, simulate
from penstock.schedule.action import Action, action
from penstock.schedule.placement import linear, looped, v_shape
from penstock.schedule.text import parse_csv
from penstock.schedule.workload import schedule_by_priority
from penstock.search.exact import improve, improve_windows
from penstock.search.local_search import ExchangedOrder, anneal
from penstock.search.patterns import (
    PatternParams,
    PatternSearch,
    in_flight,
    lay_pattern,
    run_pattern,
)
from penstock.search.problem import Objective, SearchProblem, TimedOrder
from tests.readiness import prerequisites
from tests.search.problems import LATE_COSTS, problem_of, problems


def assert_right(problem: SearchProblem, timed: TimedOrder) -> None:
    """The order is a program, keeps the limit, and takes the time that is said."""
    program = check(problem.program(timed.order, name="searched"))
    result = simulate(program, problem.costs)
    # Patience is time that a rank waits although it could go on.
    assert getattr(result, problem.objective) <= timed.value + 1e-9
    assert max(problem.peaks(program)) <= problem.limit + 1e-9


@settings(deadline=None, max_examples=70)
@given(problems(), st.randoms(use_true_random=False))
def test_list_scheduling_with_any_priorities(problem: SearchProblem, random: object) -> None:
    drawn = random.random  # type: ignore[attr-defined]
    wishes = [[drawn() for _ in range(problem.num_microbatches)] for _ in range(problem.num_kinds)]
    for patience in (0.0, 1.0):
        timed = schedule_by_priority(problem, wishes, patience=[patience] * problem.num_kinds)
        assert_right(problem, timed)
        again = problem.replay(timed.order)
        assert again is not None
        result = simulate(problem.program(timed.order, name="x"), problem.costs)
        assert again.value == pytest.approx(getattr(result, problem.objective))


@settings(deadline=None, max_examples=40)
@given(problems(), st.integers(0, 100))
def test_patterns_and_local_search(problem: SearchProblem, seed: int) -> None:
    search = PatternSearch(problem, seed=seed)
    for _ in range(8):
        search.step()
    start = run_pattern(problem, search.best[0][1])
    assert_right(problem, start)
    assert [each[0] for each in search.best] == sorted(each[0] for each in search.best)
    value, order = anneal(problem, start.order, seed=seed, work=10 * problem.size)
    best = problem.replay(order)
    assert best is not None
    assert_right(problem, best)
    assert best.value == pytest.approx(value)
    assert value <= replayed(problem, start).value + 1e-9


@settings(deadline=None, max_examples=50)
@given(problems(), st.integers(0, 100), st.randoms(use_true_random=False))
def test_the_gain_of_an_exchange_is_known_before(
    problem: SearchProblem, seed: int, random: Any
) -> None:
    search = PatternSearch(problem, seed=seed)
    search.step()
    timed = ExchangedOrder(problem, run_pattern(problem, search.best[0][1]).order)
    for _ in range(10):
        pairs = timed.neighbours(random)
        if not pairs:
            break
        first, second = random.choice(pairs)
        before, order = timed.value, timed.order
        estimate, fits = timed.estimate(first, second), timed.fits(first, second)
        swapped = timed.exchange(first, second)
        assert swapped or timed.order == order
        if not swapped:
            continue
        # At least that way is as long, and no other has got longer.
        assert estimate - 1e-9 <= timed.value <= max(before, estimate) + 1e-9
        again = problem.replay(timed.order)
        assert again is not None and again.value == pytest.approx(timed.value)
        held = max(problem.peaks(problem.program(timed.order, name="x")))
        assert fits == (held <= problem.limit + 1e-9)
        if not fits:
            break


def replayed(problem: SearchProblem, timed: TimedOrder) -> TimedOrder:
    """The same order without waiting where a rank can go on."""
    found = problem.replay(timed.order)
    assert found is not None
    return found


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_transfers_that_do_not_overlap_hold_up_their_rank(objective: Any) -> None:
    costs = Costs(message_bytes=1, bandwidth=2, latency=0.3, transfers_overlap=False)
    problem = problem_of(v_shape(3), 6, costs=costs, limit=5, objective=objective)
    timed = run_pattern(problem, PatternParams())
    result = simulate(problem.program(timed.order, name="x"), costs)
    assert timed.value == pytest.approx(getattr(result, objective))


def test_a_window_for_a_stage_is_kept() -> None:
    problem = problem_of(linear(3), 8)
    timed = schedule_by_priority(problem, [[float(n) for n in range(8)]] * 9, windows=(1, 2, 3))
    peaks = problem.peaks(problem.program(timed.order, name="x"))
    assert all(peak <= window for peak, window in zip(peaks, (1, 2, 3), strict=True))


def test_orders_and_programs_are_each_other_s_inverse() -> None:
    problem = problem_of(v_shape(3), 7)
    program = build("zbv", ranks=3, microbatches=7)
    assert problem.program(problem.order(program), name="zbv") == program


def test_an_order_in_which_ranks_wait_for_each_other() -> None:
    problem = problem_of(linear(2), 1)
    # Stage 1's backward before its forward.
    assert problem.replay(((0, 2, 4), (3, 1, 5))) is None


def test_a_block_repeats_without_collisions() -> None:
    problem = problem_of(v_shape(4), 8)
    pattern = lay_pattern(problem, PatternParams())
    assert pattern.period == 6
    for rank in range(4):
        slots = sorted(
            offset % 6
            for offset, holder in zip(pattern.starts, problem.ranks, strict=True)
            if holder == rank
        )
        assert slots == [0, 1, 2, 3, 4, 5]
    # Tight blocks over a V hold a third of what 1F1B does: those of V-Min.
    held = in_flight(problem, pattern)
    assert max(held[rank] + held[7 - rank] for rank in range(4)) == 5


def test_few_microbatches_tell_of_many() -> None:
    problem = problem_of(linear(4), 200, limit=3)
    search = PatternSearch(problem, seed=0)
    search.step()
    assert search.placed == 24 * problem.num_kinds
    for _ in range(19):
        search.step()
    estimate, params = search.best[0]
    assert run_pattern(problem, params).value == pytest.approx(estimate, rel=0.02)


# --- exact -------------------------------------------------------------------------------------


def worst(problem: SearchProblem) -> TimedOrder:
    """One microbatch after the other."""
    wishes = [[float(n) for n in range(problem.num_microbatches)]] * problem.num_kinds
    return schedule_by_priority(problem, wishes, windows=(1,) * problem.placement.num_stages)


# Where I and W take no time, what W holds between them.
INSTANT = SearchProblem(
    placement=looped(2, 2),
    num_microbatches=2,
    costs=Costs(
        forward=[0.0, 0.5, 0.5, 0.0],
        input_grad=0.0,
        weight_grad=0.0,
        activation_bytes=1.0,
        weight_grad_bytes=[1.0, 1.0, 1.0, 2.0],
    ),
    limit=3.0,
)


@settings(deadline=None, max_examples=25)
@given(problems())
@example(INSTANT)
def test_exact_search_of_a_whole_step(problem: SearchProblem) -> None:
    small = replace(problem, num_microbatches=min(3, problem.num_microbatches))
    start = worst(small)
    answer = improve(small, start, effort_s=0.3, clock_s=5, seed=0)
    assert answer.bound <= start.value + 1e-9
    if answer.order is not None:
        found = small.replay(answer.order)
        assert found is not None
        assert_right(small, found)
        assert found.value <= start.value + 1e-9
        assert found.value >= answer.bound - 1e-6 * found.value
        if answer.proven and small.objective == "makespan" and small.splits:
            # CP-SAT rounds costs down to a unit; these are multiples of one.
            assert found.value == pytest.approx(answer.bound)


@pytest.mark.parametrize(("limit", "best"), [(2, 41), (3, 31), (4, 27)])
def test_exact_search_proves_the_optimum(limit: int, best: int) -> None:
    problem = problem_of(linear(4), 8, limit=limit)
    answer = improve(problem, worst(problem), effort_s=10, clock_s=60, seed=0)
    assert answer.proven and answer.bound == best
    assert answer.order is not None and played_value(problem, answer.order) == best


# The best span of LATE_COSTS: microbatch 1 goes first on ranks 1 and 2.
LATE = """\
0F0,0F1,3F1,3F0,3I1,3W1,3I0,3W0,0I1,0W1,0I0,0W0
1F1,1F0,4F1,4F0,4I1,4W1,4I0,4W0,1I1,1W1,1I0,1W0
2F1,2F0,5F1,5I1,5F0,5I0,2I1,2I0,5W1,5W0,2W0,2W1
"""


def test_a_bound_on_the_span_holds_for_ranks_that_start_late() -> None:
    problem = problem_of(looped(3, 2), 2, limit=4, costs=LATE_COSTS, objective="span")
    late = parse_csv(LATE, placement=problem.placement)
    assert simulate(check(late), LATE_COSTS).span == 38
    assert max(problem.peaks(late)) == 4
    answer = improve(problem, worst(problem), effort_s=10, clock_s=60, seed=0)
    assert answer.proven and answer.bound == 38
    # Orders run microbatch 0 first, and each rank as early as it can.
    assert answer.order is None or played_value(problem, answer.order) >= 39


@settings(deadline=None, max_examples=16)
@given(problems(), st.integers(0, 100))
def test_windows_keep_the_limit_and_lead_to_no_worse_order(
    problem: SearchProblem, seed: int
) -> None:
    start = worst(problem)
    value, order = improve_windows(
        problem, start, effort_s=0.1, seed=seed, is_over=lambda value: value > start.value + 1e-9
    )
    again = problem.replay(order)
    assert again is not None and again.value == value <= start.value + 1e-9
    assert_right(problem, again)


def test_windows_lead_to_the_optimum_and_end_there() -> None:
    problem = problem_of(looped(3, 2), 5, limit=5)
    best = improve(problem, worst(problem), effort_s=5, clock_s=60, seed=0)
    assert best.proven and worst(problem).value > best.bound
    value, order = improve_windows(
        problem, worst(problem), effort_s=5, seed=0, is_over=lambda value: value <= best.bound
    )
    assert played_value(problem, order) == value == best.bound


@settings(deadline=None, max_examples=20)
@given(problems(), st.randoms(use_true_random=False))
def test_no_program_beats_the_bound_on_the_span(problem: SearchProblem, random: Any) -> None:
    few = replace(problem, num_microbatches=2, objective="span", limit=math.inf)
    answer = improve(few, worst(few), effort_s=0.3, clock_s=5, seed=0)
    for _ in range(20):
        assert simulate(any_program(few, random), few.costs).span >= answer.bound - 1e-9


def any_program(problem: SearchProblem, random: Any) -> Program:
    """Ranks take what is ready by chance, each its microbatches in an order of its own."""
    left = [
        action(stage, op, microbatch)
        for stage in range(problem.placement.num_stages)
        for op in (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
        for microbatch in range(problem.num_microbatches)
    ]
    ranks: list[list[Action]] = [[] for _ in range(problem.placement.num_ranks)]
    while left:
        ready = [a for a in left if not set(prerequisites(a, problem.placement)) & set(left)]
        chosen = random.choice(ready)
        left.remove(chosen)
        ranks[problem.placement.stage_ranks[chosen.stage]].append(chosen)
    return check(
        Program(
            name="any",
            placement=problem.placement,
            num_microbatches=problem.num_microbatches,
            ranks=tuple(map(tuple, ranks)),
        )
    )


def played_value(problem: SearchProblem, order: tuple[tuple[int, ...], ...]) -> float:
    found = problem.replay(order)
    assert found is not None
    return found.value


def test_no_bound_where_programs_with_blocks_may_be_better() -> None:
    problem = problem_of(linear(1), 3, costs=Costs(overlap=1))
    answer = improve(problem, worst(problem), effort_s=1, clock_s=30, seed=0)
    assert answer.proven and answer.bound == 0


def test_full_backwards_that_hold_less_than_split_ones_are_not_split() -> None:
    costs = Costs(activation_bytes=2, weight_grad_bytes=3)
    problem = problem_of(linear(2), 2, limit=4, costs=costs)
    answer = improve(problem, worst(problem), effort_s=1, clock_s=30, seed=0)
    assert answer.proven and answer.bound == 0
    assert answer.order is not None
    ops = {act.op for act in problem.program(answer.order, name="x").actions()}
    assert ops == {Op.FORWARD, Op.FULL_BACKWARD}
    free = replace(problem, limit=math.inf)
    assert improve(free, worst(free), effort_s=1, clock_s=30, seed=0).bound == 7


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_patterns_and_critical_paths_do_not_depend_on_the_unit_of_costs(
    objective: Objective,
) -> None:
    """Powers of two, so that times are the same to the last bit."""

    def found(unit: float) -> tuple[object, ...]:
        costs = Costs(
            forward=unit, input_grad=1.4 * unit, weight_grad=0.7 * unit, latency=0.3 * unit
        )
        problem = problem_of(v_shape(4), 8, limit=8, costs=costs, objective=objective)
        pattern = lay_pattern(problem, PatternParams(packed=True))
        timed = ExchangedOrder(problem, run_pattern(problem, PatternParams(packed=True)).order)
        pairs = [timed.neighbours(Random(seed)) for seed in range(20)]
        return [start / unit for start in pattern.starts], timed.order, pairs

    assert found(2.0**-40) == found(1.0)
