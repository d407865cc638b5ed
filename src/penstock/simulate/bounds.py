"""Lower bounds on makespan and span, each with its proof, from costs and placement.

The work of a rank is fixed: a forward and a backward per microbatch of each stage it holds. The
order is free, except that each microbatch passes the chain of stages:

    stage 0   F ╲                       ╱ I  W        head    from the step's start until the chain
    stage 1      F ╲                 ╱ I                      first comes to a stage
    stage 2         F ╲           ╱ I                 turn    from the start of F until its gradient
    stage 3            F ─────► I                             can be back
                                                      tail    from the end of I to the chain's end

Each argument gives a bound per rank; the greatest one counts:

- PATH: one microbatch passes the whole chain forward and backward. A span lasts at least a turn, I
  and W.
- WARM_UP: a rank runs one action at a time. Before its first I it can run only forwards, and none
  before its head. The I can't start before head and turn, and all remaining work follows it.
  Likewise, the last I on the rank's lowest stage follows all its other F and I, and precedes its
  tail. The chain comes home to the rank that started first: what precedes that is in its span.
- MEMORY: before its first I a rank frees no memory, so memory limits the number of its forwards. An
  activation is held for at least a turn, I and W. Summed over all activations, memory x time can't
  exceed the limit x the span, less the memory unused during warm-up and cool-down. If K activations
  fit, each frees its place after that time at the earliest, so forwards run in rounds of K; and all
  but K of the W precede the last F, and so the last I.

The bounds hold for every program with these stages on these ranks. With costs of overlap, each
action counts with its least cost in any pair. MEMORY holds for programs that neither offload nor
recompute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.simulate.costs import Costs
from penstock.simulate.memory import StageMemory

__all__ = ["LowerBounds", "lower_bounds"]


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Lower bounds on the makespan and the span of all programs."""

    makespan: float
    span: float


def lower_bounds(
    costs: Costs,
    placement: Placement,
    *,
    microbatches: int,
    memory_limit: float | None = None,
    backward: bool = True,
) -> LowerBounds:
    """Lower bounds on makespan and span of all programs with these stages.

    Args:
        costs: the cost of each kind of action.
        placement: the rank of every stage.
        microbatches: number of microbatches, at least 1.
        memory_limit: the most memory that a rank may hold, in activations, or in bytes if
            ``costs.activation_bytes`` is given; None for no limit. Some program must fit.
        backward: True if the program has backwards.

    Raises:
        ScheduleError: the costs are for another number of stages.

    Examples:
        >>> from penstock.schedule.placement import linear
        >>> lower_bounds(Costs(), linear(4), microbatches=8)
        LowerBounds(makespan=27.0, span=24.0)
        >>> lower_bounds(Costs(), linear(4), microbatches=8, memory_limit=2).makespan
        37.0
    """
    stages = _chains(costs, placement, microbatches, backward)
    found = [(0.0, 0.0)]
    for rank in range(placement.num_ranks):
        owed = [stage for stage in stages if stage.rank == rank and stage.count]
        if owed:
            one_way = placement.num_directions == 1
            found += _both_ways(owed, memory_limit, one_way) if backward else _forwards_alone(owed)
    return LowerBounds(*map(max, zip(*found, strict=True)))


@dataclass(slots=True, kw_only=True)
class _Chain:
    """The work of a stage, and lower bounds on the times of the chain from it."""

    rank: int
    count: int  # microbatches that go through it
    forward: float
    input_grad: float
    backward: float  # I and W together
    owed: float  # F, I and W, less the largest saving in a pair
    owed_to_input: float  # F and I, less the largest saving in a pair
    held: float
    held_for_weights: float  # the smaller of the memory before and after I
    work: float  # F without the saving of a pair: an upper bound
    head: float = 0.0
    turn: float = 0.0
    tail: float = 0.0  # without backwards: after F
    home: float = 0.0  # from the end of I to that of the first stage's backward


def _chains(costs: Costs, placement: Placement, microbatches: int, backward: bool) -> list[_Chain]:
    """The chains of all stages, by number; each copy of a model is a chain of its own."""
    costs.refuse_misfits(placement)
    size = placement.num_stages
    forward, by_input, full = (
        costs.of(op, num_stages=size) for op in (Op.FORWARD, Op.INPUT_GRAD, Op.FULL_BACKWARD)
    )
    memory = StageMemory.of(costs, size)
    lengths: Sequence[float] = [math.inf] * size
    if costs.overlap is not None:
        lengths = costs.per_stage("overlap", num_stages=size)
    stages: list[_Chain] = []
    # The best case: each forward in its rank's shortest pair, with the longest backward.
    held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    best = [(min(lengths[i] for i in mine), max(full[i] for i in mine)) for mine in held]
    for number, rank in enumerate(placement.stage_ranks):
        pair, longest = best[rank]
        saved = max(0.0, forward[number] + longest - pair)
        first, step = placement.direction_of(number), placement.num_directions
        stage = _Chain(
            rank=rank,
            count=len(range(first, microbatches, step)),
            forward=min(forward[number], pair),
            input_grad=min(by_input[number], pair),
            backward=min(full[number], pair),
            owed=forward[number] + full[number] - saved,
            owed_to_input=forward[number] + by_input[number] - saved,
            held=memory.activation[number],
            held_for_weights=min(memory.activation[number], memory.weight_grad[number]),
            work=forward[number],
        )
        stages.append(stage)
        ahead = placement.neighbour(number, -1)
        if ahead is not None:
            lower = stages[ahead]
            stage.head = lower.head + lower.forward + costs.travel(ahead, number, placement)
            last = max(lower.backward, lower.input_grad + lower.tail)
            stage.tail = costs.travel(number, ahead, placement) + last if backward else 0.0
            is_home = placement.neighbour(ahead, -1) is None
            rest = lower.backward if is_home else lower.input_grad + lower.home
            stage.home = costs.travel(number, ahead, placement) + rest
    for number in reversed(range(size)):
        stage, behind = stages[number], placement.neighbour(number, +1)
        stage.turn = stage.forward
        if behind is not None:
            higher, there = stages[behind], costs.travel(number, behind, placement)
            back = costs.travel(behind, number, placement)
            stage.turn += there + higher.turn + higher.input_grad + back
            if not backward:
                stage.tail = there + higher.forward + higher.tail
    return stages


