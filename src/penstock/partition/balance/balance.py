"""The best split of a chain of blocks into stages, one on each rank, for given costs.

    blocks      3  1  1  1  1  5           three stages
    greedy      3  1 │ 1  1  1 │ 5         bottleneck 5
    by count    3  1 │ 1  1 │ 1  5         bottleneck 6

    best(s, j) = min over i of max(best(s - 1, i), load of the blocks i to j)

Dynamic programming over (stages used, blocks used), one array operation per stage. For ranks with
several stages see ``for_program``. This module knows no models or devices, and imports no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError
from penstock.partition.balance.costs import BlockCosts, Profile

__all__ = ["Balance", "balance"]

# Sums of the same numbers in another order differ in their last bits.
ROUNDING = 1 + 1e-12
BlockTimes: TypeAlias = Profile | Sequence[BlockCosts] | Sequence[float]
Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A split of blocks into stages, and its costs.

    Args:
        counts: the number of blocks per stage, in order.
        time_s: per stage its forward and backward of one microbatch.
        held_bytes: per stage its parameters and activations in flight.
    """

    counts: tuple[int, ...]
    time_s: tuple[float, ...]
    held_bytes: tuple[float, ...]

    @property
    def bottleneck_s(self) -> float:
        """The time of the slowest stage."""
        return max(self.time_s)


def balance(
    costs: BlockTimes,
    num_stages: int,
    memory_limit: float | None = None,
    *,
    in_flight: Sequence[int] | None = None,
    state_factor: float = 1.0,
) -> Balance:
    """Find the split of a chain of blocks into stages whose slowest stage is quickest.

    Of equally good splits, the most even one. For ranks with several stages,
    ``Pipeline(split="auto")`` and ``penstock split --schedule`` balance for the schedule.

    Args:
        costs: a profile, the costs of its blocks, or one number per block, in order.
        num_stages: the number of stages, none of them empty, each on its own rank.
        memory_limit: the bytes that a stage may hold: ``state_factor`` times its parameters, frozen
            ones once, plus its activations times the microbatches in flight.
        in_flight: the microbatches in flight on each stage; None for ``num_stages - stage``, as in
            1F1B.
        state_factor: bytes held per byte that is trained: 2 with gradients, 4 with Adam's moments.

    Raises:
        PartitionError: there are more stages than blocks, or no split fits the memory limit; the
            message gives the smallest feasible limit.

    Examples:
        >>> balance([3, 1, 1, 1, 1, 5], 3).counts
        (2, 3, 1)
        >>> balance([3, 1, 1, 1, 1, 5], 2).bottleneck_s
        6.0

    Source: arXiv:1806.03377 (PipeDream), sec. 3.1, for the dynamic program over a chain of layers.
    """
    blocks = _blocks_of(costs)
    flights = range(num_stages, 0, -1) if in_flight is None else in_flight
    limit = math.inf if memory_limit is None else memory_limit
    if not 1 <= num_stages <= len(blocks):
        raise PartitionError(
            f"{len(blocks)} blocks can't make {num_stages} stages: expected 1 to {len(blocks)}"
        )
    if len(flights) != num_stages or min(flights) < 0:
        raise PartitionError(f"in_flight is {flights}, expected {num_stages} numbers ≥ 0")
    if not (limit > 0 and 0 <= state_factor < math.inf):
        raise PartitionError(
            f"memory_limit={memory_limit}, state_factor={state_factor}: expected numbers above 0"
        )
    spans = _between(block.time_s for block in blocks)
    held = [
        _between(b.state_bytes(state_factor) + n * b.activation_bytes for b in blocks)
        for n in flights
    ]
    loads = [np.where(each <= limit, spans, math.inf) for each in held]
    bottleneck = _least_bottleneck(loads)
    if bottleneck == math.inf:
        least = math.ceil(_least_bottleneck(held) * (1 - 4 * sys.float_info.epsilon))
        raise PartitionError(
            f"no split of {len(blocks)} blocks into {num_stages} stages keeps to "
            f"memory_limit={round(limit)} bytes with {list(flights)} microbatches in flight; the "
            f"least that works is {least}; or make more stages, or smaller microbatches, or "
            "recompute activations"
        )
    stages = list(pairwise(_most_even(loads, bottleneck * ROUNDING)))
    return Balance(
        counts=tuple(j - i for i, j in stages),
        time_s=tuple(float(spans[stage]) for stage in stages),
        held_bytes=tuple(float(each[stage]) for each, stage in zip(held, stages, strict=True)),
    )


def _blocks_of(costs: BlockTimes) -> Sequence[BlockCosts]:
    if isinstance(costs, Profile):
        return costs.blocks
    named = ((each, (f"block {i}",)) for i, each in enumerate(costs))
    return [
        each if isinstance(each, BlockCosts) else BlockCosts(modules=name, forward_s=each)  # type: ignore[arg-type]
        for each, name in named
    ]


def _between(amounts: Iterable[float]) -> Array:
    """The sum over the blocks i to j; infinite without a block."""
    sums = np.array(list(accumulate(amounts, initial=0.0)))
    return np.where(np.tri(len(sums), dtype=bool), math.inf, sums[None, :] - sums[:, None])


def _least_bottleneck(loads: Iterable[Array]) -> float:
    """The least possible load of the busiest stage, from each stage's load [start, end];
    infinite if no split is feasible."""
    best: Array | None = None
    for load in loads:
        best = load[0] if best is None else np.maximum(best[:, None], load).min(axis=0)
    assert best is not None, "a chain has stages"
    return float(best[-1])


def _most_even(loads: Iterable[Array], max_load: float) -> list[int]:
    """The ends, from 0 on, of the split with loads of at most ``max_load`` that has the least sum
    of squared loads."""
    starts: list[list[int]] = []
    squares: Array | None = None
    for load in loads:
        last = len(load) - 1
        if squares is None:
            squares = np.where(np.arange(last + 1) == 0, 0.0, math.inf)
        sums = np.where(load <= max_load, load**2, math.inf) + squares[:, None]
        squares = sums.min(axis=0)
        # The shortest of equally good stages.
        starts.append((last - sums[::-1].argmin(axis=0)).tolist())
    ends = [last]
    for start_of in reversed(starts):
        ends.append(start_of[ends[-1]])
    return ends[::-1]
