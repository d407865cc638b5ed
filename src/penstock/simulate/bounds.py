"""Times that no program can beat, each with its argument: pure functions of costs and placement.

What a rank owes is fixed: of each stage it holds, a forward and a backward per microbatch. What it
may do when is not, but for the chain that a microbatch goes through:

    stage 0   F ╲                       ╱ I  W
    stage 1      F ╲                 ╱ I
    stage 2         F ╲           ╱ I
    stage 3            F ─────► I

    head(r)     from the step's start until the chain first comes to rank r
    turn(s)     from the start of F on stage s until its gradient can be back there
    tail(s)     from the end of I on stage s until the chain has left the pipeline

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
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement, looped
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
    """The least makespan and the least span of any program.

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
    placed = looped(ranks, virtual) if placement is None else placement
    if placed.num_ranks != ranks:
        raise ScheduleError(
            f"lower_bounds: ranks={ranks}, but the placement is one of {placed.num_ranks} ranks"
        )
    if microbatches < 1:
        raise ScheduleError(f"lower_bounds: microbatches={microbatches}; a step takes at least one")
    chains = _chains(costs, placed, microbatches, backward)
    if memory_limit is not None and backward:
        least = least_memory(costs, placement=placed)
        if not memory_limit >= least:
            raise ScheduleError(
                f"no program holds as little as memory_limit={memory_limit:g}: one microbatch "
                f"alone takes {least:g} on some rank; give at least that, or offload"
            )
    makespans: list[Bound] = []
    spans: list[Bound] = []
    for rank in range(ranks):
        owed = [stage for stage in chains if stage.rank == rank and stage.count]
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


def least_memory(costs: Costs, *, placement: Placement) -> float:
    """The least that any program without offload holds at once on its fullest rank.

    When a microbatch has come to the last of a rank's stages, the rank holds its activations on
    all of them: none of its backwards has run.

    Args:
        costs: for what an activation takes.
        placement: which rank holds which stage.
    """
    sizes, _ = costs.held(num_stages=placement.num_stages)
    held = {
        (rank, placement.copy_of(stage)): 0.0 for stage, rank in enumerate(placement.stage_ranks)
    }
    for stage, rank in enumerate(placement.stage_ranks):
        held[rank, placement.copy_of(stage)] += sizes[stage]
    return max(held.values())


@dataclass(slots=True, kw_only=True)
class _Stage:
    """What a stage owes, and the chain from it: each time is the least that it can come to."""

    rank: int
    count: int  # microbatches that go through it
    forward: float
    input_grad: float
    backward: float  # I and W together
    owed: float  # F, I and W, less what a block may save
    owed_to_input: float  # F and I, less what a block may save
    held: float
    held_for_weights: float  # the less of what is held before and after I
    work: float  # F where no block saves any of it: the most that it comes to
    head: float = 0.0
    turn: float = 0.0
    tail: float = 0.0  # where there is no backward: after F


def _chains(costs: Costs, placement: Placement, microbatches: int, backward: bool) -> list[_Stage]:
    """All stages, by number; each copy of a model is a chain of its own."""
    size = placement.num_stages
    costs.refuse_misfits(num_stages=size)
    stages = _stages(costs, placement, microbatches)

    def hop(stage: int, other: int) -> float:
        if placement.same_rank(stage, other):
            return 0.0
        latency = costs.latency_between(stage, other, num_stages=size)
        return latency + costs.transfer(stage, other, num_stages=size)

    for number, stage in enumerate(stages):
        ahead = placement.neighbour(number, -1)
        if ahead is not None:
            lower = stages[ahead]
            stage.head = lower.head + lower.forward + hop(ahead, number)
            last = max(lower.backward, lower.input_grad + lower.tail)
            stage.tail = hop(number, ahead) + last if backward else 0.0
    for number in reversed(range(size)):
        stage, behind = stages[number], placement.neighbour(number, +1)
        stage.turn = stage.forward
        if behind is not None:
            higher, there, back = stages[behind], hop(number, behind), hop(behind, number)
            stage.turn += there + higher.turn + higher.input_grad + back
            if not backward:
                stage.tail = there + higher.forward + higher.tail
    return stages


