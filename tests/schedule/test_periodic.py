"""Periodic patterns and their list schedules, by laws and by small examples."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families.common import program_of
from penstock.schedule.families.periodic import PeriodicPattern, chain_pattern
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.placement import Placement, linear, looped, v_shape, wave
from penstock.simulate.memory import peak_in_flight
from penstock.simulate.simulation import simulate


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks, several = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    make = draw(st.sampled_from([looped, wave]))
    return make(ranks, several)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Placement, PeriodicPattern, bool]:
    placement = draw(placements())
    full = draw(st.booleans())
    passes = 2 * placement.num_stages - 1
    gaps = draw(st.lists(st.integers(1, 5), min_size=passes, max_size=passes))
    if full:
        gaps = [max(2, gap) if at >= placement.num_stages else gap for at, gap in enumerate(gaps)]
    period = 3 * placement.num_stages // placement.num_ranks + draw(st.integers(0, 2))
    return placement, chain_pattern(placement, gaps=gaps, period=period, full=full), full


@settings(deadline=None, max_examples=80)
@given(patterns())
def test_repetitions_of_a_pattern_never_meet(made: tuple[Placement, PeriodicPattern, bool]) -> None:
    placement, pattern, full = made
    stages = placement.num_stages
    for rank in range(placement.num_ranks):
        taken = [
            (pattern.starts[kind] + unit) % pattern.period
            for stage in placement.stages_of(rank)
            for kind, lasts in ((stage, 1), (stage + stages, 1 + full))
            for unit in range(lasts)
        ]
        assert len(taken) == len(set(taken))


@settings(deadline=None, max_examples=80)
@given(patterns())
def test_every_action_of_a_pattern_starts_after_its_prerequisites(
    made: tuple[Placement, PeriodicPattern, bool],
) -> None:
    placement, pattern, full = made
    stages = placement.num_stages
    chain = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
    for before, after in pairwise(chain):
        lasts = 1 if before < stages else 1 + full
        assert pattern.starts[after] >= pattern.starts[before] + lasts


def text_of(order: Sequence[Sequence[int]], rank: int) -> str:
    return " ".join(map(str, program_of("", linear(2), 3, order).ranks[rank]))


def own_peak(order: list[int], stages: int) -> int:
    held = peak = 0
    for kind in order:
        held += 1 if kind < stages else -1
        peak = max(peak, held)
    return peak


COST = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@settings(deadline=None, max_examples=100)
@given(
    made=patterns(),
    microbatches=st.integers(1, 12),
    more=st.integers(0, 4),
    spare=st.sampled_from([None, 0, 1, 2]),
    costs=st.tuples(COST, COST, COST),
)
def test_scheduled_orders_are_valid_and_stay_in_the_limit(
    made: tuple[Placement, PeriodicPattern, bool],
    microbatches: int,
    more: int,
    spare: int | None,
    costs: tuple[float, float, float],
) -> None:
    placement, pattern, full = made
    orders = pattern.orders(placement, microbatches=microbatches)
    limit = max(own_peak(order, placement.num_stages) for order in orders) + more
    forward, input_grad, weight_grad = ((cost,) * placement.num_stages for cost in costs)
    scheduled = list_schedule(
        placement,
        orders,
        limit=limit,
        full=full,
        spare=spare,
        costs=(forward, input_grad, weight_grad),
    )
    program = program_of("scheduled", placement, microbatches, scheduled, full=full)
    check(program)
    assert max(peak_in_flight(program)) <= limit


def test_idle_time_is_filled_by_forwards_of_later_then_by_weight_gradients() -> None:
    orders = [[0, 2] * 3, [1, 3] * 3]
    strict = list_schedule(linear(2), orders, limit=3)
    assert text_of(strict, 0) == "0F0 0I0 0F1 0W0 0I1 0F2 0W1 0I2 0W2"
    filled = list_schedule(linear(2), orders, limit=3, spare=0)
    assert text_of(filled, 0) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    programs = [program_of("scheduled", linear(2), 3, order) for order in (filled, strict)]
    assert simulate(programs[0]).makespan < simulate(programs[1]).makespan
    # With room for two alone, the third forward comes when a weight gradient has made some.
    tight = list_schedule(linear(2), orders, limit=2, spare=0)
    assert text_of(tight, 0).startswith("0F0 0F1 0I0 0W0")
    assert peak_in_flight(program_of("scheduled", linear(2), 3, tight)) == (2, 2)


def test_late_messages_are_waited_for() -> None:
    """A weight gradient that takes longer than the wait would delay what others wait for."""
    orders = [[0, 2] * 2, [1, 3] * 2]
    costs = ((1.0, 1.0), (1.0, 1.0), (9.0, 1.0))
    scheduled = list_schedule(linear(2), orders, limit=2, spare=0, costs=costs)
    assert text_of(scheduled, 0) == "0F0 0F1 0I0 0I1 0W0 0W1"


def test_a_limit_that_can_not_be_kept_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"ranks \[0\] can't follow their orders within 1 activations"
    ):
        list_schedule(linear(1), [[0, 0]], limit=1)


def test_a_period_that_is_too_short_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a period of 3 is too short"):
        chain_pattern(v_shape(1), gaps=(1, 1, 1), period=3)
