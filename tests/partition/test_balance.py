"""Balancing: the solver against every split there is, and what it says where there is none."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock import PartitionError
from penstock.partition.balance import shared_ranks
from penstock.partition.balance.balance import Balance, balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.schedule.placement import Placement, bidirectional, linear, looped, v_shape, wave
from tests.pace import slowness


def splits(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut a chain, as counts."""
    for cuts in combinations(range(1, num_blocks), num_stages - 1):
        ends = (0, *cuts, num_blocks)
        yield tuple(j - i for i, j in pairwise(ends))


def groups(blocks: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """The blocks of each stage."""
    ends = [sum(counts[:s]) for s in range(len(counts) + 1)]
    return [blocks[i:j] for i, j in pairwise(ends)]


def stage_times(
    blocks: Sequence[BlockCosts], counts: Sequence[int], bandwidth: float | None, latency_s: float
) -> list[float]:
    """What each stage takes, reckoned from the blocks one by one."""
    stages = groups(blocks, counts)
    times = [sum(block.time_s for block in stage) for stage in stages]
    for s, crossing in enumerate(crossings(stages, bandwidth, latency_s)):
        times[s] += crossing
        times[s + 1] += crossing
    return times


def crossings(
    stages: Sequence[Sequence[BlockCosts]], bandwidth: float | None, latency_s: float
) -> list[float]:
    """What each cut takes, both ways."""
    return [
        2 * (latency_s + (stage[-1].sent_bytes / bandwidth if bandwidth else 0))
        for stage in stages[:-1]
    ]


def held(
    blocks: Sequence[BlockCosts], counts: Sequence[int], flights: Sequence[int], factor: float
) -> list[float]:
    """What each stage holds."""
    return [
        sum(factor * b.parameter_bytes + flight * b.activation_bytes for b in stage)
        for stage, flight in zip(groups(blocks, counts), flights, strict=True)
    ]


# Whole numbers, so that sums are exact in whatever order; bandwidths are powers of two.
whole = st.integers(0, 12)
chains = st.lists(
    st.builds(
        BlockCosts,
        forward_s=whole,
        input_grad_s=whole,
        weight_grad_s=st.integers(0, 3),
        parameter_bytes=whole,
        activation_bytes=whole,
        sent_bytes=whole,
    ),
    min_size=1,
    max_size=9,
)


@given(chains, st.data())
def test_no_split_is_faster_or_more_even(blocks: list[BlockCosts], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    bandwidth = data.draw(st.sampled_from([None, 0.5, 1, 4]))
    latency_s = data.draw(st.sampled_from([0, 1, 3]))
    found = balance(blocks, num_stages, bandwidth=bandwidth, latency_s=latency_s)

    def value(counts: Sequence[int]) -> tuple[float, float]:
        times = stage_times(blocks, counts, bandwidth, latency_s)
        return max(times), sum(time**2 for time in times)

    assert value(found.counts) == min(map(value, splits(len(blocks), num_stages)))
    assert list(found.time_s) == stage_times(blocks, found.counts, bandwidth, latency_s)
    assert found.bottleneck_s == max(found.time_s)


@given(chains, st.data())
def test_no_split_within_the_memory_is_faster(
    blocks: list[BlockCosts], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    flights = data.draw(st.lists(st.integers(0, 5), min_size=num_stages, max_size=num_stages))
    factor = data.draw(st.sampled_from([1, 2, 4]))
    limits = data.draw(
        st.one_of(
            st.integers(1, 200),
            st.lists(st.integers(1, 200), min_size=num_stages, max_size=num_stages),
        )
    )
    each = limits if isinstance(limits, list) else [limits] * num_stages
    fitting = [
        counts
        for counts in splits(len(blocks), num_stages)
        if all(h <= m for h, m in zip(held(blocks, counts, flights, factor), each, strict=True))
    ]

    def solve(limit: Any) -> Balance:
        return balance(
            blocks, num_stages, limit, in_flight=flights, state_factor=factor, bandwidth=1
        )

    if not fitting:
        with pytest.raises(PartitionError, match="the least that works is") as raised:
            solve(limits)
        if isinstance(limits, int):
            # What the message says works, and a byte less does not.
            least = int(str(raised.value).split("the least that works is ")[1].split(";")[0])
            assert solve(least)
            with pytest.raises(PartitionError, match="the least that works"):
                solve(least - 1)
        return
    found = solve(limits)
    assert found.counts in fitting
    assert list(found.held_bytes) == held(blocks, found.counts, flights, factor)
    fastest = min(max(stage_times(blocks, counts, 1, 0)) for counts in fitting)
    assert found.bottleneck_s == fastest


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=10), st.data())
def test_any_numbers_will_do(times: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(times)))
    found = balance(times, num_stages)
    best = min(
        max(math.fsum(stage) for stage in groups(times, counts))
        for counts in splits(len(times), num_stages)
    )
    assert found.bottleneck_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(7, 3), (8, 3), (9, 3), (30, 7), (5, 5)])