def _stages(costs: Costs, placement: Placement, microbatches: int) -> list[_Stage]:
    """What each stage owes; nothing yet of the chain."""
    size, copies = placement.num_stages, placement.copies
    forward = costs.of(Op.FORWARD, num_stages=size)
    by_input = costs.of(Op.INPUT_GRAD, num_stages=size)
    full = costs.of(Op.FULL_BACKWARD, num_stages=size)
    before, after = costs.held(num_stages=size)
    blocks = [math.inf] * placement.num_ranks
    longest = [0.0] * placement.num_ranks
    if costs.overlap is not None:
        for stage, length in enumerate(costs.per_stage("overlap", num_stages=size)):
            rank = placement.rank_of(stage)
            blocks[rank] = min(blocks[rank], length)
            longest[rank] = max(longest[rank], full[stage])
    stages = []
    for stage, rank in enumerate(placement.stage_ranks):
        least = blocks[rank]
        # At best each forward stands in the shortest block, with the longest backward.
        saved = max(0.0, forward[stage] + longest[rank] - least)
        stages.append(
            _Stage(
                rank=rank,
                count=len(range(placement.copy_of(stage), microbatches, copies)),
                forward=min(forward[stage], least),
                input_grad=min(by_input[stage], least),
                backward=min(full[stage], least),
                owed=forward[stage] + full[stage] - saved,
                owed_to_input=forward[stage] + by_input[stage] - saved,
                held=before[stage],
                held_for_weights=min(before[stage], after[stage]),
                work=forward[stage],
            )
        )
    return stages


def _rank_bounds(
    stages: Sequence[_Stage], rank: int, memory_limit: float | None, backward: bool
) -> tuple[list[Bound], list[Bound]]:
    """The bounds on makespan and span that the stages of one rank give."""
    head = min(stage.head for stage in stages)
    tail = min(stage.tail for stage in stages)
    if not backward:
        owed = sum(stage.count * stage.forward for stage in stages)
        path = max(stage.head + stage.forward + stage.tail for stage in stages)
        return (
            [
                Bound(value=owed, argument=Argument.COMPUTE, rank=rank),
                Bound(value=path, argument=Argument.PATH, rank=rank),
                Bound(value=head + owed + tail, argument=Argument.WARM_UP, rank=rank),
            ],
            [Bound(value=owed, argument=Argument.COMPUTE, rank=rank)],
        )
    owed = sum(stage.count * stage.owed for stage in stages)
    to_input = sum(stage.count * stage.owed_to_input for stage in stages)
    turn = min(stage.turn for stage in stages)
    arrival = min(stage.head + stage.turn for stage in stages)

    def warm_up(work: float) -> tuple[float, float]:
        """The bounds on makespan and span if no more than ``work`` is done up to the first I."""
        begun = arrival - min(arrival - head, work)
        makespan = begun + max(owed, to_input + tail)
        return makespan, turn - min(turn, work) + owed

    work = sum(stage.count * stage.work for stage in stages)
    life = max(stage.turn + stage.backward for stage in stages)
    path = max(
        stage.head + stage.turn + max(stage.backward, stage.input_grad + stage.tail)
        for stage in stages
    )
    found = {
        Argument.COMPUTE: (owed, owed),
        Argument.PATH: (path, life),
        Argument.WARM_UP: warm_up(work),
    }
    if memory_limit is not None:
        fitting = warm_up(min(work, _fitting_work(stages, memory_limit)))
        held = max(_memory_time(stages, memory_limit, owed), _rounds(stages, memory_limit))
        found[Argument.MEMORY] = (max(fitting[0], head + held), max(fitting[1], held))
    makespans = [Bound(value=m, argument=a, rank=rank) for a, (m, _) in found.items()]
    spans = [Bound(value=s, argument=a, rank=rank) for a, (_, s) in found.items()]
    return makespans, spans


def _fitting_work(stages: Sequence[_Stage], limit: float) -> float:
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


def _memory_time(stages: Sequence[_Stage], limit: float, owed: float) -> float:
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
    several = math.ceil(limit / largest)
    unused = sum(limit - n * largest for n in range(1, several))
    if (several - 1) * (forward + weights) > owed:
        # The first and the last might be the same.
        unused = 0.0
    return (need + unused * (forward + weights)) / limit


def _rounds(stages: Sequence[_Stage], limit: float) -> float:
    """The least span if each activation frees its place only after its life."""
    longest = 0.0
    for chosen in (stages, *([stage] for stage in stages)):
        smallest = min(stage.held for stage in chosen)
        if smallest <= 0:
            continue
        # Places are as large as the smallest; what is held between I and W may be smaller still.
        places = _whole(limit / smallest)
        life = min(
            stage.turn
            + (stage.input_grad if stage.held_for_weights < stage.held else stage.backward)
            for stage in chosen
        )
        count = sum(stage.count for stage in chosen)
        rounds, rest = divmod(count - 1, max(1, places))
        forward = min(stage.forward for stage in chosen)
        longest = max(longest, (rounds + 1) * life + rest * forward)
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
