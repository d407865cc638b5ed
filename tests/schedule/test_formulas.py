"""The published formulas of bubble and peak memory, at many P, V, M and costs where they hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.registry import build
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import Simulation, simulate

# Whole numbers, so that simulated times are exact.
COST = st.integers(0, 9)
RANKS = st.integers(1, 9)
VIRTUAL = st.integers(1, 4)
MORE = st.integers(0, 20)


def run(
    name: str, ranks: int, microbatches: int, virtual: int, costs: tuple[int, int, int]
) -> Simulation:
    forward, input_grad, weight_grad = costs
    return simulate(
        build(name, ranks=ranks, microbatches=microbatches, virtual=virtual),
        Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad),
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@settings(deadline=None, max_examples=80)
@given(ranks=RANKS, microbatches=st.integers(1, 25), costs=st.tuples(COST, COST, COST))
def test_linear_families_for_any_microbatches_and_costs(
    name: str, ranks: int, microbatches: int, costs: tuple[int, int, int]
) -> None:
    result = run(name, ranks, microbatches, 1, costs)
    assert result.makespan == (microbatches + ranks - 1) * sum(costs)
    assert result.peak_in_flight == tuple(
        microbatches if name == "gpipe" else min(microbatches, ranks - rank)
        for rank in range(ranks)
    )


@settings(deadline=None, max_examples=80)
@given(
    ranks=RANKS,
    microbatches=st.integers(1, 12),
    splits=st.integers(2, 5),
    costs=st.tuples(COST, COST, COST),
)
def test_split_sequences_for_any_microbatches_and_costs(
    ranks: int, microbatches: int, splits: int, costs: tuple[int, int, int]
) -> None:
    forward, input_grad, weight_grad = costs
    result = simulate(
        build("seq1f1b", ranks=ranks, microbatches=microbatches, splits=splits),
        Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad),
    )
    # A chunk costs so much: of whole microbatches, the bubble is (P - 1) T / k.
    assert result.makespan == (microbatches * splits + ranks - 1) * sum(costs)
    assert result.peak_in_flight == tuple(
        min(microbatches * splits, ranks - rank + splits - 1) for rank in range(ranks)
    )


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@settings(deadline=None, max_examples=80)
@given(ranks=RANKS, more=MORE, virtual=VIRTUAL, costs=st.tuples(COST, COST, COST))
def test_looped_families_for_any_costs(
    name: str, ranks: int, more: int, virtual: int, costs: tuple[int, int, int]
) -> None:
    microbatches = ranks + more
    result = run(name, ranks, microbatches, virtual, costs)
    assert result.makespan == (microbatches * virtual + ranks - 1) * sum(costs)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@settings(deadline=None, max_examples=40)
@given(ranks=st.integers(2, 9), less=st.integers(1, 8), virtual=VIRTUAL)
def test_looped_families_where_the_loop_is_not_full(
    name: str, ranks: int, less: int, virtual: int
) -> None:
    microbatches = max(1, ranks - less)
    bubble = ranks - 1 + (virtual - 1) * (ranks - microbatches)
    result = run(name, ranks, microbatches, virtual, (1, 1, 1))
    assert result.makespan == (microbatches * virtual + bubble) * 3
    forwards = run("forward-only", ranks, microbatches, virtual, (1, 1, 1))
    assert forwards.makespan == microbatches * virtual + bubble


@settings(deadline=None, max_examples=40)
@given(ranks=RANKS, more=MORE, virtual=VIRTUAL)
def test_forwards_alone(ranks: int, more: int, virtual: int) -> None:
    microbatches = ranks + more
    result = run("forward-only", ranks, microbatches, virtual, (2, 7, 7))
    assert result.makespan == (microbatches * virtual + ranks - 1) * 2
    assert result.peak_in_flight == (1,) * ranks


@settings(deadline=None, max_examples=40)
@given(ranks=RANKS, times=st.integers(1, 4), virtual=VIRTUAL)
def test_peaks_of_looped_families_where_ranks_divide_microbatches(
    ranks: int, times: int, virtual: int
) -> None:
    microbatches = ranks * times
    most = microbatches * virtual
    interleaved = run("interleaved-1f1b", ranks, microbatches, virtual, (1, 1, 1))
    assert interleaved.peak_in_flight == tuple(
        min(most, (virtual - 1) * ranks + 2 * (ranks - rank - 1) + 1) for rank in range(ranks)
    )
    breadth_first = run("looped-bfs", ranks, microbatches, virtual, (1, 1, 1))
    assert breadth_first.peak_in_flight == (most,) * ranks
    split = run("interleaved-zb", ranks, microbatches, virtual, (1, 1, 1))
    assert split.peak_in_flight == (ranks * virtual,) * ranks


@settings(deadline=None, max_examples=80)
@given(ranks=RANKS, more=MORE, virtual=VIRTUAL)
def test_interleaved_zero_bubble_with_equal_costs(ranks: int, more: int, virtual: int) -> None:
    microbatches = ranks + more
    result = run("interleaved-zb", ranks, microbatches, virtual, (1, 1, 1))
    assert result.makespan == 3 * microbatches * virtual + ranks - 1


@settings(deadline=None, max_examples=80)
@given(
    ranks=RANKS,
    more=MORE,
    virtual=VIRTUAL,
    forward=st.integers(1, 9),
    input_grad=st.integers(1, 9),
    weight_grad=COST,
)
def test_interleaved_zero_bubble_where_weight_gradients_are_cheapest(
    ranks: int, more: int, virtual: int, forward: int, input_grad: int, weight_grad: int
) -> None:
    microbatches = 2 * ranks + more
    weight_grad = min(forward, input_grad, weight_grad)
    costs = (forward, input_grad, weight_grad)
    result = run("interleaved-zb", ranks, microbatches, virtual, costs)
    bubble = (ranks - 1) * (forward + input_grad - weight_grad)
    assert result.makespan == microbatches * virtual * sum(costs) + bubble


@settings(deadline=None, max_examples=40)
@given(ranks=RANKS, more=MORE, cost=st.integers(1, 5))
def test_zbv_has_no_bubble_in_its_span(ranks: int, more: int, cost: int) -> None:
    microbatches = 2 * ranks + more
    result = run("zbv", ranks, microbatches, 2, (cost, cost, cost))
    assert result.span == 6 * microbatches * cost
    assert result.makespan == (6 * microbatches + ranks - 1) * cost
    assert result.peak_in_flight == (2 * ranks,) * ranks


@settings(deadline=None, max_examples=60)
@given(ranks=RANKS, more=MORE, compute=st.integers(1, 5), weight_grad=COST)
def test_dualpipev_with_blocks_in_turn(
    ranks: int, more: int, compute: int, weight_grad: int
) -> None:
    """tF = tB ≥ tW, and a pair as long as its parts."""
    microbatches = 2 * ranks + more
    weight_grad = min(compute, weight_grad)
    result = run("dualpipev", ranks, microbatches, 2, (compute, compute, weight_grad))
    pair, backward = 2 * compute + weight_grad, compute + weight_grad
    bubble = (ranks - 1) * (pair + backward - 3 * weight_grad)
    assert result.makespan == 2 * microbatches * pair + bubble
    assert result.peak_in_flight == (min(2 * ranks + 1, 2 * microbatches),) * ranks


@settings(deadline=None, max_examples=60)
@given(half=st.integers(1, 6), more=MORE, compute=st.integers(1, 5), weight_grad=COST)
def test_dualpipe_with_blocks_in_turn(half: int, more: int, compute: int, weight_grad: int) -> None:
    """tF = tB ≥ tW, and a pair as long as its parts."""
    ranks, microbatches = 2 * half, 4 * half + 2 * more
    weight_grad = min(compute, weight_grad)
    result = run("dualpipe", ranks, microbatches, 1, (compute, compute, weight_grad))
    pair, backward = 2 * compute + weight_grad, compute + weight_grad
    bubble = (half - 1) * (pair + backward - 3 * weight_grad)
    assert result.makespan == microbatches * pair + bubble
    assert result.peak_in_flight == (ranks + 1,) * ranks


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@settings(deadline=None, max_examples=40)
@given(
    half=st.integers(1, 4),
    more=st.integers(0, 6),
    compute=st.integers(1, 5),
    weight_grad=COST,
    overlap=st.integers(1, 30),
)
def test_blocks_that_overlap_leave_no_more_waiting(
    name: str, half: int, more: int, compute: int, weight_grad: int, overlap: int
) -> None:
    """Of pairs that take less than their parts in turn the formula is a bound alone."""
    ranks, weight_grad = 2 * half, min(compute, weight_grad)
    backward = compute + weight_grad
    pair = max(backward, overlap)
    costs = Costs(forward=compute, input_grad=compute, weight_grad=weight_grad, overlap=pair)
    result = simulate(build(name, ranks=ranks, microbatches=2 * (ranks + more)), costs)
    waiting = result.makespan - max(result.busy_per_rank)
    formula = ((half if name == "dualpipe" else ranks) - 1) * (pair + backward - 3 * weight_grad)
    assert waiting <= formula
    if pair >= compute + backward:
        assert waiting == formula


@settings(deadline=None, max_examples=60)
@given(half=st.integers(1, 8), costs=st.tuples(COST, COST, COST))
def test_chimera_with_as_many_microbatches_as_ranks(half: int, costs: tuple[int, int, int]) -> None:
    ranks = 2 * half
    result = run("chimera", ranks, ranks, 1, costs)
    forward, input_grad, weight_grad = costs
    bubble = (ranks - 2) * max(forward, input_grad + weight_grad)
    assert result.makespan == ranks * sum(costs) + bubble
    # From P/2 + 1 on the outermost ranks to P on those in the middle.
    assert result.peak_in_flight == tuple(
        half + 1 + min(rank, ranks - 1 - rank) for rank in range(ranks)
    )


@settings(deadline=None, max_examples=40)
@given(ranks=RANKS, microbatches=st.integers(1, 25), virtual=VIRTUAL)
def test_messages(ranks: int, microbatches: int, virtual: int) -> None:
    looped = run("interleaved-zb", ranks, microbatches, virtual, (1, 1, 1))
    crossings = ranks * virtual - 1 if ranks > 1 else 0
    assert looped.messages == 2 * microbatches * crossings
    assert run("zbv", ranks, microbatches, 2, (1, 1, 1)).messages == (
        2 * microbatches * 2 * (ranks - 1)
    )
