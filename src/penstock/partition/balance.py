"""Where to cut: the split of a chain of blocks into stages that is best for given costs.

    blocks      3  1  1  1  1  5           three stages
    greedy      3  1 │ 1  1  1 │ 5         bottleneck 5
    by count    3  1 │ 1  1 │ 1  5         bottleneck 6

A pipeline goes at the pace of its slowest stage, so that the least bottleneck is looked for, over
all splits, by dynamic programming over (stages used, blocks used): exact, not a heuristic. What a
stage may hold and what its transfers cost are part of the problem. A pure solver: it knows neither
models nor devices, and imports no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import TypeAlias

from penstock.errors import PartitionError
from penstock.partition.costs import BlockCosts, Profile

__all__ = ["Balance", "Objective", "balance"]

BlockTimes: TypeAlias = Profile | Sequence[BlockCosts] | Sequence[float]


class Objective(Enum):
    """What a split is judged by."""

    BOTTLENECK = "max"
    """The slowest stage; among equals the least sum of squares, which levels the others."""
    STEP = "step"
    """A step's length: microbatches - 1 times the slowest stage, and once through the pipe with
    all its transfers. A cut that is cheap to cross may be worth a slower stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A split of blocks into stages, and what it comes to.

    Args:
        counts: the number of blocks per stage, in order.
        time_s: per stage its forward, backward and transfers of one microbatch.
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
    memory_limit: float | Sequence[float] | None = None,
    objective: str | Objective = Objective.BOTTLENECK,
    *,
    in_flight: Sequence[int] | None = None,
    state_factor: float = 1.0,
    bandwidth: float | None = None,
    latency_s: float = 0.0,
    microbatches: int | None = None,
) -> Balance:
    """The best split of a chain of blocks into stages.

    Args:
        costs: a profile, the costs of its blocks, or one number per block, in order.
        num_stages: how many stages to make, none of them empty.
        memory_limit: the bytes that a stage may hold, one number for all or one per stage:
            ``state_factor`` times its parameters, and its activations times what is in flight.
        objective: ``"max"``, the slowest stage, or ``"step"``, the length of a step.
        in_flight: per stage the microbatches whose activations it holds at once; if None as in
            1F1B, ``num_stages - stage``, and no more than ``microbatches``.
        state_factor: bytes held per byte of parameters: 2 with gradients, 4 with Adam's moments.
        bandwidth: bytes per second between stages. A cut is crossed twice per microbatch, by
            activations and by their gradients, and keeps the stages on both its sides busy.
            None: the bytes cost no time.
        latency_s: what each crossing takes beside its bytes.
        microbatches: microbatches per step; needed by ``"step"``.

    Returns:
        The split. None has a lower value of the objective.

    Raises:
        PartitionError: there are more stages than blocks, or no split keeps to the memory limit;
            the message says the least that works.

    Example:
        >>> balance([3, 1, 1, 1, 1, 5], 3).counts
        (2, 3, 1)
        >>> balance([3, 1, 1, 1, 1, 5], 2).bottleneck_s
        6.0

    Source: arXiv:1806.03377 (PipeDream), sec. 3.1, for the dynamic program over a chain of layers.
    """
    goal = objective_of(objective, microbatches)
    blocks = blocks_of(costs)
    refuse_bad_numbers(num_stages, len(blocks), bandwidth, latency_s, state_factor)
    limits = per_stage(memory_limit, num_stages)
    flights = flights_of(in_flight, num_stages, microbatches)
    held = tuple(
        tuple(
            accumulate(
                (state_factor * b.parameter_bytes + flight * b.activation_bytes for b in blocks),
                initial=0.0,
            )
        )
        for flight in flights
    )
    cuts = [2 * (latency_s + (b.sent_bytes / bandwidth if bandwidth else 0.0)) for b in blocks[:-1]]
    chain = Chain(
        num_blocks=len(blocks),
        num_stages=num_stages,
        loads=(tuple(accumulate((b.time_s for b in blocks), initial=0.0)),) * num_stages,
        crossings=(0.0, *cuts, 0.0),
        held=held,
        limits=limits,
    )
    pace = least_bottleneck(chain)
    if pace is None:
        raise no_room(chain, blocks, flights)
    # Sums of the same numbers in another order differ in their last bits.
    pace *= 1 + 1e-12
    if goal is Objective.STEP and microbatches is not None:
        ends = shortest_step(chain, pace, microbatches)
    else:
        ends = cheapest(chain, pace, level)
    spans = list(pairwise(ends))
    return Balance(
        counts=tuple(j - i for i, j in spans),
        time_s=tuple(
            math.fsum([*(b.time_s for b in blocks[i:j]), chain.crossings[i], chain.crossings[j]])
            for i, j in spans
        ),
        held_bytes=tuple(held[s][j] - held[s][i] for s, (i, j) in enumerate(spans)),
    )


