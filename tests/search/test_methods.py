"""The methods by themselves: what they make is right, within the limit, and costs what they say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Costs, build, check, simulate
from penstock.schedule.placement import linear, looped, v_shape
from penstock.search.blocks import Guise, Knobs, lay_block, legs
from penstock.search.exact import improve
from penstock.search.greedy import Placed, place, played, replay
from penstock.search.problem import Problem, order_of, program_of
from penstock.search.swaps import Swapper
from penstock.search.tune import Tuner, few_microbatches, run_block
from tests.search.problems import problem_of, problems


def assert_right(problem: Problem, placed: Placed) -> None:
    """The order is a program, keeps the limit, and takes the time that is said."""
    program = check(program_of(problem, placed.order, name="searched"))
    result = simulate(program, problem.costs)
    # Patience is time that a rank waits although it could go on.
    assert getattr(result, problem.objective) <= placed.value + 1e-9
    assert max(problem.peaks(program)) <= problem.limit + 1e-9


@settings(deadline=None, max_examples=150)
@given(problems(), st.randoms(use_true_random=False))
def test_list_scheduling_with_any_priorities(problem: Problem, random: object) -> None:
    drawn = random.random  # type: ignore[attr-defined]
    wishes = [[drawn() for _ in range(problem.num_microbatches)] for _ in range(problem.num_kinds)]
    for patience in (0.0, 1.0):
        placed = place(problem, wishes, patience=patience)
        assert_right(problem, placed)
        again = replay(problem, placed.order)
        assert again is not None
        result = simulate(program_of(problem, placed.order, name="x"), problem.costs)
        assert again.value == pytest.approx(getattr(result, problem.objective))
        assert played(problem, program_of(problem, placed.order, name="x")).ends == again.ends


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 100))
def test_tuning_and_exchanges(problem: Problem, seed: int) -> None:
    tuner = Tuner(problem, seed=seed)
    for _ in range(8):
        tuner.step()
    start = run_block(problem, tuner.best[0].knobs)
    assert_right(problem, start)
    assert tuner.best == sorted(tuner.best, key=lambda tuned: tuned.estimate)
    swapper = Swapper(problem, start, seed=seed, steps=20)
    for _ in range(20):
        swapper.step()
    assert_right(problem, swapper.best)
    assert swapper.best.value <= start.value


def test_a_window_for_a_stage_is_kept() -> None:
    problem = problem_of(linear(3), 8)
    placed = place(problem, [[float(n) for n in range(8)]] * 9, windows=(1, 2, 3))
    peaks = problem.peaks(program_of(problem, placed.order, name="x"))
    assert all(peak <= window for peak, window in zip(peaks, (1, 2, 3), strict=True))


def test_orders_and_programs_are_each_other_s_inverse() -> None:
    problem = problem_of(v_shape(3), 7)
    program = build("zbv", ranks=3, microbatches=7)
    assert program_of(problem, order_of(problem, program), name="zbv") == program


def test_an_order_in_which_ranks_wait_for_each_other() -> None:
    problem = problem_of(linear(2), 1)
    # Stage 1's backward before its forward.
    assert replay(problem, ((0, 2, 4), (3, 1, 5))) is None


def test_a_block_repeats_without_collisions() -> None:
    problem = problem_of(v_shape(4), 8)
    block = lay_block(problem, Knobs(stretch=(0.0,) * 4, packed=True))
    assert block.period == 6
    for rank in range(4):
        slots = sorted(
            offset % 6
            for offset, holder in zip(block.offsets, problem.ranks, strict=True)
            if holder == rank
        )
        assert slots == [0, 1, 2, 3, 4, 5]
    # Tight blocks over a V hold a third of what 1F1B does: those of V-Min.
    assert max(block.held[rank] + block.held[7 - rank] for rank in range(4)) == 5


def test_few_microbatches_tell_of_many() -> None:
    problem = problem_of(linear(4), 200, limit=3)
    assert few_microbatches(problem) == 24
    tuner = Tuner(problem, seed=0)
    for _ in range(20):
        tuner.step()
    best = tuner.best[0]
    assert run_block(problem, best.knobs).value == pytest.approx(best.estimate, rel=0.02)


def test_legs_are_counted_per_rank() -> None:
    assert legs(problem_of(v_shape(2), 1)) == (0, 0, 1, 1)
    assert legs(problem_of(looped(2, 3), 1)) == (0, 0, 1, 1, 2, 2)


def test_orders_for_other_costs_are_timed_by_the_true_ones() -> None:
    costs = Costs(forward=[1, 2, 1, 3], input_grad=[2, 1, 1, 1], weight_grad=0.5, latency=0.25)
    problem = problem_of(looped(2, 2), 6, limit=5, costs=costs)
    for guise in Guise:
        knobs = Knobs(stretch=(0.0,) * 4, packed=True, width=1.0, guise=guise)
        assert_right(problem, run_block(problem, knobs))


# --- exact -------------------------------------------------------------------------------------


def worst(problem: Problem) -> Placed:
    """One microbatch after the other."""
    wishes = [[float(n) for n in range(problem.num_microbatches)]] * problem.num_kinds
    return place(problem, wishes, windows=(1,) * problem.placement.num_stages)


@settings(deadline=None, max_examples=25)
@given(problems())
def test_exact_search_of_a_whole_step(problem: Problem) -> None:
    small = problem.resized(min(3, problem.num_microbatches))
    start = worst(small)
    answer = improve(small, start, effort_s=0.3, clock_s=5, seed=0)
    assert answer.bound <= start.value + 1e-9
    if answer.order is not None:
        found = replay(small, answer.order)
        assert found is not None
        assert_right(small, found)
        assert found.value <= start.value + 1e-9
        assert found.value >= answer.bound - 1e-6 * found.value
        if answer.proven:
            # CP-SAT rounds costs down to a unit; these are multiples of one.
            assert found.value == pytest.approx(answer.bound)


@pytest.mark.parametrize(("limit", "best"), [(2, 41), (3, 31), (4, 27)])
def test_exact_search_proves_the_optimum(limit: int, best: int) -> None:
    problem = problem_of(linear(4), 8, limit=limit)
    answer = improve(problem, worst(problem), effort_s=10, clock_s=60, seed=0)
    assert answer.proven and answer.bound == best
    assert answer.order is not None and played_value(problem, answer.order) == best


def played_value(problem: Problem, order: tuple[tuple[int, ...], ...]) -> float:
    found = replay(problem, order)
    assert found is not None
    return found.value


def test_a_window_changes_nothing_outside_of_it() -> None:
    problem = problem_of(linear(3), 6, limit=3)
    start = worst(problem)
    window = (20.0, 45.0)
    answer = improve(problem, start, window=window, effort_s=2, clock_s=30, seed=0)
    assert answer.order is not None and answer.bound == 0
    found = replay(problem, answer.order)
    assert found is not None and found.value < start.value
    assert_right(problem, found)
    for before, after, kinds in zip(start.order, found.order, start.order, strict=True):
        done = [0] * problem.num_kinds
        prefix = 0
        for kind in kinds:
            if start.ends[kind][done[kind]] - problem.durations[kind] >= window[0]:
                break
            done[kind] += 1
            prefix += 1
        assert before[:prefix] == after[:prefix]
