"""List scheduling: chooses an order, action by action, in the order of time.

Whenever a rank is free, a policy chooses one of its ready actions, or lets it wait.
``ListScheduler`` keeps the times and the readiness; a ``Policy`` holds whatever else decides:
memory, priorities, an order to keep to. The policies are ``list_schedule`` below, the slots of
Chimera (``penstock.schedule.families.chimera``), and the search (``penstock.search``).

Actions are counted by kind, an op and a stage:

    kind     number of the op in (F, I, W) · stages + stage

Microbatches are interchangeable, so each kind runs them in index order without loss of generality.
I also stands for a full backward where backwards are whole; then W is not run. Ties of time go to
the lower rank, so an order is the same on every machine. This module knows no family.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Protocol, TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement
from penstock.schedule.rules import required

__all__ = [
    "KIND_OPS",
    "ListScheduler",
    "PerStage",
    "Policy",
    "Scheduled",
    "kind_needs",
    "list_schedule",
]

KIND_OPS = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)

Needs: TypeAlias = Sequence[Sequence[tuple[int, float]]]
"""For each kind, the kinds that it requires of the same microbatch, and the delays of results."""

PerStage: TypeAlias = Sequence[float]
"""The duration of a kind, one number per stage."""


def kind_needs(
    placement: Placement, delay: Callable[[int, int], float] | None = None
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The required kinds of each kind, from the readiness rules.

    Args:
        placement: the rank of every stage.
        delay: for two stages, the time that a result travels; None for none.
    """
    stages = placement.num_stages
    number = {op: place * stages for place, op in enumerate(KIND_OPS)}
    return tuple(
        tuple(
            (number[needed] + other, 0.0 if delay is None else delay(other, stage))
            for needed, other in required(op, stage, placement)
        )
        for op in KIND_OPS
        for stage in range(stages)
    )


class Policy(Protocol):
    """The choices of a list scheduler."""

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The kind that a free rank runs now; or None, and the time of its next turn.

        A time that is not after ``now`` asks for another turn at ``now``, after all other ranks;
        ``last`` says that this is that turn. A rank is woken earlier by a new result.
        """

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Take note that a kind was started, and will end then."""