# --- the problem -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain of blocks to be cut: prefix sums, so that any run of blocks is known at once.

    Args:
        num_blocks: how many blocks there are.
        num_stages: how many stages to make.
        loads: per stage, the load (the time, say) of all blocks before block i.
        crossings: what the cut before block i adds to the load on either side.
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
        """Behind which blocks a stage may end, so that no stage is empty."""
        left = self.num_stages - stage - 1
        return range(self.num_blocks if left == 0 else stage + 1, self.num_blocks - left + 1)


def least_bottleneck(chain: Chain) -> float | None:
    """The least load of the busiest stage over all splits; None where no split fits."""
    best = [math.inf] * (chain.num_blocks + 1)
    best[0] = 0.0
    for stage in range(chain.num_stages):
        before, best = best, [math.inf] * (chain.num_blocks + 1)
        loads, held, limit = chain.loads[stage], chain.held[stage], chain.limits[stage]
        for j in chain.ends(stage):
            bound = math.inf
            for i in range(j - 1, stage - 1, -1):
                span = loads[j] - loads[i]
                # Either only grows as the stage begins earlier.
                if span >= bound or held[j] - held[i] > limit:
                    break
                busiest = max(before[i], span + chain.crossings[i] + chain.crossings[j])
                if busiest < bound:
                    bound = busiest
            best[j] = bound
    return best[-1] if best[-1] < math.inf else None


Price: TypeAlias = tuple[float, float]


def level(load: float, _: int) -> Price:
    """The price that evens stages out."""
    return 0.0, load**2


def cheapest(chain: Chain, pace: float, price: Callable[[float, int], Price]) -> list[int]:
    """The split of least total price among those with no stage busier than ``pace``.

    Args:
        chain: the problem.
        pace: the load that no stage may exceed.
        price: of a stage by its load and its end: what counts first, and what decides among
            equals.

    Returns:
        Where the stages end, with a 0 in front.
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
                if span > pace or held[j] - held[i] > limit:
                    break
                load = span + chain.crossings[i] + chain.crossings[j]
                if load > pace or before[i] == never:
                    continue
                first, second = price(load, j)
                total = (before[i][0] + first, before[i][1] + second)
                if total < best[j]:
                    best[j], came_from[j] = total, i
        starts.append(came_from)
    assert best[-1] != never, "a pace that no split keeps"
    ends = [chain.num_blocks]
    for came_from in reversed(starts):
        ends.append(came_from[ends[-1]])
    return ends[::-1]


def shortest_step(chain: Chain, pace: float, microbatches: int) -> list[int]:
    """The split of the shortest step: (microbatches - 1) × bottleneck + all crossings.

    Crossings get cheaper as stages may get slower. Between two paces whose cheapest crossings are
    equal, the faster pace is the better one, and nothing between them is worth a look.
    """
    times, crossings = chain.loads[0], chain.crossings
    slower = {
        time
        for i in range(chain.num_blocks)
        for j in range(i + 1, chain.num_blocks + 1)
        if (time := times[j] - times[i] + crossings[i] + crossings[j]) > pace
    }
    paces = [pace, *sorted(slower)]
    found: dict[int, tuple[float, list[int]]] = {}

    def crossed(index: int) -> float:
        if index not in found:
            ends = cheapest(chain, paces[index], lambda time, end: (crossings[end], time**2))
            found[index] = (sum(crossings[end] for end in ends), ends)
        return found[index][0]

    def length(index: int) -> float:
        return (microbatches - 1) * paces[index] + crossed(index)

    best = min((0, len(paces) - 1), key=length)
    open_ranges = [(0, len(paces) - 1)]
    while open_ranges:
        low, high = open_ranges.pop()
        hoped_for = (microbatches - 1) * paces[min(low + 1, high)] + crossed(high)
        if high - low < 2 or crossed(low) <= crossed(high) or hoped_for >= length(best):
            continue
        middle = (low + high) // 2
        best = min((best, middle), key=length)
        open_ranges += [(middle, high), (low, middle)]
    return found[best][1]


# --- what is asked for -------------------------------------------------------------------------


def blocks_of(costs: BlockTimes) -> Sequence[BlockCosts]:
    """The blocks' costs, from whatever form they were given in."""
    if isinstance(costs, Profile):
        return costs.blocks
    return [
        each
        if isinstance(each, BlockCosts)
        else BlockCosts(modules=(f"block {i}",), forward_s=each)  # type: ignore[arg-type]
        for i, each in enumerate(costs)
    ]


