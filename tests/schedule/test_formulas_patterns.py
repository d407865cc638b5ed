"""The formulas of the families of repeated blocks, of groups, and of a searched warm-up."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from penstock.schedule.placement import v_shape
from penstock.schedule.registry import build
from penstock.simulate.costs import Costs
from penstock.simulate.memory import StageMemory, peaks
from penstock.simulate.simulation import simulate
from tests.schedule.test_formulas import COST, MORE, RANKS, VIRTUAL, run

# Tens of ranks are many actions: fewer examples of larger ones.
MANY = st.integers(2, 24)


@settings(deadline=None, max_examples=60)
@given(ranks=RANKS, microbatches=st.integers(1, 25), costs=st.tuples(COST, COST, COST))
def test_eager_1f1b(ranks: int, microbatches: int, costs: tuple[int, int, int]) -> None:
    result = run("eager-1f1b", ranks, microbatches, 1, costs)
    assert result.makespan == (microbatches + ranks - 1) * sum(costs)
    assert result.peak_in_flight == tuple(
        min(microbatches, 2 * (ranks - rank) - 1) for rank in range(ranks)
    )


@settings(deadline=None, max_examples=80)
@given(
    ranks=RANKS,
    microbatches=st.integers(1, 25),
    costs=st.tuples(COST, COST, COST),
    latency=st.integers(0, 20),
)
@example(ranks=3, microbatches=20, costs=(4, 1, 1), latency=4)
def test_eager_1f1b_pays_for_its_messages_once(
    ranks: int, microbatches: int, costs: tuple[int, int, int], latency: int
) -> None:
    """As long as there and back they take no longer than a forward and a backward; else more."""
    forward, input_grad, weight_grad = costs
    given = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)
    programs = [build(n, ranks=ranks, microbatches=microbatches) for n in ("eager-1f1b", "1f1b")]
    eager, plain = (simulate(each, given).makespan for each in programs)
    formula = (microbatches + ranks - 1) * sum(costs) + 2 * (ranks - 1) * latency
    if 2 * latency <= sum(costs):
        assert eager == formula <= plain
        if ranks > 1 and latency and microbatches > ranks:
            assert plain > eager
    elif ranks > 1 and microbatches >= 2 * ranks:
        assert eager > formula


@settings(deadline=None, max_examples=60)
@given(ranks=RANKS, more=MORE, forward=st.integers(1, 9), input_grad=st.integers(1, 9), w=COST)
def test_zb_h1(ranks: int, more: int, forward: int, input_grad: int, w: int) -> None:
    microbatches, weight_grad = 2 * ranks + more, min(forward, input_grad, w)
    result = run("zb-h1", ranks, microbatches, 1, (forward, input_grad, weight_grad))
    bubble = (ranks - 1) * (forward + input_grad - weight_grad)
    assert result.makespan == microbatches * (forward + input_grad + weight_grad) + bubble
    assert result.peak_in_flight == (ranks,) * ranks


@settings(deadline=None, max_examples=80)
@given(ranks=RANKS, more=MORE, forward=st.integers(1, 9), input_grad=st.integers(1, 9), w=COST)
def test_zb_h2(ranks: int, more: int, forward: int, input_grad: int, w: int) -> None:
    microbatches = 2 * ranks - 1 + more
    weight_grad = min(forward, (forward + input_grad) // 2, w)
    result = run("zb-h2", ranks, microbatches, 1, (forward, input_grad, weight_grad))
    work = microbatches * (forward + input_grad + weight_grad)
    assert result.span == work + (ranks - 1) * (forward + input_grad - 2 * weight_grad)
    whole = (ranks - 1) * (forward + max(0, input_grad - 2 * weight_grad))
    assert result.makespan == work + whole
    assert result.peak_in_flight == (2 * ranks - 1,) * ranks


@settings(deadline=None, max_examples=60)
@given(
    ranks=RANKS,
    microbatches=st.integers(1, 30),
    costs=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
def test_zb_1p_and_zb_2p_are_no_worse_than_hand_made_ones(
    ranks: int, microbatches: int, costs: tuple[int, int, int]
) -> None:
    forward, input_grad, weight_grad = costs
    given = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
    for searched, by_hand, limit, weight_share in (
        ("zb-1p", "zb-h1", ranks, 1.0),
        ("zb-2p", "zb-h2", 2 * ranks, 0.4),
    ):
        best = simulate(
            build(
                searched,
                ranks=ranks,
                microbatches=microbatches,
                forward=forward,
                input_grad=input_grad,
                weight_grad=weight_grad,
            ),
            given,
        )
        other = simulate(build(by_hand, ranks=ranks, microbatches=microbatches), given)
        assert (best.span, best.makespan) <= (other.span, other.makespan)
        # ZB-2p counts what W needs as a part of an activation.
        held = replace(StageMemory.of(Costs(), ranks), weight_grad=(weight_share,) * ranks)
        assert max(peaks(best.program, held)) <= limit + 1e-9


def test_zb_1p_knows_stages_that_cost_more_than_others() -> None:
    """Twice the last stage's forward and backward, as where a large vocabulary is."""
    slow = (1.0, 1.0, 1.0, 2.0)
    costs = Costs(forward=slow, input_grad=slow, weight_grad=slow)
    blind = simulate(build("zb-1p", ranks=4, microbatches=12), costs)
    told = build("zb-1p", ranks=4, microbatches=12, forward=slow, input_grad=slow, weight_grad=slow)
    # The last stage alone takes 12 times 6, and starts after 3.
    assert 75 <= simulate(told, costs).makespan <= blind.makespan


