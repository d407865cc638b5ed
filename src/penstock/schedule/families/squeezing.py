"""Squeezes orders of forwards and backwards: what is idle in them is used, within a memory limit.

V-Half, P = 2, M = 3, rank 0, as its blocks have it and squeezed:

    F0 .. .. .. .. .. F1 f0 .. i0 .. .. F2 f1 .. i1 I0 .. .. f2 .. i2 I1 .. .. .. .. .. I2
    F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 f2 i2 I1 W0 I2 w2 W1 W2

Each rank keeps to its order and runs each step as soon as it can. Where it would wait, it runs
a forward of later in its order, if that is ready and the memory suffices for all that comes in
between; else a weight gradient, the oldest first; and a weight gradient, too, where a forward
would exceed the memory. So weight gradients are put off as long as the memory allows, to be
there where a rank has nothing else to do.

This module knows no family, and no program: times are the caller's estimate of what the steps
will cost, and an order is what comes of them.

Source: arXiv:2405.15362, sec. 3; arXiv:2401.10241, sec. 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement

__all__ = ["PerStage", "Squeezed", "squeeze"]

PerStage: TypeAlias = Sequence[float]
"""The time that a kind of action takes, one number per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeezed:
    """What came of squeezing.

    Args:
        ranks: for each rank, its actions in order.
        makespan: the time of all.
        span: the longest time from a rank's first start to its last end.
    """

    ranks: tuple[tuple[Action, ...], ...]
    makespan: float
    span: float


def squeeze(
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    *,
    limit: int,
    spare: int | None = None,
    overtake: bool = False,
    costs: tuple[PerStage, PerStage, PerStage] | None = None,
    within: float = inf,
) -> Squeezed:
    """Orders without what is idle in them.

    Args:
        placement: which rank holds which stage.
        orders: for each rank its forwards and, in the order of the microbatches for each stage,
            input gradients or full backwards. Weight gradients are added, unless they are there:
            then the orders stay as they are, and it is their times that are asked for.
        limit: the most activations that a rank may hold at once.
        spare: how many of those a forward that is run ahead of its turn must leave free, unless
            it is on the last of its rank's stages, whose activations live shortest; None to run
            none ahead.
        overtake: whether backwards may be run ahead of their turn as well. This keeps going
            where an order needs more memory than there is.
        costs: of forwards, input gradients and weight gradients, per stage; by default 1 each.
        within: where it turns out that the makespan will be longer, the rest is left: what is
            returned then has no steps, and an endless makespan.

    Raises:
        ScheduleError: the orders can't be kept within the limit.

    Example:
        >>> from penstock.schedule.placement import linear
        >>> order = [action(0, op, mb) for mb in (0, 1) for op in (Op.FORWARD, Op.INPUT_GRAD)]
        >>> found = squeeze(linear(1), [order], limit=2)
        >>> " ".join(map(str, found.ranks[0])), found.makespan
        ('0F0 0I0 0F1 0I1 0W0 0W1', 6.0)
    """
    unit = (1.0,) * placement.num_stages
    play = _Play(placement, orders, limit, spare, overtake, costs or (unit, unit, unit), within)
    play.run()
    if play.is_late:
        return Squeezed(ranks=(), makespan=inf, span=inf)
    return Squeezed(
        ranks=tuple(tuple(rank.steps) for rank in play.ranks),
        makespan=max(rank.free for rank in play.ranks),
        span=max(rank.free - rank.began for rank in play.ranks),
    )