def test_equal_blocks_are_dealt_out_evenly_the_first_stages_first(
    num_blocks: int, num_stages: int
) -> None:
    whole, rest = divmod(num_blocks, num_stages)
    even = tuple(whole + (stage < rest) for stage in range(num_stages))
    assert balance([1.0] * num_blocks, num_stages).counts == even


def test_a_transfer_moves_a_cut() -> None:
    """5 │ 5   is even, but 100 bytes cross there, and 1 byte a block later."""
    blocks = [
        BlockCosts(forward_s=3, sent_bytes=1),
        BlockCosts(forward_s=2, sent_bytes=100),
        BlockCosts(forward_s=1, sent_bytes=1),
        BlockCosts(forward_s=4),
    ]
    assert balance(blocks, 2).counts == (2, 2)
    assert balance(blocks, 2, bandwidth=10).counts == (3, 1)


def test_the_first_stages_hold_more_in_flight() -> None:
    """1F1B: of equal blocks the first stage can keep fewest."""
    blocks = [BlockCosts(forward_s=1, activation_bytes=1)] * 12
    assert balance(blocks, 3).counts == (4, 4, 4)
    found = balance(blocks, 3, 9)
    assert found.counts == (3, 4, 5)
    assert found.held_bytes == (9, 8, 5)
    # With one microbatch there is nothing to hold more of.
    assert balance(blocks, 3, 4, microbatches=1).counts == (4, 4, 4)


# --- ranks of several stages -------------------------------------------------------------------


def rank_loads(
    blocks: Sequence[BlockCosts], counts: Sequence[int], placement: Placement, bandwidth: float
) -> list[float]:
    """What each rank does for a microbatch, copy by copy and stage by stage."""
    stages = groups(blocks, counts)
    loads = [0.0] * placement.num_ranks
    for stage, rank in enumerate(placement.stage_ranks):
        mine = stages[placement.model_stage(stage)]
        loads[rank] += sum(block.time_s for block in mine)
        after = placement.neighbour(stage, +1)
        if after is not None and placement.rank_of(after) != rank:
            crossing = 2 * mine[-1].sent_bytes / bandwidth
            loads[rank] += crossing
            loads[placement.rank_of(after)] += crossing
    return [load / placement.num_directions for load in loads]


placements = st.sampled_from(
    [
        *(linear(3), looped(2, 2), looped(3, 2), looped(2, 3), v_shape(2), v_shape(3)),
        *(wave(1, 2), wave(2, 2), bidirectional(2), bidirectional(3)),
    ]
)


@settings(max_examples=20)
@given(chains, placements, st.sampled_from([1, 4]), st.data())
def test_no_split_has_a_less_busy_rank(
    blocks: list[BlockCosts], placement: Placement, bandwidth: float, data: st.DataObject
) -> None:
    num_stages = placement.num_model_stages
    assume(len(blocks) >= num_stages)
    found = balance(blocks, num_stages, placement=placement, bandwidth=bandwidth)
    assert found.is_proven
    best = min(
        max(rank_loads(blocks, counts, placement, bandwidth))
        for counts in splits(len(blocks), num_stages)
    )
    assert found.bottleneck_s == pytest.approx(best, rel=1e-9)
    loads = rank_loads(blocks, found.counts, placement, bandwidth)
    assert list(found.rank_time_s) == pytest.approx(loads, rel=1e-9)