@settings(deadline=None, max_examples=60)
@given(ranks=RANKS, times=st.integers(1, 4), virtual=VIRTUAL, costs=st.tuples(COST, COST, COST))
def test_gis(ranks: int, times: int, virtual: int, costs: tuple[int, int, int]) -> None:
    microbatches = ranks * times
    result = run("gis", ranks, microbatches, virtual, costs)
    bubble = (ranks - 1) * (costs[0] + costs[1])
    assert result.makespan == microbatches * virtual * sum(costs) + bubble
    assert result.peak_in_flight == tuple(
        min(virtual * microbatches, ranks * virtual - rank) for rank in range(ranks)
    )


@pytest.mark.parametrize("name", ["po-h", "po-f"])
@settings(deadline=None, max_examples=80)
@given(ranks=st.integers(1, 12), microbatches=st.integers(1, 30), virtual=VIRTUAL)
def test_offloaded_activations_do_not_count(
    name: str, ranks: int, microbatches: int, virtual: int
) -> None:
    result = run(name, ranks, microbatches, virtual, (1, 1, 1))
    bubble = result.makespan - 3 * microbatches * virtual
    assert bubble < 3 * virtual * (ranks - 1) or ranks == 1
    assert bubble <= (2 * ranks * virtual if ranks > 1 else 0) or microbatches < ranks
    if name == "po-f" and microbatches % ranks == 0:
        assert bubble == 2 * (ranks - 1)
    stay = (virtual + 2) * ranks / 8 if name == "po-h" else 0
    assert max(result.peak_in_flight) <= stay + 4


@settings(deadline=None, max_examples=150)
@given(
    ranks=RANKS,
    more=st.integers(0, 4),
    times=st.integers(1, 6),
    virtual=VIRTUAL,
    costs=st.tuples(COST, COST, COST),
)
def test_groups_of_half_the_ranks_and_more(
    ranks: int, more: int, times: int, virtual: int, costs: tuple[int, int, int]
) -> None:
    """For any costs but those of which one is larger than what the others leave room for."""
    forward, input_grad, weight_grad = costs
    half = -(-ranks // 2)
    group = min(half + more, ranks)
    assume(ranks * max(forward, input_grad) <= group * sum(costs))
    assume(weight_grad <= forward + input_grad)
    microbatches = group * times
    result = simulate(
        build("gis-h", ranks=ranks, microbatches=microbatches, virtual=virtual, group=group),
        Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad),
    )
    less = ranks - group
    turn = less * forward + max(0, less * input_grad - group * weight_grad)
    bubble = (ranks - 1) * (forward + input_grad) + (virtual - 1) * turn
    assert result.makespan == microbatches * virtual * sum(costs) + bubble
    published = less * (forward + input_grad - weight_grad)
    if 2 * group == ranks and input_grad >= weight_grad:
        assert turn == published
    assert turn <= max(published, less * forward)
    assert result.peak_in_flight == tuple(
        min(virtual * microbatches, group * (virtual - 1) + ranks - rank) for rank in range(ranks)
    )


@settings(deadline=None, max_examples=40)
@given(ranks=MANY, more=MORE, cost=st.integers(1, 3))
def test_v_zb_has_no_bubble_in_its_span(ranks: int, more: int, cost: int) -> None:
    microbatches = 2 * ranks + more
    result = run("v-zb", ranks, microbatches, 2, (cost, cost, cost))
    assert result.span == 6 * microbatches * cost
    assert result.makespan == (6 * microbatches + ranks - 1) * cost
    assert result.peak_in_flight == (2 * ranks,) * ranks