class _Rank:
    """What one rank has done, and what is left of its order."""

    __slots__ = (
        "began",
        "changes",
        "free",
        "held",
        "idle",
        "kinds",
        "last",
        "left",
        "order",
        "places",
        "rest",
        "steps",
        "taken",
        "waiting",
    )

    def __init__(self, order: Sequence[Action], last: int) -> None:
        self.order = order
        # The first place of the order that has not been taken, and which later ones have.
        self.left = 0
        self.taken = bytearray(len(order))
        # What each step adds to what is held, once all weight gradients are done; of one that has
        # been taken, nothing more.
        self.changes = [1 if act.op is Op.FORWARD else -1 for act in order]
        # Places by stage and kind, each the next of its kind last: what may be run ahead.
        self.places: dict[tuple[int, Op], list[int]] = {}
        for place in reversed(range(len(order))):
            act = order[place]
            self.places.setdefault((act.stage, act.op), []).append(place)
        self.kinds = tuple(self.places.items())
        self.last = last
        self.steps: list[Action] = []
        self.waiting: deque[Action] = deque()
        self.held = 0
        self.idle = False
        self.free = 0.0
        self.began = inf
        # The time that all that is left will take.
        self.rest = 0.0

    def has_room(self, place: int, limit: int) -> bool:
        """Whether the forward at ``place`` can go ahead of all before it, within ``limit``."""
        held = self.held - len(self.waiting) + 1
        between = accumulate(self.changes[self.left : place], initial=held)
        return self.held < limit and max(between) <= limit