@settings(max_examples=20)
@given(chains, placements, st.integers(1, 200), st.data())
def test_no_split_within_the_ranks_memory_has_a_less_busy_rank(
    blocks: list[BlockCosts], placement: Placement, limit: int, data: st.DataObject
) -> None:
    num_stages = placement.num_model_stages
    assume(len(blocks) >= num_stages)
    flights = data.draw(st.lists(st.integers(0, 5), min_size=num_stages, max_size=num_stages))

    def fits(counts: Sequence[int]) -> bool:
        each = held(blocks, counts, flights, 2)
        return all(
            sum(each[placement.model_stage(stage)] for stage in placement.stages_of(rank)) <= limit
            for rank in range(placement.num_ranks)
        )

    def solve(limit: int) -> Balance:
        return balance(
            blocks, num_stages, limit, placement=placement, in_flight=flights, state_factor=2
        )

    fitting = list(filter(fits, splits(len(blocks), num_stages)))
    if not fitting:
        with pytest.raises(PartitionError, match="keeps to memory_limit") as raised:
            solve(limit)
        told = str(raised.value).split("; ")[1]
        assert solve(int(told.split(" is ")[1])).counts  # what the message says works
        return
    found = solve(limit)
    assert found.counts in fitting
    best = min(max(rank_loads(blocks, counts, placement, 1e300)) for counts in fitting)
    assert found.bottleneck_s == pytest.approx(best, rel=1e-9)


def test_a_rank_with_a_heavy_stage_gets_a_light_one_too() -> None:
    """Stage by stage the head's rank would do 14 of 18; over both it does half of all.

    V-shape   rank 0   stages 0 and 3      rank 1   stages 1 and 2
    """
    blocks = [1.0] * 11 + [7.0]
    alone = balance(blocks, 4)
    assert alone.counts == (4, 4, 3, 1)
    together = balance(blocks, 4, placement=v_shape(2))
    assert together.rank_time_s == (9, 9)
    assert together.bottleneck_s == 9 < alone.time_s[0] + alone.time_s[3]


def test_within_a_rank_a_cut_costs_nothing() -> None:
    """At the turn of a V both stages lie on one rank: the dear cut goes there."""
    blocks = [BlockCosts(forward_s=1 + (i == 3), sent_bytes=9 if i == 2 else 1) for i in range(6)]
    found = balance(blocks, 4, placement=v_shape(2), bandwidth=1)
    assert found.counts[0] + found.counts[1] == 3
    assert found.time_s[1] + found.time_s[2] == found.rank_time_s[1]


def layered(seed: int, num_blocks: int) -> list[float]:
    """Embedding, layers that differ by the noise of a measurement, a head of some layers."""
    draw = random.Random(seed)
    layers = [draw.uniform(95, 105) for _ in range(num_blocks - 2)]
    return [draw.uniform(1, 50), *layers, draw.uniform(50, 600)]


@pytest.mark.parametrize("placement", [looped(4, 2), v_shape(4)], ids=["looped", "v-shape"])
def test_34_blocks_on_4_ranks_are_proven(placement: Placement) -> None:
    found = balance(layered(1, 34), 8, placement=placement)
    assert found.is_proven
    assert found.bottleneck_s <= 1.05 * sum(found.rank_time_s) / 4


@pytest.mark.parametrize("placement", [looped(3, 2), looped(2, 3), v_shape(3), wave(2, 2)], ids=str)
def test_without_a_proof_it_is_within_2_percent(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_ranks, "PROVING", 0)
    num_stages = placement.num_stages
    for seed in range(4):
        blocks = layered(seed, num_stages + 5 + seed % 3)
        found = balance(blocks, num_stages, placement=placement)
        assert not found.is_proven
        costs = [BlockCosts(forward_s=time_s) for time_s in blocks]
        best = min(
            max(rank_loads(costs, counts, placement, 1))
            for counts in splits(len(blocks), num_stages)
        )
        assert found.bottleneck_s <= 1.02 * best


