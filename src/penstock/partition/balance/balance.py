"""Where to cut: the split of a chain of blocks into stages that is best for given costs.

    terms.py           what is asked for, as a chain of loads, crossings and bytes
    chain.py           one stage on each rank: exact, by dynamic programming
    shared_ranks.py    several: a search, and a proof as far as its budget reaches

A pipeline goes at the pace of its busiest rank, so that the least bottleneck is looked for, over
all splits. What a rank may hold and what its transfers cost are part of the problem. Pure: it
knows neither models nor devices, and imports no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock.errors import PartitionError
from penstock.partition.balance.chain import Chain, cheapest, least_bottleneck, level, shortest_step
from penstock.partition.balance.costs import BlockCosts
from penstock.partition.balance.shared_ranks import MutableSplit, SharedChain, best_split
from penstock.partition.balance.terms import BlockTimes, SplitObjective, Terms, blocks_of, chain_of
from penstock.schedule.placement import Placement

__all__ = ["Balance", "balance", "balanced", "weigh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A split of blocks into stages, and what it comes to.

    Args:
        counts: the number of blocks per stage, in order.
        time_s: per stage its forward, backward and transfers of one microbatch.
        held_bytes: per stage its parameters and activations in flight.
        rank_time_s: per rank the time of its stages together, for one microbatch.
        is_proven: whether no other split is better for sure: always with one stage on each rank.
    """

    counts: tuple[int, ...]
    time_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    rank_time_s: tuple[float, ...]
    is_proven: bool = True

    @property
    def bottleneck_s(self) -> float:
        """The time of the busiest rank: with one stage on each, of the slowest stage."""
        return max(self.rank_time_s)