class _Play:
    """All ranks, played against each other in order of time."""

    def __init__(
        self,
        placement: Placement,
        orders: Sequence[Sequence[Action]],
        limit: int,
        spare: int | None,
        overtake: bool,
        costs: tuple[PerStage, PerStage, PerStage],
        within: float,
    ) -> None:
        self.rank_of = placement.stage_ranks
        self.limit, self.spare, self.overtake = limit, spare, overtake
        self.forward, self.input_grad, self.weight_grad = costs
        self.complete = any(act.op is Op.WEIGHT_GRAD for act in orders[0])
        self.width = 1 + max((a.microbatch or 0 for order in orders for a in order), default=0)
        self.ranks = [
            _Rank(order, placement.stages_of(rank)[-1]) for rank, order in enumerate(orders)
        ]
        for rank, order in zip(self.ranks, orders, strict=True):
            rank.rest = sum(map(self.length, order))
            if not self.complete:
                weights = (act.stage for act in order if act.op is Op.INPUT_GRAD)
                rank.rest += sum(self.weight_grad[stage] for stage in weights)
        # Sums of times come out a little differently in another order.
        self.within, self.is_late = within * (1 + 1e-9), False
        # When the forward, and the input gradient, of a stage and microbatch is done.
        size = placement.num_stages * self.width
        self.ahead, self.back = [inf] * size, [inf] * size
        # Time, whether all others have had their turn at that time, rank.
        self.events = [(0.0, False, rank) for rank in range(len(orders))]
        heapify(self.events)

    def run(self) -> None:
        """Take all ranks to the end of their orders, or until it is too late for that."""
        while self.events and not self.is_late:
            time, late, number = heappop(self.events)
            rank = self.ranks[number]
            # Of a rank that is busy meanwhile, the event at the end of its step is to come.
            if rank.free <= time:
                rank.idle = False
                self.turn(number, rank, time, late=late)
        if self.is_late:
            return
        for number, rank in enumerate(self.ranks):
            if rank.left < len(rank.order):
                raise ScheduleError(
                    f"rank {number} can't go on to {rank.order[rank.left]} within {self.limit} "
                    "activations; give it more, or another order"
                )

    def turn(self, number: int, rank: _Rank, time: float, *, late: bool) -> None:
        """Let a rank that is free do what is best now, if anything."""
        if rank.left == len(rank.order):
            if rank.waiting:
                self.weigh(number, rank, time)
            return
        head = rank.order[rank.left]
        ready = self.ready(head)
        full = head.op is Op.FORWARD and rank.held >= self.limit
        if ready <= time and not full:
            self.take(number, rank, rank.left, time)
            return
        if ready == inf and not late:
            # What it waits for may be started by another rank, at this very time.
            heappush(self.events, (time, True, number))
            return
        if self.spare is not None or self.overtake:
            place = self.other(rank, time)
            # What is only just about to come is worth waiting for.
            if place is not None and (full or ready - time >= self.length(rank.order[place])):
                self.take(number, rank, place, time)
                return
        if rank.waiting and (full or ready - time >= self.weight_grad[rank.waiting[0].stage]):
            self.weigh(number, rank, time)
            return
        rank.idle = True
        for _, places in rank.kinds:
            if places and time < (ready := self.ready(rank.order[places[-1]])) < inf:
                heappush(self.events, (ready, False, number))

    def other(self, rank: _Rank, time: float) -> int | None:
        """The place of the first step after the next one that may go ahead of it now."""
        found = len(rank.order)
        for (stage, op), places in rank.kinds:
            if not places or not rank.left < places[-1] < found:
                continue
            place = places[-1]
            if self.ready(rank.order[place]) > time:
                continue
            if op is not Op.FORWARD:
                found = place if self.overtake else found
            elif self.spare is not None:
                free = 0 if stage == rank.last else self.spare
                found = place if rank.has_room(place, self.limit - free) else found
        return found if found < len(rank.order) else None

    def ready(self, act: Action) -> float:
        """When all that ``act`` needs is there; infinity as long as that is not known."""
        code = act.stage * self.width + (act.microbatch or 0)
        if act.op is Op.FORWARD:
            return self.ahead[code - self.width] if act.stage else 0.0
        if act.op is Op.WEIGHT_GRAD:
            return self.back[code]
        if act.stage == len(self.rank_of) - 1:
            return self.ahead[code]
        return max(self.ahead[code], self.back[code + self.width])

    def length(self, act: Action) -> float:
        """The time that ``act`` takes."""
        if act.op is Op.FORWARD:
            return self.forward[act.stage]
        if act.op is Op.INPUT_GRAD:
            return self.input_grad[act.stage]
        if act.op is Op.WEIGHT_GRAD:
            return self.weight_grad[act.stage]
        return self.input_grad[act.stage] + self.weight_grad[act.stage]

    def take(self, number: int, rank: _Rank, place: int, time: float) -> None:
        """Run the step at ``place`` of the rank's order, and tell who may wait for it."""
        act = rank.order[place]
        rank.taken[place] = 1
        rank.changes[place] = 0
        while rank.left < len(rank.order) and rank.taken[rank.left]:
            rank.left += 1
        rank.places[act.stage, act.op].pop()
        end = time + self.length(act)
        code = act.stage * self.width + (act.microbatch or 0)
        if act.op is Op.FORWARD:
            self.ahead[code] = end
            rank.held += 1
            consumer = act.stage + 1
        elif act.op is Op.WEIGHT_GRAD:
            rank.held -= 1
            consumer = -1
        else:
            self.back[code] = end
            consumer = act.stage - 1
            if act.op is Op.FULL_BACKWARD:
                rank.held -= 1
            elif not self.complete:
                rank.waiting.append(act)
        self.end(number, rank, act, time, end)
        if 0 <= consumer < len(self.rank_of) and self.ranks[self.rank_of[consumer]].idle:
            heappush(self.events, (end, False, self.rank_of[consumer]))

    def weigh(self, number: int, rank: _Rank, time: float) -> None:
        """Run the oldest weight gradient."""
        act = rank.waiting.popleft()
        rank.held -= 1
        weight = action(act.stage, Op.WEIGHT_GRAD, act.microbatch)
        self.end(number, rank, weight, time, time + self.weight_grad[act.stage])

    def end(self, number: int, rank: _Rank, act: Action, time: float, end: float) -> None:
        """Note a step of a rank, and let it have its next turn when the step ends."""
        rank.steps.append(act)
        rank.began = min(rank.began, time)
        rank.free = end
        rank.rest -= end - time
        if end + rank.rest > self.within:
            self.is_late = True
        heappush(self.events, (end, False, number))