def _forwards_alone(stages: Sequence[_Chain]) -> list[tuple[float, float]]:
    """Bounds on makespan and span, for forwards alone."""
    head, tail = min(stage.head for stage in stages), min(stage.tail for stage in stages)
    owed = sum(stage.count * stage.forward for stage in stages)
    path = max(stage.head + stage.forward + stage.tail for stage in stages)
    return [(path, max(stage.forward for stage in stages)), (head + owed + tail, owed)]


def _both_ways(
    stages: Sequence[_Chain], limit: float | None, one_way: bool
) -> list[tuple[float, float]]:
    """Bounds on makespan and span, with backwards; ``one_way`` for one copy of the model."""
    work = sum(stage.count * stage.work for stage in stages)
    path = max(
        stage.head + stage.turn + max(stage.backward, stage.input_grad + stage.tail)
        for stage in stages
    )
    found = [
        (path, max(stage.turn + stage.backward for stage in stages)),
        _warm_up(stages, work, one_way),
    ]
    if limit is not None:
        # No program holds more than all activations at once.
        limit = min(limit, sum(stage.count * stage.held for stage in stages))
        held = max(_memory_time(stages, limit), _rounds(stages, limit))
        found.append(_warm_up(stages, min(work, _fitting_work(stages, limit)), one_way, limit))
        found.append((min(stage.head for stage in stages) + held, held))
    return found


def _warm_up(
    stages: Sequence[_Chain], work: float, one_way: bool, limit: float = math.inf
) -> tuple[float, float]:
    """The bounds on makespan and span if at most ``work`` is done before the first I."""
    head, tail = min(stage.head for stage in stages), min(stage.tail for stage in stages)
    owed = sum(stage.count * stage.owed for stage in stages)
    to_input = sum(stage.count * stage.owed_to_input for stage in stages)
    smallest = min(stage.held_for_weights for stage in stages)
    if smallest > 0 and limit < math.inf:
        done = max(0, sum(stage.count for stage in stages) - _whole(limit / smallest))
        to_input += done * min(stage.owed - stage.owed_to_input for stage in stages)
    turn = min(stage.turn for stage in stages)
    arrival = min(stage.head + stage.turn for stage in stages)
    begun = arrival - min(arrival - head, work)
    home = begun + to_input + min(stage.home for stage in stages)
    return (
        begun + max(owed, to_input + tail),
        max(turn - min(turn, work) + owed, home if one_way else 0.0),
    )


def _fitting_work(stages: Sequence[_Chain], limit: float) -> float:
    """The most forward work whose activations fit: densest first, the last one fractional."""
    sizes = {stage.held for stage in stages}
    if len(sizes) == 1 and (size := sizes.pop()) > 0:
        # Activations of equal size fit only in whole numbers.
        limit = size * _whole(limit / size)
    work = 0.0
    for stage in sorted(stages, key=lambda s: s.work / s.held if s.held else math.inf)[::-1]:
        room = math.inf if stage.held == 0 else limit / stage.held
        taken = min(float(stage.count), room)
        work += taken * stage.work
        limit -= taken * stage.held
    return work


def _memory_time(stages: Sequence[_Chain], limit: float) -> float:
    """The least span in which every activation has its memory for its lifetime."""
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
    # Activations come one by one: of n forwards begun, at most n are held; likewise at the end.
    forward = min(stage.forward for stage in stages)
    weights = min(stage.backward - stage.input_grad for stage in stages)
    fewer = math.ceil(limit / largest) - 1
    unused = fewer * (limit - largest * (fewer + 1) / 2)
    if fewer * (forward + weights) > sum(stage.count * stage.owed for stage in stages):
        # The first and the last activation may be the same.
        unused = 0.0
    return (need + unused * (forward + weights)) / limit


def _rounds(stages: Sequence[_Chain], limit: float) -> float:
    """The least span if each activation frees its place only after its lifetime."""
    longest = 0.0
    for chosen in (stages, *([stage] for stage in stages)):
        smallest = min(stage.held for stage in chosen)
        if smallest <= 0:
            continue
        # Places have the smallest size; memory between I and W may be smaller still.
        places = max(1, _whole(limit / smallest))
        life = min(
            stage.turn
            + (stage.input_grad if stage.held_for_weights < stage.held else stage.backward)
            for stage in chosen
        )
        rounds, rest = divmod(sum(stage.count for stage in chosen) - 1, places)
        forward = min(stage.forward for stage in chosen)
        # A round also lasts at least as long as its forwards.
        longest = max(longest, rounds * max(life, places * forward) + rest * forward + life)
    return longest


def _whole(number: float) -> int:
    """``number`` rounded down, with a tolerance for rounding errors."""
    return math.floor(number * (1 + 1e-12) + 1e-12)
