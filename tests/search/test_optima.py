"""Search finds what is proven best, and comes near the best known."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Costs, search
from penstock.schedule.placement import linear, looped, wave
from tests.search.problems import LATE_COSTS, assert_sound

# P = 4, M = 8, all costs 1: proven by exhaustive search. Last the seconds that the search needs.
OPTIMA = [
    ("makespan", linear(4), 2, 41, 1),
    ("makespan", linear(4), 3, 31, 1),
    ("makespan", linear(4), 4, 27, 1),
    ("makespan", linear(4), 7, 27, 1),
    ("span", linear(4), 2, 41, 1),
    ("span", linear(4), 3, 31, 1),
    ("span", linear(4), 4, 27, 1),
    ("span", linear(4), 5, 26, 1),
    ("span", linear(4), 7, 24, 1),
    ("makespan", looped(4, 2), 4, 63, 2),
    ("makespan", looped(4, 2), 5, 57, 1),
    ("makespan", looped(4, 2), 6, 53, 1),
    ("makespan", looped(4, 2), 8, 51, 1),
    ("span", looped(4, 2), 5, 57, 1.5),
    ("makespan", wave(4, 1), 4, 59, 1),
    ("makespan", wave(4, 1), 5, 56, 1),
    ("span", wave(4, 1), 5, 56, 2),
]


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(("objective", "placement", "limit", "best", "time_limit_s"), OPTIMA)
def test_proven_optima_are_found_and_never_beaten(
    objective: Any, placement: Any, limit: int, best: int, time_limit_s: float
) -> None:
    found = search(
        ranks=4,
        microbatches=8,
        memory_limit=limit,
        objective=objective,
        placements=[placement],
        time_limit_s=time_limit_s,
    )
    assert_sound(found)
    assert found.value == best
    assert found.bound <= best
    assert max(found.simulation.peak_in_flight) <= limit


# P = 4, two stages per rank, little memory: costs, placement, microbatches, limit, the best
# objective of minutes of search, and the seconds that are enough to come near it.
TIGHT: list[tuple[Costs, Any, int, int, Any, float, int]] = [
    (
        Costs(
            forward=[0.82, 0.95, 0.85, 0.83, 0.8, 1.01, 1.17, 0.81],
            input_grad=[1.4, 1.35, 1.31, 1.17, 1.1, 1.32, 1.07, 1.34],
            weight_grad=[0.8, 0.72, 0.88, 0.74, 0.81, 0.65, 0.74, 0.88],
        ),
        looped(4, 2), 8, 4, "makespan", 68.39, 5,
    ),
    (
        Costs(
            forward=[0.87, 1.0, 1.05, 1.12, 0.84, 0.92, 0.84, 1.12],
            input_grad=[1.19, 0.9, 1.31, 1.3, 1.17, 1.15, 0.95, 0.89],
            weight_grad=[0.81, 0.66, 0.7, 0.72, 0.65, 0.79, 0.78, 0.91],
            latency=0.1,
        ),
        wave(4, 1), 7, 7, "span", 45.16, 5,
    ),
]  # fmt: skip


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("costs", "placement", "microbatches", "limit", "objective", "best", "time_limit_s"), TIGHT
)
def test_tight_memory_costs_little_more_than_the_best_known(
    costs: Costs,
    placement: Any,
    microbatches: int,
    limit: int,
    objective: Any,
    best: float,
    time_limit_s: int,
) -> None:
    found = search(
        costs,
        ranks=4,
        microbatches=microbatches,
        memory_limit=limit,
        placements=[placement],
        objective=objective,
        time_limit_s=time_limit_s,
    )
    assert_sound(found, costs)
    assert found.value <= 1.01 * best


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("exact", [True, False])
def test_a_span_is_not_proven_best_where_ranks_that_start_late_beat_it(exact: bool) -> None:
    found = search(
        LATE_COSTS,
        ranks=3,
        microbatches=2,
        placements=[looped(3, 2)],
        memory_limit=4,
        objective="span",
        time_limit_s=2 if exact else 0.3,
        exact=exact,
    )
    assert_sound(found, LATE_COSTS)
    # A program that comes to 38 stands in the tests of the methods.
    assert found.bound <= 38 <= found.value
    assert found.is_proven == (found.value == found.bound)


@pytest.mark.usefixtures("no_clock")
def test_a_large_step_in_half_the_memory() -> None:
    found = search(ranks=24, microbatches=256, memory_limit=12, time_limit_s=2, exact=False)
    assert found.peak <= 12 and found.gap < 0.1