class ListScheduler:
    """The times and the readiness of all kinds while an order is being chosen.

    Args:
        ranks: for each kind, its rank.
        needs: for each kind, the required kinds and delays.
        durations: for each kind, the duration.
        totals: for each kind, how many microbatches it runs.

    Attributes:
        ready: for each kind, when its next microbatch is ready; inf if that is not known yet.
        ends: for each kind, the end of each microbatch.
        free: for each rank, the end of its last action.
        order: for each rank, its kinds in the order in which it runs them.
        stop: set by a policy to give up.
    """

    __slots__ = (
        "_durations",
        "_events",
        "_feeds",
        "_idle",
        "_needs",
        "_policy",
        "_ranks",
        "_totals",
        "_touched",
        "ends",
        "free",
        "order",
        "ready",
        "stop",
    )

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        needs: Needs,
        durations: Sequence[float],
        totals: Sequence[int],
    ) -> None:
        num_ranks = max(ranks) + 1
        self._ranks, self._needs, self._durations, self._totals = ranks, needs, durations, totals
        # For each kind: other ranks that wait for it, with the delay; itself, and its users.
        self._feeds: list[list[tuple[int, float]]] = [[] for _ in needs]
        self._touched: list[list[int]] = [[kind] for kind in range(len(needs))]
        for kind, required_kinds in enumerate(needs):
            for before, delay in required_kinds:
                self._touched[before].append(kind)
                if ranks[before] != ranks[kind]:
                    self._feeds[before].append((ranks[kind], delay))
        self.ready = [inf if each else 0.0 for each in needs]
        self.ends: list[list[float]] = [[] for _ in needs]
        self.order: list[list[int]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.stop = False
        self._idle = [True] * num_ranks
        # Time, whether all other ranks have had their turn at that time, rank.
        self._events = [(0.0, False, rank) for rank in range(num_ranks)]

    def run(self, policy: Policy) -> None:
        """Let the policy choose until no rank has anything to wait for, or it stops."""
        events, free, idle, choose = self._events, self.free, self._idle, policy.choose
        while events and not self.stop:
            now, last, rank = heappop(events)
            # A rank that is busy meanwhile has an event at the end of its action.
            if free[rank] > now:
                continue
            idle[rank] = False
            kind, wake = choose(rank, now, last=last)
            if kind is not None:
                policy.started(kind, rank, now, self._start(kind, rank, now))
            elif wake <= now:
                heappush(events, (now, True, rank))
            else:
                idle[rank] = True
                if wake < inf:
                    heappush(events, (wake, False, rank))

    def _start(self, kind: int, rank: int, now: float) -> float:
        """Run the next microbatch of a kind; all that waits for it learns when it ends."""
        all_ends, needs = self.ends, self._needs
        end = now + self._durations[kind]
        number = len(all_ends[kind])
        all_ends[kind].append(end)
        self.order[rank].append(kind)
        self.free[rank] = end
        heappush(self._events, (end, False, rank))
        for other, delay in self._feeds[kind]:
            if self._idle[other]:
                heappush(self._events, (end + delay, False, other))
        # The next microbatch of the kind itself is next; of its users perhaps this one.
        for user in self._touched[kind]:
            microbatch = len(all_ends[user])
            if user != kind and microbatch != number:
                continue
            latest = inf
            if microbatch < self._totals[user]:
                latest = 0.0
                for before, delay in needs[user]:
                    done = all_ends[before]
                    if len(done) <= microbatch:
                        latest = inf
                        break
                    if done[microbatch] + delay > latest:
                        latest = done[microbatch] + delay
            self.ready[user] = latest
        return end


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A chosen order and its times.

    Args:
        ranks: for each rank, its actions in order.
        makespan: the time of all.
        span: the longest time from a rank's first start to its last end.
    """

    ranks: tuple[tuple[Action, ...], ...]
    makespan: float
    span: float


def list_schedule(
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    *,
    limit: int,
    spare: int | None = None,
    overtake: bool = False,
    costs: tuple[PerStage, PerStage, PerStage] | None = None,
    within: float = inf,
) -> Scheduled:
    """Orders of forwards and backwards without their idle time, within a memory limit.

    V-Half, P = 2, M = 3, rank 0, the order of its pattern and the list schedule:

        F0 .. .. .. .. .. F1 f0 .. i0 .. .. F2 f1 .. i1 I0 .. .. f2 .. i2 I1 .. .. .. .. .. I2
        F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 f2 i2 I1 W0 I2 w2 W1 W2

    Each rank keeps to its order and runs each action as soon as it can. Instead of waiting, it
    runs a forward of later in its order, if that is ready and the memory suffices for all that
    comes in between; else a weight gradient, the oldest first; and a weight gradient, too, where a
    forward would exceed the memory. So weight gradients are put off as long as the memory allows,
    to fill idle time.

    Args:
        placement: the rank of every stage.
        orders: for each rank its forwards and its input gradients or full backwards, for each
            stage in the order of the microbatches. Weight gradients are added.
        limit: the most activations that a rank may hold at once.
        spare: how many of those a forward that is run ahead of its turn must leave free, unless
            it is on the last of its rank's stages, whose activations live shortest; None to run
            none ahead.
        overtake: whether backwards may be run ahead of their turn as well. This keeps going
            where an order needs more memory than there is.
        costs: of forwards, input gradients and weight gradients, per stage; by default 1 each.
        within: a makespan to give up at. The result then has no actions, and an endless makespan.

    Raises:
        ScheduleError: the orders can't be kept within the limit.

    Source: arXiv:2405.15362, sec. 3; arXiv:2401.10241, sec. 3.

    Example:
        >>> from penstock.schedule.placement import linear
        >>> order = [action(0, op, mb) for mb in (0, 1) for op in (Op.FORWARD, Op.INPUT_GRAD)]
        >>> found = list_schedule(linear(1), [order], limit=2)
        >>> " ".join(map(str, found.ranks[0])), found.makespan
        ('0F0 0I0 0F1 0I1 0W0 0W1', 6.0)
    """
    stages = placement.num_stages
    full = any(act.op is Op.FULL_BACKWARD for order in orders for act in order)
    forward, input_grad, weight_grad = costs or ((1.0,) * stages,) * 3
    backward = [i + w for i, w in zip(input_grad, weight_grad, strict=True)] if full else input_grad
    durations = (*forward, *backward, *weight_grad)
    totals = [0] * (3 * stages)
    queues = []
    for order in orders:
        queues.append([act.stage + (0 if act.op is Op.FORWARD else stages) for act in order])
        for kind in queues[-1]:
            totals[kind] += 1
    if not full:
        totals[2 * stages :] = totals[stages : 2 * stages]
    scheduler = ListScheduler(
        ranks=placement.stage_ranks * 3,
        needs=kind_needs(placement),
        durations=durations,
        totals=totals,
    )
    policy = _InOrder(
        scheduler,
        placement,
        queues,
        durations,
        full=full,
        limit=limit,
        spare=spare,
        overtake=overtake,
        within=within,
    )
    scheduler.run(policy)
    if scheduler.stop:
        return Scheduled(ranks=(), makespan=inf, span=inf)
    policy.refuse_unfinished(orders)
    ops = (Op.FORWARD, Op.FULL_BACKWARD if full else Op.INPUT_GRAD, Op.WEIGHT_GRAD)
    return Scheduled(
        ranks=tuple(_actions(kinds, ops, stages) for kinds in scheduler.order),
        makespan=max(scheduler.free),
        span=max(end - rank.began for end, rank in zip(scheduler.free, policy.ranks, strict=True)),
    )


def _actions(kinds: Sequence[int], ops: Sequence[Op], stages: int) -> tuple[Action, ...]:
    """The actions of a rank's kinds, each with the next microbatch of its kind."""
    done = [0] * (3 * stages)
    found = []
    for kind in kinds:
        number, stage = divmod(kind, stages)
        found.append(action(stage, ops[number], done[kind]))
        done[kind] += 1
    return tuple(found)


class _OrderOfRank:
    """The order of one rank: the part that is done, and the part that is left."""

    __slots__ = (
        "began",
        "changes",
        "held",
        "last",
        "left",
        "places",
        "queue",
        "rest",
        "taken",
        "waiting",
    )

    def __init__(self, queue: list[int], last: int, stages: int, rest: float) -> None:
        self.queue, self.last = queue, last
        # The first place of the order that has not been taken, and which later ones have.
        self.left = 0
        self.taken = bytearray(len(queue))
        # The change of held activations by each action, once all weight gradients are done; 0 for
        # one that has been taken.
        self.changes = [1 if kind < stages else -1 for kind in queue]
        # Places by kind, the next of each kind last: what may be run ahead.
        self.places: dict[int, list[int]] = {}
        for place in reversed(range(len(queue))):
            self.places.setdefault(queue[place], []).append(place)
        # Stages of input gradients without their weight gradients, the oldest first.
        self.waiting: deque[int] = deque()
        self.held = 0
        self.began = inf
        # The duration of all that is left.
        self.rest = rest

    def has_room(self, place: int, limit: int) -> bool:
        """Whether the forward at ``place`` can go ahead of all before it, within ``limit``."""
        held = self.held - len(self.waiting) + 1
        between = accumulate(self.changes[self.left : place], initial=held)
        return self.held < limit and max(between) <= limit

    def take(self, kind: int) -> None:
        """Take the next action of a kind out of the order."""
        place = self.places[kind].pop()
        self.taken[place] = 1
        self.changes[place] = 0
        while self.left < len(self.queue) and self.taken[self.left]:
            self.left += 1


class _InOrder:
    """The policy of ``list_schedule``."""

    def __init__(
        self,
        scheduler: ListScheduler,
        placement: Placement,
        queues: list[list[int]],
        durations: Sequence[float],
        *,
        full: bool,
        limit: int,
        spare: int | None,
        overtake: bool,
        within: float,
    ) -> None:
        self.scheduler, self.durations, self.stages = scheduler, durations, placement.num_stages
        self.full, self.limit, self.spare, self.overtake = full, limit, spare, overtake
        # Sums of times come out a little differently in another order.
        self.within = within * (1 + 1e-9)
        self.ranks = []
        for rank, queue in enumerate(queues):
            rest = sum(durations[kind] for kind in queue)
            if not full:
                backwards = (kind for kind in queue if kind >= self.stages)
                rest += sum(durations[kind + self.stages] for kind in backwards)
            last = placement.stages_of(rank)[-1]
            self.ranks.append(_OrderOfRank(queue, last, self.stages, rest))

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The best kind to run now, if any."""
        mine, durations = self.ranks[rank], self.durations
        weight = mine.waiting[0] + 2 * self.stages if mine.waiting else None
        if mine.left == len(mine.queue):
            return weight, inf
        head, all_ready = mine.queue[mine.left], self.scheduler.ready
        ready = all_ready[head]
        is_full = head < self.stages and mine.held >= self.limit
        if ready <= now and not is_full:
            return head, inf
        if ready == inf and not last:
            # Another rank may start what this one waits for at this very time.
            return None, now
        if self.spare is not None or self.overtake:
            kind = self._ahead(mine, now)
            # A result that is just about to come is worth waiting for.
            if kind is not None and (is_full or ready - now >= durations[kind]):
                return kind, inf
        if weight is not None and (is_full or ready - now >= durations[weight]):
            return weight, inf
        soon = (all_ready[kind] for kind, places in mine.places.items() if places)
        return None, min((each for each in soon if each > now), default=inf)

    def _ahead(self, mine: _OrderOfRank, now: float) -> int | None:
        """The kind of the first action after the next one that may go ahead of it now."""
        found, chosen = len(mine.queue), None
        for kind, places in mine.places.items():
            if not places or not mine.left < places[-1] < found:
                continue
            if self.scheduler.ready[kind] > now:
                continue
            place = places[-1]
            if kind >= self.stages:
                if self.overtake:
                    found, chosen = place, kind
            elif self.spare is not None:
                free = 0 if kind == mine.last else self.spare
                if mine.has_room(place, self.limit - free):
                    found, chosen = place, kind
        return chosen

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Count the activations that are held, and the time that is left."""
        mine = self.ranks[rank]
        if kind >= 2 * self.stages:
            mine.waiting.popleft()
            mine.held -= 1
        else:
            mine.take(kind)
            if kind < self.stages:
                mine.held += 1
            elif self.full:
                mine.held -= 1
            else:
                mine.waiting.append(kind - self.stages)
        mine.began = min(mine.began, now)
        mine.rest -= end - now
        if end + mine.rest > self.within:
            self.scheduler.stop = True

    def refuse_unfinished(self, orders: Sequence[Sequence[Action]]) -> None:
        """Refuse orders of which a rank has actions left."""
        for number, rank in enumerate(self.ranks):
            if rank.left < len(rank.queue):
                raise ScheduleError(
                    f"rank {number} can't go on to {orders[number][rank.left]} within {self.limit} "
                    "activations; give it more, or another order"
                )
