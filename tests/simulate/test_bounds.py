"""Bounds: no program beats one, whatever its family; and how near the best programs come."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.passes import lower, offload, recompute
from penstock.schedule.placement import Placement, bidirectional, linear, looped
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family, schedules
from penstock.schedule.text import parse_csv
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate
from tests.programs import computed_programs

RELIEF = {Op.RECOMPUTE, Op.OFFLOAD}
Relief: TypeAlias = Callable[..., Program]
COST = st.integers(0, 12).map(lambda quarters: quarters / 4)


@st.composite
def costs_for(draw: st.DrawFn, placement: Placement) -> Costs:
    """Costs per stage, of messages, of overlapped pairs and of copies, each of them or none."""
    num_stages = placement.num_stages
    per_stage = st.lists(COST, min_size=num_stages, max_size=num_stages)
    return Costs(
        forward=draw(per_stage),
        input_grad=draw(per_stage),
        weight_grad=draw(per_stage),
        latency=draw(st.just(0.0) | per_stage),
        overlap=draw(st.none() | per_stage),
        recompute=draw(st.none() | per_stage),
        offload=draw(st.none() | per_stage),
        reload=draw(st.none() | per_stage),
        message_bytes=draw(per_stage),
        transfers_overlap=draw(st.booleans()),
        one_message_at_a_time=draw(st.booleans()),
        bandwidth=draw(
            st.none()
            | st.integers(1, 4)
            | st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages)
        ),
    )


@st.composite
def families(draw: st.DrawFn) -> Program:
    name = draw(st.sampled_from([each.name for each in schedules()]))
    ranks, microbatches = family(name).nearest(draw(st.integers(1, 6)), draw(st.integers(1, 15)))
    return build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        virtual=draw(st.sampled_from((family(name).virtuals or (1, 2, 3))[:3])),
    )


def can_be_relieved(program: Program) -> bool:
    """Whether there is something to relieve, and none of it is yet."""
    ops = {act.op for act in program.actions()}
    return bool(ops & {Op.FULL_BACKWARD, Op.INPUT_GRAD}) and not ops & RELIEF


def beats(program: Program, costs: Costs, *, in_memory: bool) -> list[str]:
    """The bounds that a program is faster than.

    Those of a memory limit are for programs that keep what forwards leave on the rank.
    """
    in_memory = in_memory and not any(act.op in RELIEF for act in program.actions())
    result = simulate(program, costs)
    has_backward = any(act.op in (Op.FULL_BACKWARD, Op.WEIGHT_GRAD) for act in program.actions())
    bounds = lower_bounds(
        costs,
        program.placement,
        microbatches=program.num_microbatches,
        memory_limit=max(result.peak_in_flight) if in_memory else None,
        backward=has_backward,
    )
    close = 1e-9
    return [
        f"{name} {getattr(bounds, name)}"
        for name in ("makespan", "span")
        if getattr(result, name) < getattr(bounds, name) - close
    ]


@settings(max_examples=250)
@given(data=st.data(), in_memory=st.booleans())
def test_no_program_drawn_by_the_rules_beats_a_bound(data: st.DataObject, in_memory: bool) -> None:
    program = data.draw(computed_programs(max_ranks=3, max_stages=4, max_microbatches=5))
    costs = data.draw(costs_for(program.placement))
    assert beats(program, costs, in_memory=in_memory) == []


@settings(max_examples=150)
@given(data=st.data(), relief=st.sampled_from([recompute, offload]))
def test_no_program_that_recomputes_or_offloads_beats_a_bound(
    data: st.DataObject, relief: Relief
) -> None:
    drawn = computed_programs(max_ranks=3, max_stages=4, max_microbatches=5) | families()
    program = data.draw(drawn.filter(can_be_relieved))
    stages = data.draw(st.sets(st.sampled_from(range(program.num_stages)), min_size=1))
    relieved = relief(program, stages=stages)
    costs = data.draw(costs_for(program.placement))
    assert beats(relieved, costs, in_memory=True) == []


@settings(max_examples=150)
@given(data=st.data(), in_memory=st.booleans())
def test_no_schedule_of_the_catalog_beats_a_bound(data: st.DataObject, in_memory: bool) -> None:
    program = data.draw(families())
    costs = data.draw(st.just(Costs()) | costs_for(program.placement))
    assert beats(program, costs, in_memory=in_memory) == []


# P = 4, M = 8, all costs 1: activations held at most, the least makespan, the least span.
OPTIMA = [(2, 41, 41), (3, 31, 31), (4, 27, 27), (5, 27, 26), (7, 27, 24)]
LOOPED_OPTIMA = [(4, 63), (6, 53), (8, 51)]


@pytest.mark.parametrize(("limit", "makespan", "span"), OPTIMA)
def test_proven_optima_are_not_beaten_by_their_bounds(limit: int, makespan: int, span: int) -> None:
    bounds = lower_bounds(Costs(), linear(4), microbatches=8, memory_limit=limit)
    assert bounds.makespan <= makespan
    assert bounds.span <= span
    # What memory does not narrow is met.
    if limit >= 4:
        assert (bounds.makespan, bounds.span) == (makespan, span)


@pytest.mark.parametrize(("limit", "makespan"), LOOPED_OPTIMA)
def test_proven_optima_over_loops_are_not_beaten(limit: int, makespan: int) -> None:
    bounds = lower_bounds(Costs(), looped(4, 2), microbatches=8, memory_limit=limit)
    assert bounds.makespan <= makespan
    if limit >= 6:
        assert bounds.makespan == makespan


@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 20), weight_grad=COST)
def test_schedules_that_are_known_to_be_the_best_meet_their_bound(
    ranks: int, microbatches: int, weight_grad: float
) -> None:
    # Where weight gradients cost nothing, GPipe is as fast as any.
    costs = Costs(weight_grad=0)
    best = simulate(build("gpipe", ranks=ranks, microbatches=microbatches), costs)
    bounds = lower_bounds(costs, linear(ranks), microbatches=microbatches)
    assert bounds.makespan == best.makespan
    # Forwards alone can't be faster than they are.
    costs = Costs(weight_grad=weight_grad, forward=2, latency=0.25)
    best = simulate(build("forward-only", ranks=ranks, microbatches=microbatches), costs)
    bounds = lower_bounds(costs, linear(ranks), microbatches=microbatches, backward=False)
    assert bounds.makespan == best.makespan


def test_a_round_of_forwards_lasts_as_long_as_they_do() -> None:
    """Nine forwards take longer than an activation lives: nine places are no more than ten."""
    costs = Costs(forward=2, weight_grad=0.5, latency=0.25)
    spans = [lower_bounds(costs, linear(5), microbatches=10, memory_limit=n).span for n in (9, 10)]
    assert spans[0] >= spans[1] >= 35.5


@given(ranks=st.integers(2, 8), microbatches=st.integers(1, 20), least=st.integers(1, 8))
def test_more_memory_never_makes_a_bound_greater(ranks: int, microbatches: int, least: int) -> None:
    costs = Costs(forward=2, weight_grad=0.5, latency=0.25)
    found = [
        lower_bounds(costs, linear(ranks), microbatches=microbatches, memory_limit=limit)
        for limit in (least, least + 1, least + 7, None)
    ]
    for tight, loose in pairwise(found):
        assert tight.makespan >= loose.makespan
        assert tight.span >= loose.span


@pytest.mark.parametrize("limit", [10**12, 1e300, math.inf])
def test_a_limit_far_above_what_is_held_takes_no_time(limit: float) -> None:
    plenty = lower_bounds(Costs(), linear(4), microbatches=8, memory_limit=8)
    found = lower_bounds(Costs(), linear(4), microbatches=8, memory_limit=limit)
    assert (found.makespan, found.span) == (plenty.makespan, plenty.span) == (27, 24)


def test_each_argument_is_the_best_somewhere() -> None:
    by_memory = lower_bounds(Costs(), linear(4), microbatches=8, memory_limit=2)
    by_warm_up = lower_bounds(Costs(), linear(4), microbatches=8)
    by_path = lower_bounds(Costs(latency=10), linear(4), microbatches=1)
    found = [each.makespan for each in (by_memory, by_warm_up, by_path)]
    assert found == [37, 27, 4 + 4 + 1 + 60]


def test_two_copies_of_a_model_share_the_work() -> None:
    bounds = lower_bounds(Costs(), bidirectional(4), microbatches=8)
    # A rank in the middle waits for one forward, whichever copy comes first.
    assert (bounds.makespan, bounds.span) == (25, 24)


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(forward=.* 2 numbers, .* 3 stages"):
        lower_bounds(Costs(forward=[1, 2]), linear(3), microbatches=8)


def test_bounds_hold_for_blocks_that_take_a_time_of_their_own() -> None:
    pairs = simulate(parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"), Costs(overlap=2))
    assert pairs.bounds.makespan <= pairs.makespan == 5


def test_transfers_change_no_bound() -> None:
    program = build("interleaved-zb", ranks=4, microbatches=8)
    assert beats(lower(program), Costs(latency=0.5), in_memory=True) == []
