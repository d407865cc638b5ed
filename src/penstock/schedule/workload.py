"""The work of a step, as integers and numbers: list scheduling and local search read it.

kind     (F, I or W) x stage          as ``penstock.schedule.list_schedule`` numbers them
order    for each rank, kinds         each kind runs its microbatches in index order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from penstock.schedule.action import Op
from penstock.schedule.list_schedule import KIND_OPS, Edges, ListScheduler
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.replay import DependencyReplay

__all__ = ["Objective", "Order", "TimedOrder", "Workload", "schedule_by_priority"]

_NEAR = 1e-9

Objective: TypeAlias = Literal["makespan", "span"]

Order: TypeAlias = tuple[tuple[int, ...], ...]
"""The kinds of each rank, in execution order."""


class TimedOrder(NamedTuple):
    """An order, its objective, and for each kind the end of each microbatch."""

    order: Order
    value: float
    ends: tuple[tuple[float, ...], ...]


# Without slots: cached tables live in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a step on a placement.

    Args:
        placement: the rank of every stage.
        num_microbatches: microbatches per step.
        durations: for each kind, the time that it takes its rank.
        needs: for each kind, the kinds that it requires.
        changes: for each kind, the change of its rank's memory at its end (F: at its start).
        limit: the most memory that a rank may hold; infinity for no limit.
        objective: the figure to minimize.
    """

    placement: Placement
    num_microbatches: int
    durations: tuple[float, ...]
    needs: Edges
    changes: tuple[float, ...]
    limit: float = inf
    objective: Objective = "makespan"

    @property
    def num_kinds(self) -> int:
        """Number of kinds: three per stage."""
        return 3 * self.placement.num_stages

    @property
    def size(self) -> int:
        """Number of actions of a program."""
        return self.num_kinds * self.num_microbatches

    @property
    def most(self) -> float:
        """The limit, with the tolerance for rounding of ``penstock.simulate.memory.exceeds``."""
        return self.limit * (1 + _NEAR)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each kind."""
        return self.placement.stage_ranks * 3

    @cached_property
    def users(self) -> Edges:
        """For each kind, the kinds that require it."""
        users: list[list[tuple[int, float]]] = [[] for _ in range(self.num_kinds)]
        for kind, needs in enumerate(self.needs):
            for before, delay in needs:
                users[before].append((kind, delay))
        return tuple(map(tuple, users))

    @cached_property
    def origins(self) -> tuple[float, ...]:
        """For each rank, the time from which the objective counts: for the span its earliest start,
        that of the first forward of its first stage, which precedes all its other actions."""
        starts, now = list[float](), 0.0
        for stage in range(self.placement.num_stages):
            now = now + self.needs[stage][0][1] if self.needs[stage] else 0.0
            starts.append(now)
            now += self.durations[stage]
        is_span, ranks = self.objective == "span", range(self.placement.num_ranks)
        return tuple(is_span * starts[min(self.placement.stages_of(rank))] for rank in ranks)

    def value(self, ends: Sequence[float]) -> float:
        """The objective, from the ranks' last ends."""
        return max(end - origin for end, origin in zip(ends, self.origins, strict=True))

    def replay(self, order: Sequence[Sequence[int]]) -> TimedOrder | None:
        """The times of an order; None on a deadlock.

        They equal the times of ``penstock.simulate`` if messages do not wait for each other.
        """
        played = self.play([self.ids(kinds) for kinds in order])
        if played is None:
            return None
        width = self.num_microbatches
        return TimedOrder(
            order=tuple(map(tuple, order)),
            value=self.value([each[-1] if each else 0.0 for each in played.ends]),
            ends=tuple(
                tuple(played.done[first : first + width]) for first in range(0, self.size, width)
            ),
        )

    def play(self, queues: Sequence[Sequence[int]]) -> DependencyReplay | None:
        """Replay each rank's actions (``ids``); None on a deadlock."""
        width = self.num_microbatches
        played = DependencyReplay(
            queues,
            (),
            num_ids=self.size,
            width=width,
            needs=[
                tuple(((before - kind) * width, delay) for before, delay in needs)
                for kind, needs in enumerate(self.needs)
            ],
            fulfilled=[(0,)] * self.num_kinds,
            durations=self.durations,
        )
        return played if played.play() else None

    def order(self, program: Program) -> Order:
        """The order of a program's kinds, with full backwards split."""
        stages = self.placement.num_stages
        numbers: dict[Op, tuple[int, ...]]
        numbers = {op: (number * stages,) for number, op in enumerate(KIND_OPS)}
        numbers[Op.FULL_BACKWARD] = (stages, 2 * stages)
        return tuple(
            tuple(
                first + part.stage
                for step in steps
                for part in step.parts
                for first in numbers[part.op]
            )
            for steps in program.ranks
        )

    def ids(self, kinds: Sequence[int]) -> list[int]:
        """The actions of a rank's kinds as integers: kind x microbatches + microbatch."""
        following = [kind * self.num_microbatches - 1 for kind in range(self.num_kinds)]
        found = []
        for kind in kinds:
            following[kind] += 1
            found.append(following[kind])
        return found


