"""The exact split of a chain of blocks into stages: one stage on each rank.

    blocks      3  1  1  1  1  5           three stages
    greedy      3  1 │ 1  1  1 │ 5         bottleneck 5
    by count    3  1 │ 1  1 │ 1  5         bottleneck 6

    best(s, j) = min over i of max(best(s - 1, i), load of the blocks i to j)

Dynamic programming over (stages used, blocks used). Loads, crossings and bytes are plain numbers.

Source: arXiv:1806.03377 (PipeDream), sec. 3.1, for the dynamic program over a chain of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Chain", "cheapest", "least_bottleneck", "level", "shortest_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain of blocks to cut, as prefix sums.

    Args:
        num_blocks: the number of blocks.
        num_stages: the number of stages to make.
        loads: per stage, the load (such as time) of all blocks before block i.
        crossings: the load that the cut before block i adds on each side.
        held: per stage, the bytes of all blocks before block i.
        limits: per stage, the bytes that it may hold.
    """

    num_blocks: int
    num_stages: int
    loads: tuple[tuple[float, ...], ...]
    crossings: tuple[float, ...]
    held: tuple[tuple[float, ...], ...]
    limits: tuple[float, ...]

    def ends(self, stage: int) -> range:
        """The blocks after which a stage may end, so that no stage is empty."""
        left = self.num_stages - stage - 1
        return range(self.num_blocks if left == 0 else stage + 1, self.num_blocks - left + 1)


def least_bottleneck(chain: Chain) -> float | None:
    """The least possible load of the busiest stage; None if no split is feasible."""
    best = [math.inf] * (chain.num_blocks + 1)
    best[0] = 0.0
    for stage in range(chain.num_stages):
        before, best = best, [math.inf] * (chain.num_blocks + 1)
        loads, held, limit = chain.loads[stage], chain.held[stage], chain.limits[stage]
        for j in chain.ends(stage):
            bound = math.inf
            for i in range(j - 1, stage - 1, -1):
                span = loads[j] - loads[i]
                # Both grow as the stage starts earlier.
                if span >= bound or held[j] - held[i] > limit:
                    break
                busiest = max(before[i], span + chain.crossings[i] + chain.crossings[j])
                if busiest < bound:
                    bound = busiest
            best[j] = bound
    return best[-1] if best[-1] < math.inf else None


Price: TypeAlias = tuple[float, float]


def level(load: float, _: int) -> Price:
    """A stage price that evens out loads."""
    return 0.0, load**2


def cheapest(chain: Chain, max_load: float, price: Callable[[float, int], Price]) -> list[int]:
    """The ends, from 0 on, of the split of least total price with loads of at most ``max_load``.

    ``price`` is a function of a stage's load and end to its price, with a tie-breaker.
    """
    never: Price = (math.inf, math.inf)
    best: list[Price] = [never] * (chain.num_blocks + 1)
    best[0] = (0.0, 0.0)
    starts: list[list[int]] = []
    for stage in range(chain.num_stages):
        before, best = best, [never] * (chain.num_blocks + 1)
        came_from = [-1] * (chain.num_blocks + 1)
        loads, held, limit = chain.loads[stage], chain.held[stage], chain.limits[stage]
        for j in chain.ends(stage):
            for i in range(j - 1, stage - 1, -1):
                span = loads[j] - loads[i]
                if span > max_load or held[j] - held[i] > limit:
                    break
                load = span + chain.crossings[i] + chain.crossings[j]
                if load > max_load or before[i] == never:
                    continue
                first, second = price(load, j)
                total = (before[i][0] + first, before[i][1] + second)
                if total < best[j]:
                    best[j], came_from[j] = total, i
        starts.append(came_from)
    assert best[-1] != never, "a max_load that no split keeps"
    ends = [chain.num_blocks]
    for came_from in reversed(starts):
        ends.append(came_from[ends[-1]])
    return ends[::-1]


def shortest_step(chain: Chain, max_load: float, microbatches: int) -> list[int]:
    """The split of the shortest step: (microbatches - 1) × bottleneck + all crossings.

    Slower stages allow cheaper crossings. If the cheapest crossings at two maximal loads are
    equal, the lower load is better, and all loads between them can be skipped.
    """
    times, crossings = chain.loads[0], chain.crossings
    slower = {
        time
        for i in range(chain.num_blocks)
        for j in range(i + 1, chain.num_blocks + 1)
        if (time := times[j] - times[i] + crossings[i] + crossings[j]) > max_load
    }
    max_loads = [max_load, *sorted(slower)]
    found: dict[int, tuple[float, list[int]]] = {}

    def crossed(index: int) -> float:
        if index not in found:
            ends = cheapest(chain, max_loads[index], lambda time, end: (crossings[end], time**2))
            found[index] = (sum(crossings[end] for end in ends), ends)
        return found[index][0]

    def length(index: int) -> float:
        return (microbatches - 1) * max_loads[index] + crossed(index)

    best = min((0, len(max_loads) - 1), key=length)
    open_ranges = [(0, len(max_loads) - 1)]
    while open_ranges:
        low, high = open_ranges.pop()
        hoped_for = (microbatches - 1) * max_loads[min(low + 1, high)] + crossed(high)
        if high - low < 2 or crossed(low) <= crossed(high) or hoped_for >= length(best):
            continue
        middle = (low + high) // 2
        best = min((best, middle), key=length)
        open_ranges += [(middle, high), (low, middle)]
    return found[best][1]
