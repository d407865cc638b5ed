"""List scheduling: builds an order action by action, in order of time.

Whenever a rank is free, a policy chooses one of its ready actions, or lets it wait. Actions are
counted by kind, an op and a stage:

    kind     number of the op in (F, I, W) · stages + stage

Microbatches are interchangeable, so each kind runs them in index order without loss of generality,
and the kinds of each rank are an order. With full backwards, I stands for the full backward, and W
is not run. Ties in time go to the lower rank, so an order is the same on every machine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Protocol, TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.rules import required

__all__ = ["Edges", "KIND_OPS", "ListScheduler", "PerStage", "Policy", "kind_needs"]
__all__ += ["list_schedule"]

KIND_OPS = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)

Edges: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""For each kind, others of the same microbatch, and the delays of results."""

PerStage: TypeAlias = Sequence[float]
"""The duration of a kind, one number per stage."""


def kind_needs(placement: Placement, delay: Callable[[int, int], float] | None = None) -> Edges:
    """The required kinds of each kind; ``delay`` gives the travel time between two stages."""
    stages = placement.num_stages
    return tuple(
        tuple(
            (KIND_OPS.index(needed) * stages + other, delay(other, stage) if delay else 0.0)
            for needed, other in required(op, stage, placement)
        )
        for op in KIND_OPS
        for stage in range(stages)
    )


class Policy(Protocol):
    """The choices of a list scheduler, by memory, priorities or other criteria."""

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The kind that a free rank runs now; or None, and the time of its next turn, unless a new
        result wakes it earlier. For ``now`` its turn comes after all other ranks, as ``last``."""

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Record that a kind starts at ``now`` and ends at ``end``."""