def objective_of(objective: str | Objective, microbatches: int | None) -> Objective:
    """The objective of this name."""
    try:
        goal = Objective(objective)
    except ValueError as error:
        names = [known.value for known in Objective]
        raise PartitionError(f"objective {objective!r} is unknown; known are {names}") from error
    if goal is Objective.STEP and (microbatches is None or microbatches < 1):
        raise PartitionError(
            f'objective="step" with microbatches={microbatches}: say how many a step has'
        )
    return goal


def refuse_bad_numbers(
    num_stages: int,
    num_blocks: int,
    bandwidth: float | None,
    latency_s: float,
    state_factor: float,
) -> None:
    """Refuse what makes no problem at all."""
    if num_stages < 1:
        raise PartitionError(f"num_stages is {num_stages}, expected at least 1")
    if num_blocks < num_stages:
        raise PartitionError(
            f"{num_blocks} blocks can't make {num_stages} stages, since no stage may be empty; "
            f"the most that works is num_stages={num_blocks}"
        )
    if bandwidth is not None and not bandwidth > 0:
        raise PartitionError(f"bandwidth is {bandwidth}, expected bytes per second > 0, or None")
    for name, value in (("latency_s", latency_s), ("state_factor", state_factor)):
        if not 0 <= value < math.inf:
            raise PartitionError(f"{name} is {value}, expected a number ≥ 0")


def per_stage(limit: float | Sequence[float] | None, num_stages: int) -> tuple[float, ...]:
    """The memory limit of each stage."""
    if limit is None:
        return (math.inf,) * num_stages
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * num_stages
    if len(limits) != num_stages:
        raise PartitionError(
            f"memory_limit has {len(limits)} numbers for {num_stages} stages; give one per stage, "
            "or one for all"
        )
    if not all(each > 0 for each in limits):
        raise PartitionError(f"memory_limit is {limit}, expected bytes > 0")
    return limits


def flights_of(
    in_flight: Sequence[int] | None, num_stages: int, microbatches: int | None
) -> Sequence[int]:
    """How many microbatches each stage holds at once."""
    if in_flight is None:
        most = num_stages if microbatches is None else microbatches
        return [min(num_stages - stage, most) for stage in range(num_stages)]
    if len(in_flight) != num_stages or min(in_flight) < 0:
        raise PartitionError(
            f"in_flight is {list(in_flight)}, expected {num_stages} numbers ≥ 0, one per stage"
        )
    return in_flight


def no_room(chain: Chain, blocks: Sequence[BlockCosts], flights: Sequence[int]) -> PartitionError:
    """The error of a limit that no split keeps to: how much of it would do."""
    # The same search, with the share of its limit that a stage fills in place of its time.
    shares = tuple(
        tuple(held / limit for held in prefix)
        for prefix, limit in zip(chain.held, chain.limits, strict=True)
    )
    free = (math.inf,) * chain.num_stages
    none = (0.0,) * (chain.num_blocks + 1)
    share = least_bottleneck(replace(chain, loads=shares, crossings=none, limits=free))
    assert share is not None, "a split into stages of any size"
    # Back from shares to bytes, which are whole numbers but for the last bits.
    least = [math.ceil(limit * share * (1 - 4 * sys.float_info.epsilon)) for limit in chain.limits]
    asked, works = (
        (f"{chain.limits[0]:.0f}", f"{least[0]}")
        if len(set(chain.limits)) == 1
        else (f"{[round(limit) for limit in chain.limits]}", f"{least}")
    )
    return PartitionError(
        f"no split of {len(blocks)} blocks into {chain.num_stages} stages keeps to memory_limit="
        f"{asked} bytes with {list(flights)} microbatches in flight; the least that works is "
        f"{works}; or make more stages, or smaller microbatches, or recompute activations"
    )
