"""The exact split of a chain of blocks into stages: one stage on each rank.

    blocks      3  1  1  1  1  5           three stages
    greedy      3  1 │ 1  1  1 │ 5         bottleneck 5
    by count    3  1 │ 1  1 │ 1  5         bottleneck 6

    best(s, j) = min over i of max(best(s - 1, i), load of the blocks i to j)

Dynamic programming over (stages used, blocks used), one array operation per stage.

Source: arXiv:1806.03377 (PipeDream), sec. 3.1, for the dynamic program over a chain of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Chain", "least_bottleneck", "most_even"]

Array: TypeAlias = npt.NDArray[np.float64]


class Chain:
    """A chain of blocks to cut into stages.

    Attributes:
        times: the time of all blocks before block i.
        crossings: the time that the cut before block i adds on each side.
        held: per stage, the bytes of all blocks before block i.
        limits: the bytes that a stage may hold, or its rank if ranks are shared.
        spans: the time of a stage of the blocks i to j, with its crossings; infinite if empty.
    """

    def __init__(
        self, times: Sequence[float], crossings: Sequence[float],
        held: Sequence[Sequence[float]], limits: Sequence[float],
    ) -> None:  # fmt: skip
        self.times, self.crossings = np.array(times, float), np.array(crossings, float)
        self.held, self.limits = np.array(held, float), np.array(limits, float)
        self.num_blocks, self.num_stages = len(times) - 1, len(held)
        self.spans = _between(self.times) + self.crossings[:, None] + self.crossings[None, :]

    def loads(self, is_limited: bool = True) -> Iterable[Array]:
        """Of each stage its ``spans``, infinite where the stage exceeds its limit."""
        if not is_limited:
            return [self.spans] * self.num_stages
        pairs = zip(self.held, self.limits, strict=True)
        return (np.where(_between(held) <= limit, self.spans, math.inf) for held, limit in pairs)

    def fullness(self) -> Iterable[Array]:
        """Of each stage of the blocks i to j the part of its limit that it holds."""
        return (_between(held) / limit for held, limit in zip(self.held, self.limits, strict=True))


def _between(prefix: Array) -> Array:
    """The sum of the blocks i to j; infinite without a block."""
    return np.where(np.tri(len(prefix), dtype=bool), math.inf, prefix[None, :] - prefix[:, None])


def least_bottleneck(loads: Iterable[Array]) -> float:
    """The least possible load of the busiest stage, from each stage's load [start, end];
    infinite if no split is feasible."""
    best: Array | None = None
    for load in loads:
        best = load[0] if best is None else np.maximum(best[:, None], load).min(axis=0)
    assert best is not None, "a chain has stages"
    return float(best[-1])


def most_even(chain: Chain, max_load: float, is_limited: bool = True) -> list[int]:
    """The ends, from 0 on, of the split with loads of at most ``max_load`` that has the least sum
    of squared loads."""
    blocks = np.arange(chain.num_blocks + 1)
    squares = np.where(blocks == 0, 0.0, math.inf)
    starts: list[list[int]] = []
    for load in chain.loads(is_limited):
        sums = np.where(load <= max_load, load**2, math.inf) + squares[:, None]
        squares = sums.min(axis=0)
        # The shortest of equally good stages.
        starts.append((blocks[-1] - sums[::-1].argmin(axis=0)).tolist())
    assert squares[-1] < math.inf, "a max_load that no split keeps"
    ends = [chain.num_blocks]
    for start_of in reversed(starts):
        ends.append(start_of[ends[-1]])
    return ends[::-1]