def schedule_by_priority(
    work: Workload,
    priorities: Sequence[Sequence[float]],
    *,
    windows: Sequence[int] | None = None,
    patience: Sequence[float] | None = None,
    first_patience: float = 0.0,
) -> TimedOrder:
    """Build an order in which ranks always run their most urgent ready action.

    Args:
        work: the work of the step.
        priorities: for each kind the priority of each microbatch; the lowest goes first.
        windows: for each stage the most microbatches that it may hold, at least 1; None for the
            memory limit alone.
        patience: for each kind, how much later a more urgent action may come and still go first,
            if this one would not end before; None for no later.
        first_patience: the patience of all kinds until the rank's first backward.
    """
    scheduler = ListScheduler(
        ranks=work.ranks,
        needs=work.needs,
        durations=work.durations,
        totals=[work.num_microbatches] * work.num_kinds,
    )
    windows = windows or [work.num_microbatches] * work.placement.num_stages
    patience = patience or [0.0] * work.num_kinds
    scheduler.run(_ByPriority(scheduler, work, priorities, windows, patience, first_patience))
    assert all(len(done) == work.num_microbatches for done in scheduler.ends), "it finishes"
    return TimedOrder(
        order=tuple(map(tuple, scheduler.order)),
        value=work.value(scheduler.free),
        ends=tuple(map(tuple, scheduler.ends)),
    )


class _ByPriority:
    """A list-scheduling policy by priority and memory.

    A forward may start only if the microbatches in flight could still be finished one by one, in
    their order, within the limit on every rank: so no choice can lead to a dead end.
    """

    def __init__(
        self,
        scheduler: ListScheduler,
        work: Workload,
        priorities: Sequence[Sequence[float]],
        windows: Sequence[int],
        patience: Sequence[float],
        first_patience: float,
    ) -> None:
        self.ends, self.ready = scheduler.ends, scheduler.ready
        self.priorities, self.windows, self.patience = priorities, windows, patience
        self.durations = work.durations
        self.users = [[user for user, _ in users] for users in work.users]
        self.num_stages, self.ranks = work.placement.num_stages, work.ranks
        self.limit, self.changes = work.most, work.changes
        ranks = range(work.placement.num_ranks)
        self.stages = [work.placement.stages_of(rank) for rank in ranks]
        self.held = [0.0 for _ in ranks]
        self.warm = [False for _ in ranks]
        self.first_patience = first_patience
        # Per rank, heaps of its ready kinds: future ones by time, runnable ones by priority.
        self.coming: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self.urgent: list[list[tuple[float, int]]] = [[] for _ in ranks]
        for kind, time in enumerate(self.ready):
            if time < inf:
                heappush(self.coming[self.ranks[kind]], (time, kind))

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The most urgent kind that can run now; or None, and the time of the next kind."""
        coming, urgent = self.coming[rank], self.urgent[rank]
        while coming and coming[0][0] <= now:
            kind = heappop(coming)[1]
            heappush(urgent, (self.priority(kind), kind))
        wake = coming[0][0] if coming else inf
        chosen, passed = None, []
        while urgent and chosen is None:
            passed.append(heappop(urgent))
            urgency, kind = passed[-1]
            if not self.has_room(kind, rank):
                continue
            # A more urgent kind goes first if it comes soon, and before this one would end.
            patience = self.patience[kind] if self.warm[rank] else self.first_patience
            soon = now + min(patience, self.durations[kind] * (1 - _NEAR))
            if wake > soon or not any(
                at <= soon and self.priority(other) < urgency for at, other in coming
            ):
                chosen = kind
                passed.pop()
        for each in passed:
            heappush(urgent, each)
        return chosen, wake

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Update the memory in use, and queue kinds that become ready."""
        self.held[rank] += self.changes[kind]
        self.warm[rank] |= kind >= self.num_stages
        ends, ready = self.ends, self.ready
        number = len(ends[kind])
        if ready[kind] < inf:
            heappush(self.coming[rank], (ready[kind], kind))
        for user in self.users[kind]:
            # Only a user that waits for this microbatch becomes ready.
            if len(ends[user]) == number - 1 and ready[user] < inf:
                heappush(self.coming[self.ranks[user]], (ready[user], user))

    def priority(self, kind: int) -> float:
        """The priority of the next microbatch of a kind."""
        return self.priorities[kind][len(self.ends[kind])]

    def has_room(self, kind: int, rank: int) -> bool:
        """True if a kind may start; only forwards take memory, and are numbered like stages."""
        if kind >= self.num_stages:
            return True
        in_flight = len(self.ends[kind]) - len(self.ends[kind + 2 * self.num_stages])
        if in_flight >= self.windows[kind]:
            return False
        return self.limit == inf or self._can_finish(kind, rank)

    def _can_finish(self, chosen: int, rank: int) -> bool:
        """True if all microbatches fit one by one after one more forward of a stage."""
        changes, stages, limit = self.changes, self.stages[rank], self.limit
        if self.held[rank] + changes[chosen] > limit:
            return False
        first = len(self.ends[stages[0]]) + (chosen == stages[0])
        # Held by microbatches that have passed the stages so far; what one holds on these stages.
        held, passed = changes[chosen], 0.0
        rest = sum(changes[stage] for stage in stages)
        ahead = True
        for stage in stages:
            # Later stages of the rank never have more forwards, so the loop can stop.
            done = len(self.ends[stage])
            # The first microbatch that still needs this stage and those after it: all before it
            # can be finished, and what they hold comes free; those from it on hold the stages
            # that they have passed. Up to the chosen stage this forward adds nothing to that.
            if not ahead and done < first and rest + held - done * passed > limit:
                return False
            if not ahead and not done:
                break
            ahead = ahead and stage != chosen
            held += done * changes[stage]
            passed += changes[stage]
            rest -= changes[stage]
        return True