def test_the_placement_is_one_of_these_stages() -> None:
    with pytest.raises(PartitionError, match="placement is one of 4 stages, but num_stages is 3"):
        balance([1] * 8, 3, placement=v_shape(2))
    with pytest.raises(PartitionError, match="3 numbers for 2 ranks; give one per rank"):
        balance([1] * 8, 4, [1, 2, 3], placement=v_shape(2))


# --- speed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [looped(64, 2), v_shape(64)], ids=["looped", "v-shape"])
def test_200_blocks_into_128_stages_of_64_ranks_within_a_second(placement: Placement) -> None:
    took = []
    for _ in range(2):
        start = time.process_time()
        found = balance(layered(0, 200), 128, placement=placement, latency_s=1)
        took.append(time.process_time() - start)
    assert sum(found.counts) == 200
    assert min(took) < slowness()


@pytest.mark.parametrize("head", [1, 300])
def test_200_blocks_into_128_stages_within_a_second(head: float) -> None:
    """With one block above all others every other stage has the widest choice: the worst case."""
    blocks = [
        BlockCosts(
            forward_s=1 + (i * 7919 % 101) / 100,
            parameter_bytes=i * 31 % 17,
            activation_bytes=1,
            sent_bytes=i * 13 % 5,
        )
        for i in range(199)
    ]
    blocks.append(BlockCosts(forward_s=head))
    took = []
    for _ in range(3):
        start = time.process_time()
        found = balance(blocks, 128, 300, bandwidth=100)
        took.append(time.process_time() - start)
    assert sum(found.counts) == 200
    assert min(took) < slowness()


# --- what can't be -----------------------------------------------------------------------------


def test_the_smallest_feasible_memory_limit_is_named() -> None:
    blocks = [BlockCosts(forward_s=1, parameter_bytes=10, activation_bytes=2)] * 4
    with pytest.raises(PartitionError) as raised:
        balance(blocks, 2, 25)
    assert str(raised.value) == (
        "no split of 4 blocks into 2 stages keeps to memory_limit=25 bytes with [2, 1] "
        "microbatches in flight; the least that works is 28; or make more stages, or smaller "
        "microbatches, or recompute activations"
    )
    assert balance(blocks, 2, 28).held_bytes == (28, 24)


def test_limits_per_stage_grow_alike() -> None:
    blocks = [BlockCosts(forward_s=1, parameter_bytes=10)] * 4
    with pytest.raises(PartitionError, match=r"least that works is \[30, 15\]"):
        balance(blocks, 2, [20, 10])
    assert balance(blocks, 2, [30, 15]).counts == (3, 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_stages": 4}, "3 blocks can't make 4 stages.*the most that works is num_stages=3"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"memory_limit": 0}, "memory_limit is 0"),
        ({"memory_limit": [1, 2, 3]}, "3 numbers for 2 stages"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"microbatches": 0}, "microbatches is 0, expected at least 1"),
        ({"bandwidth": 0}, "bandwidth is 0"),
        ({"latency_s": -1}, "latency_s is -1"),
        ({"state_factor": float("inf")}, "state_factor is inf"),
        ({"in_flight": [1]}, "in_flight is"),
        ({"costs": [1, -1, 1]}, "forward_s of block 1 is -1"),
        ({"costs": [1, float("nan"), 1]}, "forward_s of block 1 is nan"),
        ({"costs": [1, "2", 1]}, "forward_s of block 1 is '2'"),
    ],
)
def test_invalid_terms(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        balance(**({"costs": [1, 1, 1], "num_stages": 2} | given))


# --- profiles as data ---------------------------------------------------------------------------


def test_a_profile_is_balanced_and_makes_a_plan() -> None:
    blocks = [BlockCosts(modules=(f"layers.{i}",), forward_s=i) for i in range(1, 5)]
    profile = Profile(blocks=tuple(blocks), model="Stack")
    plan = profile.plan(balance(profile, 2).counts, made="balance")
    assert plan.stages == (("layers.1", "layers.2", "layers.3"), ("layers.4",))
    assert (plan.model, plan.made) == ("Stack", "balance")
    with pytest.raises(PartitionError, match="expected 4, at least one per stage"):
        profile.plan([4, 0])


def test_the_solver_needs_no_torch() -> None:
    code = (
        "import sys; from penstock.partition.balance.balance import balance; balance([1, 2], 2); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