def balance(
    costs: BlockTimes,
    num_stages: int,
    memory_limit: float | Sequence[float] | None = None,
    objective: str | SplitObjective = SplitObjective.BOTTLENECK,
    *,
    placement: Placement | None = None,
    in_flight: Sequence[int] | None = None,
    state_factor: float = 1.0,
    bandwidth: float | None = None,
    latency_s: float = 0.0,
    microbatches: int | None = None,
    slack: float = 0.0,
) -> Balance:
    """The best split of a chain of blocks into stages.

    With one stage on each rank it is the best of all. Where ranks hold several stages, a rank is
    as busy as its stages together, and finding the best split is NP-hard: up to some thirty
    blocks on four ranks it is found and proven, beyond that a good one is found (within 2 % of
    the best wherever that is known); ``is_proven`` says which.

    Args:
        costs: a profile, the costs of its blocks, or one number per block, in order.
        num_stages: how many stages to make, none of them empty.
        memory_limit: the bytes that a rank may hold, one number for all or one per rank:
            ``state_factor`` times its parameters, and its activations times what is in flight.
        objective: ``"max"``, the busiest rank, or ``"step"``, the length of a step.
        placement: which rank holds which stages, as in ``program.placement``; if None, each stage
            has a rank of its own.
        in_flight: per stage the microbatches whose activations it holds at once; if None as in
            1F1B, ``num_stages - stage``, and no more than ``microbatches``.
        state_factor: bytes held per byte of parameters: 2 with gradients, 4 with Adam's moments.
        bandwidth: bytes per second between ranks. A cut is crossed twice per microbatch, by
            activations and by their gradients, and keeps the ranks on both its sides busy; within
            a rank it costs nothing. None: the bytes cost no time.
        latency_s: what each crossing takes beside its bytes.
        microbatches: microbatches per step; needed by ``"step"``.
        slack: where ranks hold several stages, by what share of the objective a split may be worse
            whose stages are more even: a schedule that runs like stages side by side waits for
            the slowest of them.

    Returns:
        The split. Where ``is_proven``, none has a lower value of the objective, ``slack`` apart.

    Raises:
        PartitionError: there are more stages than blocks, or no split keeps to the memory limit;
            the message says the least that works.

    Example:
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
    terms = Terms(
        num_stages=num_stages,
        placement=placement,
        objective=objective_of(objective),
        memory_limit=memory_limit,
        in_flight=in_flight,
        state_factor=state_factor,
        bandwidth=bandwidth,
        latency_s=latency_s,
        microbatches=microbatches,
    )
    if not 0 <= slack < math.inf:
        raise PartitionError(f"slack is {slack}, expected a share ≥ 0, such as 0.02")
    return balanced(costs, terms, slack)


def balanced(costs: BlockTimes, terms: Terms, slack: float = 0.0) -> Balance:
    """The best split under these terms; see ``balance``."""
    blocks = blocks_of(costs)
    chain = chain_of(blocks, terms)
    if terms.shares_ranks:
        ends, is_proven = shared_ends(chain, terms, slack)
    else:
        ends, is_proven = own_ends(chain, terms), True
    return balance_of(blocks, chain, terms, ends, is_proven)


def objective_of(objective: str | SplitObjective) -> SplitObjective:
    """The objective of this name."""
    try:
        return SplitObjective(objective)
    except ValueError as error:
        names = [known.value for known in SplitObjective]
        raise PartitionError(f"objective {objective!r} is unknown; known are {names}") from error


def own_ends(chain: Chain, terms: Terms) -> list[int]:
    """Where the stages end, each of which has a rank of its own."""
    pace = least_bottleneck(chain)
    if pace is None:
        raise no_room(chain, terms, "the least that works", fullest_share(chain))
    # Sums of the same numbers in another order differ in their last bits.
    pace *= 1 + 1e-12
    if terms.objective is SplitObjective.STEP and terms.microbatches is not None:
        return shortest_step(chain, pace, terms.microbatches)
    return cheapest(chain, pace, level)


def shared_ends(chain: Chain, terms: Terms, slack: float) -> tuple[list[int], bool]:
    """Where the stages end that share ranks, and whether that is proven to be the best."""
    assert terms.placement is not None, "it says which ranks they share"
    pace, toll = 1.0, 0.0
    if terms.objective is SplitObjective.STEP and terms.microbatches is not None:
        pace, toll = float(terms.microbatches - 1), 1.0
    problem = SharedChain.of(chain, terms.placement, pace=pace, toll=toll)
    # To begin with, the stages among themselves.
    free = replace(chain, limits=(math.inf,) * chain.num_stages)
    level_pace = least_bottleneck(free)
    assert level_pace is not None, "without limits there is a split"
    begin = cheapest(free, level_pace * (1 + 1e-12), level)
    ends, is_proven = best_split(problem, begin, slack)
    fullest, _, _ = MutableSplit(problem, ends).value()
    if fullest > 1:
        raise no_room(chain, terms, "the least found to work", fullest)
    return ends, is_proven


def weigh(costs: BlockTimes, counts: Sequence[int], *, placement: Placement) -> Balance:
    """What a given split comes to on ranks that hold several stages; nothing is proven of it.

    Args:
        costs: as ``balance`` takes them.
        counts: the number of blocks per stage, in order.
        placement: which rank holds which stages.
    """
    terms = Terms(num_stages=len(counts), placement=placement)
    blocks = blocks_of(costs)
    ends = list(accumulate(counts, initial=0))
    return balance_of(blocks, chain_of(blocks, terms), terms, ends, is_proven=False)


def balance_of(
    blocks: Sequence[BlockCosts], chain: Chain, terms: Terms, ends: list[int], is_proven: bool
) -> Balance:
    """What the stages that end there come to."""
    spans = list(pairwise(ends))
    ranks = range(chain.num_stages) if terms.placement is None else terms.placement.stage_ranks
    copies = 1 if terms.placement is None else terms.placement.copies
    loads: list[list[float]] = [[] for _ in range(terms.num_ranks)]
    time_s = []
    for stage, rank in enumerate(ranks):
        i, j = spans[stage % chain.num_stages]
        parts = [block.time_s for block in blocks[i:j]]
        for cut, other in ((i, stage - 1), (j, stage + 1)):
            if 0 < cut < chain.num_blocks and ranks[other] != rank:
                parts.append(chain.crossings[cut])
        time_s.append(math.fsum(parts))
        loads[rank] += parts
    return Balance(
        counts=tuple(j - i for i, j in spans),
        time_s=tuple(time_s[: chain.num_stages]),
        held_bytes=tuple(chain.held[s][j] - chain.held[s][i] for s, (i, j) in enumerate(spans)),
        # A microbatch passes one of the copies.
        rank_time_s=tuple(math.fsum(load) / copies for load in loads),
        is_proven=is_proven,
    )


# --- where nothing fits ------------------------------------------------------------------------


def fullest_share(chain: Chain) -> float:
    """The least share of its limit that the fullest stage can have."""
    # The same search, with the share of its limit that a stage fills in place of its time.
    shares = tuple(
        tuple(held / limit for held in prefix)
        for prefix, limit in zip(chain.held, chain.limits, strict=True)
    )
    free = (math.inf,) * chain.num_stages
    none = (0.0,) * (chain.num_blocks + 1)
    share = least_bottleneck(replace(chain, loads=shares, crossings=none, limits=free))
    assert share is not None, "a split into stages of any size"
    return share


def no_room(chain: Chain, terms: Terms, told: str, share: float) -> PartitionError:
    """The error of a limit that no split keeps to: how much of it would do."""
    # Back from shares to bytes, which are whole numbers but for the last bits.
    least = [math.ceil(limit * share * (1 - 4 * sys.float_info.epsilon)) for limit in terms.limits]
    asked, works = (
        (f"{terms.limits[0]:.0f}", f"{least[0]}")
        if len(set(terms.limits)) == 1
        else (f"{[round(limit) for limit in terms.limits]}", f"{least}")
    )
    return PartitionError(
        f"no split of {chain.num_blocks} blocks into {chain.num_stages} stages keeps to "
        f"memory_limit={asked} bytes with {list(terms.flights)} microbatches in flight; {told} is "
        f"{works}; or make more stages, or smaller microbatches, or recompute activations"
    )
