"""Balancing: the solver against every split there is, and what it says where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import PartitionError
from penstock.partition.balance.balance import Balance, balance
from penstock.partition.balance.costs import BlockCosts, Profile
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


def stage_times(blocks: Sequence[BlockCosts], counts: Sequence[int]) -> list[float]:
    """What each stage takes, reckoned from the blocks one by one."""
    return [sum(block.time_s for block in stage) for stage in groups(blocks, counts)]


def held(
    blocks: Sequence[BlockCosts], counts: Sequence[int], flights: Sequence[int], factor: float
) -> list[float]:
    """What each stage holds."""
    return [
        sum(
            factor * (b.parameter_bytes - b.frozen_bytes)
            + b.frozen_bytes
            + flight * b.activation_bytes
            for b in stage
        )
        for stage, flight in zip(groups(blocks, counts), flights, strict=True)
    ]


def partly_frozen(trained: int, frozen: int, **costs: Any) -> BlockCosts:
    return BlockCosts(parameter_bytes=trained + frozen, frozen_bytes=frozen, **costs)


# Whole numbers, so that sums are exact in whatever order.
whole = st.integers(0, 12)
chains = st.lists(
    st.builds(
        partly_frozen,
        trained=whole,
        frozen=whole,
        forward_s=whole,
        input_grad_s=whole,
        weight_grad_s=st.integers(0, 3),
        activation_bytes=whole,
    ),
    min_size=1,
    max_size=9,
)


@given(chains, st.data())
def test_no_split_is_faster_or_more_even(blocks: list[BlockCosts], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    found = balance(blocks, num_stages)

    def value(counts: Sequence[int]) -> tuple[float, float]:
        times = stage_times(blocks, counts)
        return max(times), sum(time**2 for time in times)

    assert value(found.counts) == min(map(value, splits(len(blocks), num_stages)))
    assert list(found.time_s) == stage_times(blocks, found.counts)
    assert found.bottleneck_s == max(found.time_s)


@given(chains, st.data())
def test_no_split_within_the_memory_is_faster(
    blocks: list[BlockCosts], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    flights = data.draw(st.lists(st.integers(0, 5), min_size=num_stages, max_size=num_stages))
    factor = data.draw(st.sampled_from([1, 2, 4]))
    limit = data.draw(st.integers(1, 200))
    fitting = [
        counts
        for counts in splits(len(blocks), num_stages)
        if max(held(blocks, counts, flights, factor)) <= limit
    ]

    def solve(limit: int) -> Balance:
        return balance(blocks, num_stages, limit, in_flight=flights, state_factor=factor)

    if not fitting:
        with pytest.raises(PartitionError, match="the least that works is") as raised:
            solve(limit)
        # What the message says works, and a byte less does not.
        least = int(str(raised.value).split("the least that works is ")[1].split(";")[0])
        assert solve(least)
        with pytest.raises(PartitionError, match="the least that works"):
            solve(least - 1)
        return
    found = solve(limit)
    assert found.counts in fitting
    assert list(found.held_bytes) == held(blocks, found.counts, flights, factor)
    assert found.bottleneck_s == min(max(stage_times(blocks, counts)) for counts in fitting)


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


def test_the_first_stages_hold_more_in_flight() -> None:
    """1F1B: of equal blocks the first stage can keep fewest."""
    blocks = [BlockCosts(forward_s=1, activation_bytes=1)] * 12
    assert balance(blocks, 3).counts == (4, 4, 4)
    found = balance(blocks, 3, 9)
    assert found.counts == (3, 4, 5)
    assert found.held_bytes == (9, 8, 5)
    assert balance(blocks, 3, 9, in_flight=[1, 1, 1]).counts == (4, 4, 4)


# --- speed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [1, 300])
def test_200_blocks_into_128_stages_within_a_second(head: float) -> None:
    """With one block above all others every other stage has the widest choice: the worst case."""
    blocks = [
        BlockCosts(
            forward_s=1 + (i * 7919 % 101) / 100,
            parameter_bytes=i * 31 % 17,
            activation_bytes=1,
        )
        for i in range(199)
    ]
    blocks.append(BlockCosts(forward_s=head))
    took = []
    for _ in range(3):
        start = time.process_time()
        found = balance(blocks, 128, 300)
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_stages": 4}, "3 blocks can't make 4 stages: expected 1 to 3"),
        ({"num_stages": 0}, "can't make 0 stages"),
        ({"memory_limit": 0}, "memory_limit=0"),
        ({"memory_limit": float("nan")}, "memory_limit=nan"),
        ({"state_factor": float("inf")}, "state_factor=inf"),
        ({"in_flight": [1]}, "in_flight is"),
        ({"in_flight": [1, -1]}, "in_flight is"),
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
