"""What a split is asked for, and under which terms: read, and refused where it makes no problem.

    costs, in whatever form          the blocks
    memory limit, microbatches       a chain of loads, crossings and bytes

This module solves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

from penstock.errors import PartitionError
from penstock.partition.balance.chain import Chain
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.plan import StageCosts
from penstock.schedule.placement import Placement

__all__ = ["BlockTimes", "SplitObjective", "Terms", "blocks_of", "chain_of"]

BlockTimes: TypeAlias = Profile | Sequence[BlockCosts] | Sequence[float]


class SplitObjective(Enum):
    """What a split is judged by."""

    BOTTLENECK = "max"
    """The busiest rank, which with one stage on each is the slowest stage; among equals the least
    sum of squares, which levels the others."""
    STEP = "step"
    """A step's length: microbatches - 1 times the busiest rank, and once through the pipe with
    all its transfers. A cut that is cheap to cross may be worth a slower stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a split has to reckon with; see ``penstock.balance``, which has them as arguments."""

    num_stages: int
    placement: Placement | None = None
    objective: SplitObjective = SplitObjective.BOTTLENECK
    memory_limit: float | Sequence[float] | None = None
    in_flight: Sequence[int] | None = None
    state_factor: float = 1.0
    bandwidth: float | None = None
    latency_s: float = 0.0
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise PartitionError(f"num_stages is {self.num_stages}, expected at least 1")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise PartitionError(
                f"bandwidth is {self.bandwidth}, expected bytes per second > 0, or None"
            )
        for name in ("latency_s", "state_factor"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise PartitionError(f"{name} is {value}, expected a number ≥ 0")
        if self.objective is SplitObjective.STEP and (self.microbatches or 0) < 1:
            raise PartitionError(
                f'objective="step" with microbatches={self.microbatches}: say how many a step has'
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise PartitionError(f"microbatches is {self.microbatches}, expected at least 1")
        if self.placement is not None and self.placement.num_model_stages != self.num_stages:
            raise PartitionError(
                f"the placement is one of {self.placement.num_model_stages} stages, but "
                f"num_stages is {self.num_stages}"
            )
        self._refuse_odd_numbers()

    def _refuse_odd_numbers(self) -> None:
        if isinstance(self.memory_limit, Sequence) and len(self.memory_limit) != self.num_ranks:
            per = "rank" if self.shares_ranks else "stage"
            raise PartitionError(
                f"memory_limit has {len(self.memory_limit)} numbers for {self.num_ranks} {per}s; "
                f"give one per {per}, or one for all"
            )
        if not all(each > 0 for each in self.limits):
            raise PartitionError(f"memory_limit is {self.memory_limit}, expected bytes > 0")
        flights = self.in_flight
        if flights is not None and (len(flights) != self.num_stages or min(flights) < 0):
            raise PartitionError(
                f"in_flight is {list(flights)}, expected {self.num_stages} numbers ≥ 0, one per "
                "stage"
            )

    @property
    def num_ranks(self) -> int:
        """On how many ranks the stages lie."""
        return self.num_stages if self.placement is None else self.placement.num_ranks

    @property
    def shares_ranks(self) -> bool:
        """Whether a rank holds several stages."""
        placement = self.placement
        return placement is not None and placement.num_stages > placement.num_ranks

    @property
    def limits(self) -> tuple[float, ...]:
        """The bytes that each rank may hold; in order of the stages, where each has its own."""
        if self.memory_limit is None:
            return (math.inf,) * self.num_ranks
        if not isinstance(self.memory_limit, Sequence):
            return (self.memory_limit,) * self.num_ranks
        if self.placement is None or self.shares_ranks:
            return tuple(self.memory_limit)
        return tuple(self.memory_limit[rank] for rank in self.placement.stage_ranks)

    @property
    def flights(self) -> tuple[int, ...]:
        """How many microbatches each stage holds at once: those of 1F1B where nobody says."""
        if self.in_flight is not None:
            return tuple(self.in_flight)
        most = self.num_stages if self.microbatches is None else self.microbatches
        return tuple(min(self.num_stages - stage, most) for stage in range(self.num_stages))

    def held_bytes(self, costs: BlockCosts | StageCosts, flight: int) -> float:
        """What a block or a stage holds with so many microbatches in flight."""
        return self.state_factor * costs.parameter_bytes + flight * costs.activation_bytes

    def crossing_s(self, sent_bytes: float) -> float:
        """What it takes to send so much forward, and its gradient back."""
        return 2 * (self.latency_s + (sent_bytes / self.bandwidth if self.bandwidth else 0.0))


def blocks_of(costs: BlockTimes) -> Sequence[BlockCosts]:
    """The blocks' costs, from whatever form they were given in.

    Raises:
        PartitionError: a cost is no number, or below 0.
    """
    if isinstance(costs, Profile):
        return costs.blocks
    return [
        each
        if isinstance(each, BlockCosts)
        else BlockCosts(modules=(f"block {i}",), forward_s=each)  # type: ignore[arg-type]
        for i, each in enumerate(costs)
    ]


def chain_of(blocks: Sequence[BlockCosts], terms: Terms) -> Chain:
    """The blocks as a chain to be cut.

    Raises:
        PartitionError: there are more stages than blocks.
    """
    if len(blocks) < terms.num_stages:
        raise PartitionError(
            f"{len(blocks)} blocks can't make {terms.num_stages} stages, since no stage may be "
            f"empty; the most that works is num_stages={len(blocks)}"
        )
    held = ((terms.held_bytes(block, flight) for block in blocks) for flight in terms.flights)
    times = tuple(accumulate((block.time_s for block in blocks), initial=0.0))
    cuts = (terms.crossing_s(block.sent_bytes) for block in blocks[:-1])
    return Chain(
        num_blocks=len(blocks),
        num_stages=terms.num_stages,
        loads=(times,) * terms.num_stages,
        crossings=(0.0, *cuts, 0.0),
        held=tuple(tuple(accumulate(each, initial=0.0)) for each in held),
        limits=terms.limits,
    )