class ListScheduler:
    """The times and the readiness of all kinds during list scheduling.

    Args:
        ranks: for each kind, its rank.
        needs: for each kind, the required kinds and delays.
        durations: for each kind, the duration.
        totals: for each kind, its number of microbatches.

    Attributes:
        ready: for each kind, the time at which its next microbatch is ready; inf if not known yet.
        ends: for each kind, the end of each microbatch.
        free: for each rank, the end of its last action.
        order: for each rank, its kinds in execution order.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        needs: Edges,
        durations: Sequence[float],
        totals: Sequence[int],
    ) -> None:
        num_ranks = max(ranks) + 1
        self._needs, self._durations, self._totals = needs, durations, totals
        # By kind: the ranks that wait for it, with the delay; and the kind itself and its users.
        self._feeds: list[list[tuple[int, float]]] = [[] for _ in needs]
        self._touched = [[kind] for kind in range(len(needs))]
        for kind, required_kinds in enumerate(needs):
            for before, delay in required_kinds:
                self._touched[before].append(kind)
                if ranks[before] != ranks[kind]:
                    self._feeds[before].append((ranks[kind], delay))
        self.ready = [inf if each else 0.0 for each in needs]
        self.ends: list[list[float]] = [[] for _ in needs]
        self.order: list[list[int]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self._idle = [True] * num_ranks
        # The time, a flag for the last turn at that time, and the rank.
        self._events = [(0.0, False, rank) for rank in range(num_ranks)]

    def run(self, policy: Policy) -> None:
        """Let the policy choose until no rank has work left."""
        events, free, idle, choose = self._events, self.free, self._idle, policy.choose
        while events:
            now, last, rank = heappop(events)
            # A busy rank has an event at the end of its action.
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
        """Run the next microbatch of a kind, and notify its users of the end."""
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
        # The kind itself moves to its next microbatch; its users may wait for this one.
        for user in self._touched[kind]:
            microbatch = len(all_ends[user])
            if user != kind and microbatch != number:
                continue
            latest = 0.0 if microbatch < self._totals[user] else inf
            for before, delay in needs[user]:
                done = all_ends[before]
                if len(done) <= microbatch:
                    latest = inf
                    break
                if done[microbatch] + delay > latest:
                    latest = done[microbatch] + delay
            self.ready[user] = latest
        return end


def list_schedule(
    placement: Placement,
    orders: Sequence[Sequence[int]],
    *,
    limit: int,
    full: bool = False,
    spare: int | None = None,
    overtake: bool = False,
    costs: tuple[PerStage, PerStage, PerStage] | None = None,
    delay: Callable[[int, int], float] | None = None,
) -> Sequence[Sequence[int]]:
    """Close the idle time in orders of forwards and backwards, within a memory limit.

    V-Half, P = 2, M = 3, rank 0, the order of its pattern and the list schedule:

        F0 .. .. .. .. .. F1 f0 .. i0 .. .. F2 f1 .. i1 I0 .. .. f2 .. i2 I1 .. .. .. .. .. I2
        F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 f2 i2 I1 W0 I2 w2 W1 W2

    Each rank runs its next action as soon as possible. Instead of waiting, it runs a later forward
    that is ready, if memory suffices for all actions in between; else its oldest weight gradient,
    as it does if a forward would exceed the memory.

    Args:
        placement: the rank of every stage.
        orders: for each rank its kinds, without weight gradients, which are added.
        limit: the most activations that a rank may hold.
        full: True for full backwards, without weight gradients.
        spare: the number of activations that a forward run out of order must leave free, unless it
            is on its rank's last stage; None to run no forward out of order.
        overtake: True if backwards may run out of order, to complete an order beyond the limit.
        costs: of forwards, input gradients and weight gradients, per stage; 1 each by default.
        delay: the travel time between two stages; none by default.

    Raises:
        ScheduleError: the orders don't fit within the limit.

    Source: arXiv:2405.15362, sec. 3; arXiv:2401.10241, sec. 3.

    Examples:
        >>> from penstock.schedule.placement import linear
        >>> list_schedule(linear(1), [[0, 1, 0, 1]], limit=2)
        [[0, 1, 0, 1, 2, 2]]
    """
    stages = placement.num_stages
    forward, input_grad, weight_grad = costs or ((1.0,) * stages,) * 3
    backward = [i + w for i, w in zip(input_grad, weight_grad, strict=True)] if full else input_grad
    durations = (*forward, *backward, *weight_grad)
    totals = Counter(kind for kinds in orders for kind in kinds)
    if not full:
        totals += Counter({kind + stages: totals[kind] for kind in totals if kind >= stages})
    scheduler = ListScheduler(
        ranks=placement.stage_ranks * 3,
        needs=kind_needs(placement, delay),
        durations=durations,
        totals=[totals[kind] for kind in range(3 * stages)],
    )
    ranks = [
        _RankOrder(queue, placement.stages_of(rank)[-1], stages)
        for rank, queue in enumerate(orders)
    ]
    scheduler.run(_InOrder(scheduler, ranks, durations, stages, full, limit, spare, overtake))
    stuck = [rank for rank, mine in enumerate(ranks) if mine.next < len(mine.queue)]
    if stuck:
        raise ScheduleError(f"ranks {stuck} can't follow their orders within {limit} activations")
    return scheduler.order


class _RankOrder:
    """The order of one rank, with its remaining actions."""

    def __init__(self, queue: Sequence[int], last_stage: int, stages: int) -> None:
        self.queue, self.last_stage = queue, last_stage
        # The first remaining position of the order.
        self.next = 0
        # The change of held activations by each action, with all weight gradients done; 0 for done
        # actions.
        self.changes = [1 if kind < stages else -1 for kind in queue]
        # Remaining positions by kind, the next one last: candidates to run out of order.
        self.places: dict[int, list[int]] = {}
        for place in reversed(range(len(queue))):
            self.places.setdefault(queue[place], []).append(place)
        # Weight gradients whose input gradients are done, oldest first.
        self.waiting: deque[int] = deque()
        self.num_held = 0

    def has_room(self, place: int, limit: int) -> bool:
        """True if the forward at ``place`` can run before all earlier actions, within ``limit``."""
        held = self.num_held - len(self.waiting) + 1
        between = accumulate(self.changes[self.next : place], initial=held)
        return self.num_held < limit and max(between) <= limit

    def take(self, kind: int) -> None:
        """Mark the next action of a kind as done."""
        self.changes[self.places[kind].pop()] = 0
        while self.next < len(self.queue) and not self.changes[self.next]:
            self.next += 1


@dataclass(slots=True)
class _InOrder:
    """The policy of ``list_schedule``: follow the order, fill idle time."""

    scheduler: ListScheduler
    ranks: Sequence[_RankOrder]
    durations: Sequence[float]
    stages: int
    full: bool
    limit: int
    spare: int | None
    overtake: bool

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The best kind to run now; None to wait."""
        mine, durations = self.ranks[rank], self.durations
        weight = mine.waiting[0] if mine.waiting else None
        if mine.next == len(mine.queue):
            return weight, inf
        head, all_ready = mine.queue[mine.next], self.scheduler.ready
        ready = all_ready[head]
        is_full = head < self.stages and mine.num_held >= self.limit
        if ready <= now and not is_full:
            return head, inf
        if ready == inf and not last:
            # Another rank may start the awaited action at this very time.
            return None, now
        for kind in (self._ahead(mine, now), weight):
            # A result that is about to arrive is worth waiting for.
            if kind is not None and (is_full or ready - now >= durations[kind]):
                return kind, inf
        soon = (all_ready[kind] for kind, places in mine.places.items() if places)
        return None, min((each for each in soon if each > now), default=inf)

    def _ahead(self, mine: _RankOrder, now: float) -> int | None:
        """The kind of the first later action that may run out of order now."""
        if self.spare is None and not self.overtake:
            return None
        found, chosen = len(mine.queue), None
        for kind, places in mine.places.items():
            if not places or not mine.next < places[-1] < found:
                continue
            if self.scheduler.ready[kind] > now:
                continue
            if kind >= self.stages:
                allowed = self.overtake
            elif self.spare is None:
                allowed = False
            else:
                free = 0 if kind == mine.last_stage else self.spare
                allowed = mine.has_room(places[-1], self.limit - free)
            if allowed:
                found, chosen = places[-1], kind
        return chosen

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Update the activations held."""
        mine = self.ranks[rank]
        if kind >= 2 * self.stages:
            mine.waiting.popleft()
        else:
            mine.take(kind)
            if kind >= self.stages and not self.full:
                mine.waiting.append(kind + self.stages)
        if kind < self.stages:
            mine.num_held += 1
        elif self.full or kind >= 2 * self.stages:
            mine.num_held -= 1