@settings(deadline=None, max_examples=40)
@given(ranks=MANY, more=MORE)
def test_v_half(ranks: int, more: int) -> None:
    microbatches = ranks + more
    result = run("v-half", ranks, microbatches, 2, (1, 1, 1))
    bubble = 6 * ((ranks - 1) // 2) - 1 if ranks > 2 else 1
    assert result.makespan == 6 * microbatches + bubble
    assert bubble <= 0.5 * 6 * (ranks - 1)
    assert max(result.peak_in_flight) == 2 * ((ranks + 2) // 2)


@settings(deadline=None, max_examples=40)
@given(ranks=MANY, more=MORE)
def test_v_min(ranks: int, more: int) -> None:
    microbatches = ranks + more
    result = run("v-min", ranks, microbatches, 2, (1, 1, 1))
    bubble = result.makespan - 6 * microbatches
    most = 4 * ranks - 5 if ranks % 3 == 1 else 4 * ranks - 7
    assert bubble <= most < 2 / 3 * 6 * (ranks - 1)
    assert max(result.peak_in_flight) <= 2 * ((ranks + 4) // 3)


@settings(deadline=None, max_examples=40)
@given(ranks=MANY, more=MORE)
def test_1f1b_v(ranks: int, more: int) -> None:
    """Faster than 1F1B, whose bubble is 6(P - 1) chunks, in two thirds of its memory.

    Where 3 divides P, the memory comes before the time.
    """
    microbatches = ranks + more
    result = run("1f1b-v", ranks, microbatches, 2, (1, 1, 1))
    if ranks % 3:
        assert result.makespan == 6 * microbatches + 5 * (ranks - 1) - (ranks % 3 == 2)
    assert max(result.peak_in_flight) <= 2 * ((2 * ranks + 2) // 3)


@pytest.mark.parametrize(("microbatches", "least"), [(4, 13), (5, 14), (6, 15)])
def test_no_order_of_1f1b_v_does_without_waiting_where_3_divides_the_ranks(
    microbatches: int, least: int
) -> None:
    """Searched exactly for P = 3: the bubble grows with the microbatches."""
    placement = v_shape(3)
    model = cp_model.CpModel()
    built = simulate(build("1f1b-v", ranks=3, microbatches=microbatches))
    horizon = int(built.makespan)
    busy: list[list[cp_model.IntervalVar]] = [[], [], []]
    held: list[list[cp_model.IntervalVar]] = [[], [], []]
    makespan = model.new_int_var(0, horizon, "")
    forwards: dict[tuple[int, int], cp_model.IntVar] = {}
    for microbatch in range(microbatches):
        done: cp_model.LinearExprT = 0
        for stage in (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0):
            rank, start = placement.rank_of(stage), model.new_int_var(0, horizon, "")
            model.add(start >= done)
            first = forwards.setdefault((stage, microbatch), start)
            length = 1 if first is start else 2
            done = start + length
            busy[rank].append(model.new_fixed_size_interval_var(start, length, ""))
            if first is not start:
                lived = model.new_int_var(0, horizon, "")
                held[rank].append(model.new_interval_var(first, lived, done, ""))
        model.add(makespan >= done)
    for rank in range(3):
        model.add_no_overlap(busy[rank])
        model.add_cumulative(held[rank], [1] * len(held[rank]), 4)
    # Microbatches are alike.
    for microbatch in range(1, microbatches):
        model.add(forwards[0, microbatch - 1] < forwards[0, microbatch])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    assert solver.solve(model) == cp_model.OPTIMAL
    assert solver.objective_value - 6 * microbatches == least
    assert built.makespan - 6 * microbatches >= least


@settings(deadline=None, max_examples=40)
@given(ranks=st.integers(2, 8), times=st.integers(1, 4), waves=st.integers(1, 3))
def test_hanayo_has_one_bubble_for_any_number_of_waves(ranks: int, times: int, waves: int) -> None:
    microbatches = ranks * times
    result = run("hanayo", ranks, microbatches, 2 * waves, (1, 1, 1))
    bubble = 4 * (ranks - 1) + (times - 1) * (2 * ranks - 3)
    assert result.makespan == 6 * waves * microbatches + bubble
    assert max(result.peak_in_flight) <= 2 * waves * ranks


@pytest.mark.parametrize("name", ["v-zb", "v-half", "v-min", "1f1b-v"])
def test_messages_turn_without_one(name: str) -> None:
    assert run(name, 5, 7, 2, (1, 1, 1)).messages == 2 * 7 * 2 * (5 - 1)
