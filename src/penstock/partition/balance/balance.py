"""The best split of a chain of blocks into stages, for given costs.

    chain.py           one stage on each rank: exact, by dynamic programming
    shared_ranks.py    several: local search, and enumeration within a budget

This module knows neither models nor devices, and imports no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.balance.chain import Chain, least_bottleneck, most_even
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.shared_ranks import SharedChain, best_split
from penstock.schedule.placement import Placement
from penstock.simulate.memory import held_bytes

__all__ = ["Balance", "BalanceConfig", "balance", "balanced", "split_costs"]

# Sums of the same numbers in another order differ in their last bits.
MORE = 1 + 1e-12
BlockTimes: TypeAlias = Profile | Sequence[BlockCosts] | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A split of blocks into stages, and its costs.

    Args:
        counts: the number of blocks per stage, in order.
        time_s: per stage its forward, backward and transfers of one microbatch.
        held_bytes: per stage its parameters and activations in flight.
        rank_time_s: per rank the time of its stages together, for one microbatch.
        is_proven: True if no split is better; always True with one stage on each rank.
    """

    counts: tuple[int, ...]
    time_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    rank_time_s: tuple[float, ...]
    is_proven: bool = True

    @property
    def bottleneck_s(self) -> float:
        """The time of the busiest rank."""
        return max(self.rank_time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """The constraints of a split: the arguments of ``balance``."""

    num_stages: int
    placement: Placement | None = None
    memory_limit: float | Sequence[float] | None = None
    in_flight: Sequence[int] | None = None
    state_factor: float = 1.0
    bandwidth: float | None = None
    latency_s: float = 0.0
    microbatches: int | None = None

    def __post_init__(self) -> None:
        num, placement, limit = self.num_stages, self.placement, self.memory_limit
        flights, per = self.in_flight, "rank" if self.shares_ranks else "stage"
        _require(num >= 1, f"num_stages is {num}, expected at least 1")
        is_fine = self.bandwidth is None or self.bandwidth > 0
        _require(is_fine, f"bandwidth is {self.bandwidth}, expected bytes per second > 0, or None")
        for name in ("latency_s", "state_factor"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name} is {value}, expected a number ≥ 0")
        is_fine = self.microbatches is None or self.microbatches >= 1
        _require(is_fine, f"microbatches is {self.microbatches}, expected at least 1")
        placed = num if placement is None else placement.num_model_stages
        _require(
            placed == num,
            f"the placement is one of {placed} stages, but num_stages is {num}",
        )
        given = len(limit) if isinstance(limit, Sequence) else self.num_ranks
        _require(
            given == self.num_ranks,
            f"memory_limit has {given} numbers for {self.num_ranks} {per}s; give one per {per}, or "
            "one for all",
        )
        is_fine = all(each > 0 for each in self.limits)
        _require(is_fine, f"memory_limit is {limit}, expected bytes > 0")
        is_fine = flights is None or (len(flights) == num and min(flights) >= 0)
        _require(is_fine, f"in_flight is {flights}, expected {num} numbers ≥ 0, one per stage")

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_stages if self.placement is None else self.placement.num_ranks

    @property
    def shares_ranks(self) -> bool:
        """True if a rank holds several stages."""
        placement = self.placement
        return placement is not None and placement.num_stages > placement.num_ranks

    @property
    def limits(self) -> tuple[float, ...]:
        """The memory limit of each rank, by stage if each stage has its own rank."""
        limit = math.inf if self.memory_limit is None else self.memory_limit
        limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * self.num_ranks
        if self.placement is None or self.shares_ranks:
            return limits
        return tuple(limits[rank] for rank in self.placement.stage_ranks)

    @property
    def stage_in_flight(self) -> tuple[int, ...]:
        """The microbatches in flight on each stage: 1F1B's by default."""
        if self.in_flight is not None:
            return tuple(self.in_flight)
        most = self.num_stages if self.microbatches is None else self.microbatches
        return tuple(min(self.num_stages - stage, most) for stage in range(self.num_stages))

    def held_bytes(self, costs: BlockCosts, in_flight: int) -> float:
        """The bytes held by a block."""
        resident = self.state_factor * costs.parameter_bytes
        return held_bytes(in_flight, activation=costs.activation_bytes, resident=resident)

    def crossing_s(self, sent_bytes: float) -> float:
        """The time to send activations forward, and their gradients back."""
        return 2 * (self.latency_s + (sent_bytes / self.bandwidth if self.bandwidth else 0.0))


def _require(fine: bool, message: str) -> None:
    if not fine:
        raise PartitionError(message)


def balance(
    costs: BlockTimes,
    num_stages: int,
    memory_limit: float | Sequence[float] | None = None,
    *,
    placement: Placement | None = None,
    in_flight: Sequence[int] | None = None,
    state_factor: float = 1.0,
    bandwidth: float | None = None,
    latency_s: float = 0.0,
    microbatches: int | None = None,
) -> Balance:
    """Find the split of a chain of blocks into stages whose busiest rank is least busy.

    Of equally good splits, the most even one.

    With one stage on each rank the split is optimal. With several, the problem is NP-hard: up to
    about fifty blocks on four ranks the split is proven optimal (``is_proven``), larger problems
    get a split within 2 % of the optimum wherever it is known.

    Args:
        costs: a profile, the costs of its blocks, or one number per block, in order.
        num_stages: the number of stages, none of them empty.
        memory_limit: the bytes that a rank may hold, one number for all or one per rank. A rank
            holds ``state_factor`` times its parameters, plus its activations times the microbatches
            in flight.
        placement: the ranks of the stages, as in ``program.placement``; None for one rank per
            stage.
        in_flight: the microbatches in flight on each stage; None for 1F1B's, ``num_stages - stage``
            but at most ``microbatches``.
        state_factor: bytes held per byte of parameters: 2 with gradients, 4 with Adam's moments.
        bandwidth: bytes per second between ranks. A cut is crossed twice per microbatch, and
            occupies the ranks on both sides; a cut within a rank is free. None for no transfer
            time.
        latency_s: the fixed time of each transfer.
        microbatches: microbatches per step.

    Raises:
        PartitionError: there are more stages than blocks, or no split fits the memory limit; the
            message gives the smallest feasible limit.

    Examples:
        >>> balance([3, 1, 1, 1, 1, 5], 3).counts
        (2, 3, 1)
        >>> balance([3, 1, 1, 1, 1, 5], 2).bottleneck_s
        6.0
        >>> from penstock.schedule.placement import v_shape
        >>> found = balance([3, 1, 1, 1, 1, 5], 4, placement=v_shape(2))
        >>> found.counts, found.rank_time_s, found.is_proven
        ((1, 2, 2, 1), (8.0, 4.0), True)

    Source: arXiv:1806.03377 (PipeDream), sec. 3.1, for the dynamic program over a chain of layers.
    """
    config = BalanceConfig(
        num_stages=num_stages, placement=placement, memory_limit=memory_limit,
        in_flight=in_flight, state_factor=state_factor, bandwidth=bandwidth, latency_s=latency_s,
        microbatches=microbatches,
    )  # fmt: skip
    return balanced(costs, config)


def balanced(costs: BlockTimes, config: BalanceConfig) -> Balance:
    """The best split under this configuration; see ``balance``."""
    blocks = _blocks_of(costs)
    chain = _chain_of(blocks, config)
    if config.shares_ranks:
        ends, is_proven = _shared_ends(chain, config)
    else:
        ends, is_proven = _own_ends(chain, config), True
    return _balance_of(blocks, chain, config, ends, is_proven)


def split_costs(
    costs: BlockTimes, counts: Sequence[int], *, placement: Placement | None = None
) -> Balance:
    """The costs of a given split, without transfers; arguments are those of ``balance``."""
    config = BalanceConfig(num_stages=len(counts), placement=placement)
    blocks = _blocks_of(costs)
    ends = list(accumulate(counts, initial=0))
    return _balance_of(blocks, _chain_of(blocks, config), config, ends, is_proven=False)


def _blocks_of(costs: BlockTimes) -> Sequence[BlockCosts]:
    if isinstance(costs, Profile):
        return costs.blocks
    named = ((each, (f"block {i}",)) for i, each in enumerate(costs))
    return [
        each if isinstance(each, BlockCosts) else BlockCosts(modules=name, forward_s=each)  # type: ignore[arg-type]
        for each, name in named
    ]


def _chain_of(blocks: Sequence[BlockCosts], config: BalanceConfig) -> Chain:
    if len(blocks) < config.num_stages:
        raise PartitionError(
            f"{len(blocks)} blocks can't make {config.num_stages} stages, since no stage may be "
            f"empty; the most that works is num_stages={len(blocks)}"
        )
    held = [
        list(accumulate((config.held_bytes(block, flight) for block in blocks), initial=0.0))
        for flight in config.stage_in_flight
    ]
    times = list(accumulate((block.time_s for block in blocks), initial=0.0))
    crossings = [0.0, *(config.crossing_s(block.sent_bytes) for block in blocks[:-1]), 0.0]
    return Chain(times, crossings, held, config.limits)


def _own_ends(chain: Chain, config: BalanceConfig) -> list[int]:
    """The ends of stages with one rank per stage."""
    max_load = least_bottleneck(chain.loads()) * MORE
    if max_load == math.inf:
        share = least_bottleneck(chain.fullness())
        raise _no_room(chain, config, "the least that works", share)
    return most_even(chain, max_load)


def _shared_ends(chain: Chain, config: BalanceConfig) -> tuple[list[int], bool]:
    """The ends of stages that share ranks, and True if they are proven optimal."""
    assert config.placement is not None, "it says which ranks they share"
    problem = SharedChain(chain, config.placement)
    # Start from the best split for one rank per stage.
    bottleneck = least_bottleneck(chain.loads(is_limited=False))
    begin = most_even(chain, bottleneck * MORE, is_limited=False)
    ends, is_proven = best_split(problem, begin)
    fullest, *_ = problem.value(np.array(ends))
    if fullest > 1:
        raise _no_room(chain, config, "the least found to work", fullest)
    return ends, is_proven


def _balance_of(
    blocks: Sequence[BlockCosts],
    chain: Chain,
    config: BalanceConfig,
    ends: list[int],
    is_proven: bool,
) -> Balance:
    spans, num_stages = list(pairwise(ends)), chain.num_stages
    ranks = range(num_stages) if config.placement is None else config.placement.stage_ranks
    loads: list[list[float]] = [[] for _ in range(config.num_ranks)]
    time_s = []
    for stage, rank in enumerate(ranks):
        i, j = spans[stage % num_stages]
        parts = [block.time_s for block in blocks[i:j]]
        for cut, other in ((i, stage - 1), (j, stage + 1)):
            if 0 < cut < chain.num_blocks and ranks[other] != rank:
                parts.append(float(chain.crossings[cut]))
        time_s.append(math.fsum(parts))
        loads[rank] += parts
    # A microbatch passes only one direction of the placement.
    directions = len(ranks) // num_stages
    held = [
        float(chain.held[stage][j] - chain.held[stage][i]) for stage, (i, j) in enumerate(spans)
    ]
    return Balance(
        counts=tuple(j - i for i, j in spans),
        time_s=tuple(time_s[:num_stages]),
        held_bytes=tuple(held),
        rank_time_s=tuple(math.fsum(load) / directions for load in loads),
        is_proven=is_proven,
    )


def _no_room(chain: Chain, config: BalanceConfig, known: str, share: float) -> PartitionError:
    """The error for an infeasible memory limit; ``share`` times the limit would be feasible."""
    # Convert shares back to bytes, which are whole numbers up to rounding errors.
    least = [math.ceil(limit * share * (1 - 4 * sys.float_info.epsilon)) for limit in config.limits]
    given = [round(limit) for limit in config.limits]
    shown, works = (each if len(set(given)) > 1 else each[0] for each in (given, least))
    return PartitionError(
        f"no split of {chain.num_blocks} blocks into {chain.num_stages} stages keeps to "
        f"memory_limit={shown} bytes with {list(config.stage_in_flight)} microbatches in flight; "
        f"{known} is {works}; or make more stages, or smaller microbatches, "
        "or recompute activations"
    )
