"""Times that no program can beat, each with its argument: pure functions of costs and placement.

They are made of what a stage owes, and of ``head``, ``turn`` and ``tail`` of the chain that a
microbatch goes through (``penstock.simulate.chains``).

The arguments, for each rank r; the greatest is the bound:

- COMPUTE: a rank does one thing at a time. Its span is at least what it owes.
- PATH: one microbatch goes down and up the whole chain. A span lasts at least a turn, I and W.
- WARM_UP: up to its first I a rank can do nothing but forwards, and those after its head. The I
  can't start before head and turn; what it owes beyond those forwards comes after. And the last I
  on its lowest stage comes after all other F and I of the rank, and before its tail.
- MEMORY: up to its first I a rank frees nothing, so of forwards there fit only as many as memory
  holds. An activation is held for a turn, I and W: all of them together can't take more than the
  limit x the span, less what is not yet, or no longer, in use while the first come and the last
  go. And of K that fit, each one frees its place after that time at the earliest, so that the
  forwards come in rounds of K.

They hold for every program with these stages on these ranks, whatever its family, if its blocks
hold one forward and one backward; with costs for a block that overlaps, each action is taken to
cost no more than what is left of it in the best such block. MEMORY holds for programs that
neither offload nor recompute. Extra work (recomputation, sequence splits that wait for each other)
only adds to a program's time. This module plays nothing and searches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.errors import ScheduleError
from penstock.schedule.family import refuse_sizes
from penstock.schedule.messages import number_of
from penstock.schedule.placement import Placement, looped
from penstock.simulate.chains import StageChain, chains
from penstock.simulate.costs import Costs

__all__ = ["Argument", "Bound", "LowerBounds", "least_memory", "lower_bounds"]


class Argument(Enum):
    """Why no program is faster; the arguments stand in the module's docstring."""

    COMPUTE = "compute"
    PATH = "path"
    WARM_UP = "warm-up"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One bound.

    Args:
        value: a time that no program can beat.
        argument: why.
        rank: the rank that the argument is about.
    """

    value: float
    argument: Argument
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBounds:
    """What no program can beat.

    Args:
        makespan: the least makespan.
        span: the least span.
        makespan_by: the argument that gave it.
        span_by: likewise.
        makespans: for each argument that applies, its best bound on the makespan.
        spans: likewise on the span.
    """

    makespan: float
    span: float
    makespan_by: Argument
    span_by: Argument
    makespans: tuple[Bound, ...]
    spans: tuple[Bound, ...]


def lower_bounds(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    virtual: int = 1,
    placement: Placement | None = None,
    memory_limit: float | None = None,
    backward: bool = True,
) -> LowerBounds:
    """The least makespan and the least span of any program of these stages.

    Where costs tell of blocks that overlap: of any whose blocks hold a forward and a backward each.

    Args:
        costs: what each kind of action costs.
        ranks: number of ranks.
        microbatches: number of microbatches, at least 1.
        virtual: stages per rank, in loops, where there is no ``placement``.
        placement: which rank holds which stage.
        memory_limit: the most that a rank may hold at once, in activations, or in bytes where
            ``costs.activation_bytes`` is given; None where memory is no limit.
        backward: whether there are backwards.

    Returns:
        The bounds, and which argument gave each.

    Raises:
        ScheduleError: a memory limit that no program can meet (the message says the least that
            one can); a placement for another number of ranks; costs for another number of stages.

    Example:
        >>> bounds = lower_bounds(Costs(), ranks=4, microbatches=8)
        >>> bounds.makespan, bounds.makespan_by.value, bounds.span
        (27.0, 'warm-up', 24.0)
        >>> lower_bounds(Costs(), ranks=4, microbatches=8, memory_limit=2).makespan
        37.0
    """
    refuse_sizes("lower_bounds", ranks=ranks, microbatches=microbatches, virtual=virtual)
    placed = looped(ranks, virtual) if placement is None else placement
    if placed.num_ranks != ranks:
        raise ScheduleError(
            f"lower_bounds: ranks={ranks}, but the placement is one of "
            f"{number_of(placed.num_ranks, 'rank')}"
        )
    stages = chains(costs, placed, microbatches, backward)
    if memory_limit is not None and backward:
        least = least_memory(costs, placement=placed, microbatches=microbatches)
        if not memory_limit >= least:
            raise ScheduleError(
                f"no program holds as little as memory_limit={memory_limit:g}: one microbatch "
                f"alone takes {least:g} on some rank; give at least that, or offload"
            )
    makespans: list[Bound] = []
    spans: list[Bound] = []
    for rank in range(ranks):
        owed = [stage for stage in stages if stage.rank == rank and stage.count]
        if owed:
            found = _rank_bounds(owed, rank, memory_limit, backward)
            makespans += found[0]
            spans += found[1]
    return LowerBounds(
        makespan=max(bound.value for bound in makespans),
        span=max(bound.value for bound in spans),
        makespan_by=max(makespans, key=_value).argument,
        span_by=max(spans, key=_value).argument,
        makespans=_best(makespans),
        spans=_best(spans),
    )


def least_memory(costs: Costs, *, placement: Placement, microbatches: int) -> float:
    """The least that any program without offload holds at once on its fullest rank.

    When a microbatch has come to the last of a rank's stages, the rank holds its activations on
    all of them: none of its backwards has run.

    Args:
        costs: for what an activation takes.
        placement: which rank holds which stage.
        microbatches: number of microbatches; with fewer than copies, some copies hold nothing.
    """
    sizes, _ = costs.held(num_stages=placement.num_stages)
    held: dict[tuple[int, int], float] = {}
    for stage, rank in enumerate(placement.stage_ranks):
        copy = placement.copy_of(stage)
        if copy < microbatches:
            held[rank, copy] = held.get((rank, copy), 0.0) + sizes[stage]
    return max(held.values())


def _rank_bounds(
    stages: Sequence[StageChain], rank: int, memory_limit: float | None, backward: bool
) -> tuple[list[Bound], list[Bound]]:
    """The bounds on makespan and span that the stages of one rank give."""
    found = _both_ways(stages, memory_limit) if backward else _forwards_alone(stages)
    return (
        [Bound(value=m, argument=a, rank=rank) for a, (m, _) in found.items()],
        [Bound(value=s, argument=a, rank=rank) for a, (_, s) in found.items()],
    )


def _forwards_alone(stages: Sequence[StageChain]) -> dict[Argument, tuple[float, float]]:
    """For each argument its bounds on makespan and span, where there are no backwards."""
    head, tail = min(stage.head for stage in stages), min(stage.tail for stage in stages)
    owed = sum(stage.count * stage.forward for stage in stages)
    path = max(stage.head + stage.forward + stage.tail for stage in stages)
    one = max(stage.forward for stage in stages)
    return {
        Argument.COMPUTE: (owed, owed),
        Argument.PATH: (path, one),
        Argument.WARM_UP: (head + owed + tail, owed),
    }


def _both_ways(
    stages: Sequence[StageChain], memory_limit: float | None
) -> dict[Argument, tuple[float, float]]:
    """For each argument its bounds on makespan and span, forwards and backwards."""
    head = min(stage.head for stage in stages)
    owed = sum(stage.count * stage.owed for stage in stages)
    work = sum(stage.count * stage.work for stage in stages)
    path = max(
        stage.head + stage.turn + max(stage.backward, stage.input_grad + stage.tail)
        for stage in stages
    )
    found = {
        Argument.COMPUTE: (owed, owed),
        Argument.PATH: (path, max(stage.turn + stage.backward for stage in stages)),
        Argument.WARM_UP: _warm_up(stages, work),
    }
    if memory_limit is not None:
        # More than everything at once is held by none.
        memory_limit = min(memory_limit, sum(stage.count * stage.held for stage in stages))
        makespan, span = _warm_up(stages, min(work, _fitting_work(stages, memory_limit)))
        held = max(_memory_time(stages, memory_limit, owed), _rounds(stages, memory_limit))
        found[Argument.MEMORY] = (max(makespan, head + held), max(span, held))
    return found


def _warm_up(stages: Sequence[StageChain], work: float) -> tuple[float, float]:
    """The bounds on makespan and span if no more than ``work`` is done up to the first I."""
    head, tail = min(stage.head for stage in stages), min(stage.tail for stage in stages)
    owed = sum(stage.count * stage.owed for stage in stages)
    to_input = sum(stage.count * stage.owed_to_input for stage in stages)
    turn = min(stage.turn for stage in stages)
    arrival = min(stage.head + stage.turn for stage in stages)
    begun = arrival - min(arrival - head, work)
    return begun + max(owed, to_input + tail), turn - min(turn, work) + owed


def _fitting_work(stages: Sequence[StageChain], limit: float) -> float:
    """The most forward work whose activations fit: the densest first, the last one in part."""
    sizes = {stage.held for stage in stages}
    if len(sizes) == 1 and (size := sizes.pop()) > 0:
        # Of activations of one size only whole ones fit.
        limit = size * _whole(limit / size)
    work = 0.0
    for stage in sorted(stages, key=lambda s: s.work / s.held if s.held else math.inf)[::-1]:
        room = math.inf if stage.held == 0 else limit / stage.held
        taken = min(float(stage.count), room)
        work += taken * stage.work
        limit -= taken * stage.held
    return work


def _memory_time(stages: Sequence[StageChain], limit: float, owed: float) -> float:
    """The least span in which all activations have their memory for as long as they need it."""
    need = sum(
        stage.count
        * (
            stage.held * (stage.turn + min(stage.input_grad, stage.backward))
            + stage.held_for_weights * (stage.backward - min(stage.input_grad, stage.backward))
        )
        for stage in stages
    )
    largest = max(stage.held for stage in stages)
    if limit <= 0 or largest <= 0:
        return 0.0
    # Activations come one by one: of n forwards begun, n are held at most; and so they go.
    forward = min(stage.forward for stage in stages)
    weights = min(stage.backward - stage.input_grad for stage in stages)
    fewer = math.ceil(limit / largest) - 1
    unused = fewer * (limit - largest * (fewer + 1) / 2)
    if fewer * (forward + weights) > owed:
        # The first and the last might be the same.
        unused = 0.0
    return (need + unused * (forward + weights)) / limit


def _rounds(stages: Sequence[StageChain], limit: float) -> float:
    """The least span if each activation frees its place only after its life."""
    longest = 0.0
    for chosen in (stages, *([stage] for stage in stages)):
        smallest = min(stage.held for stage in chosen)
        if smallest <= 0:
            continue
        # Places are as large as the smallest; what is held between I and W may be smaller still.
        places = max(1, _whole(limit / smallest))
        life = min(
            stage.turn
            + (stage.input_grad if stage.held_for_weights < stage.held else stage.backward)
            for stage in chosen
        )
        count = sum(stage.count for stage in chosen)
        rounds, rest = divmod(count - 1, places)
        forward = min(stage.forward for stage in chosen)
        # A round lasts as long as the forwards that it takes, too.
        longest = max(longest, rounds * max(life, places * forward) + rest * forward + life)
    return longest


def _best(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
    """For each argument its greatest bound."""
    found = (
        max((b for b in bounds if b.argument is argument), key=_value, default=None)
        for argument in Argument
    )
    return tuple(bound for bound in found if bound is not None)


def _whole(number: float) -> int:
    """``number`` rounded down; what a rounding error alone keeps from the next one is that."""
    return math.floor(number * (1 + 1e-12) + 1e-12)


def _value(bound: Bound) -> float:
    return bound.value
