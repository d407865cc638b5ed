"""List scheduling by priorities within a memory limit: a policy of the one list scheduler.

    priorities   0F 0  1  2 ...      rank 0  0F0 0F1 0F2 ... 0I0 0F3 0W0
                 0I 4  5  6 ...      rank 1  ... 1F0 1F1 1I0 1F2 1I1 1W0
                 0W 5  6  7 ...

A free rank runs its ready kind of the lowest priority value. A forward may start only if the
microbatches in flight could still be finished one by one, in their order, within the limit on every
rank: so no choice can lead to a dead end.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from penstock.schedule.list_schedule import ListScheduler
from penstock.search.problem import SearchProblem, TimedOrder

__all__ = ["schedule_by_priority"]


def schedule_by_priority(
    problem: SearchProblem,
    priorities: Sequence[Sequence[float]],
    *,
    windows: Sequence[int] | None = None,
    patience: float = 0.0,
) -> TimedOrder:
    """Build an order in which ranks always run their most urgent ready action.

    Args:
        problem: the search problem.
        priorities: for each kind the priority of each microbatch; the lowest goes first.
        windows: for each stage the most microbatches that it may hold, at least 1, within the
            limits of its rank; None for the limits alone.
        patience: the time that a rank idles for a more urgent action that will become ready; 0 for
            no waiting.
    """
    scheduler = ListScheduler(
        ranks=problem.ranks,
        needs=problem.needs,
        durations=problem.durations,
        totals=[problem.num_microbatches] * problem.num_kinds,
    )
    scheduler.run(_ByPriority(scheduler, problem, priorities, windows, patience))
    ends = scheduler.ends
    assert all(len(done) == problem.num_microbatches for done in ends), "orders are finished"
    return TimedOrder(
        order=tuple(map(tuple, scheduler.order)),
        value=problem.value(scheduler.free),
        ends=tuple(map(tuple, ends)),
    )


class _ByPriority:
    """A list-scheduling policy by priority and memory."""

    def __init__(
        self,
        scheduler: ListScheduler,
        problem: SearchProblem,
        priorities: Sequence[Sequence[float]],
        windows: Sequence[int] | None,
        patience: float,
    ) -> None:
        self.ends, self.ready = scheduler.ends, scheduler.ready
        self.priorities, self.patience = priorities, patience
        self.users = [[user for user, _ in users] for users in problem.users]
        self.num_stages, self.ranks = problem.placement.num_stages, problem.ranks
        self.windows = windows or [problem.num_microbatches] * self.num_stages
        self.limit, self.changes = problem.most, problem.changes
        ranks = range(problem.placement.num_ranks)
        self.stages = [problem.placement.stages_of(rank) for rank in ranks]
        self.held = [0.0 for _ in ranks]
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
        without_room = []
        while urgent and not self.has_room(urgent[0][1], rank):
            without_room.append(heappop(urgent))
        urgency, chosen = urgent[0] if urgent else (inf, None)
        wake = coming[0][0] if coming else inf
        until = now + self.patience
        # A rank waits for the first action that is more urgent.
        if wake <= until and (
            waits := [at for at, kind in coming if at <= until and self.priority(kind) < urgency]
        ):
            chosen, wake = None, min(waits)
        elif urgent:
            heappop(urgent)
        for each in without_room:
            heappush(urgent, each)
        return chosen, wake

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Update the memory in use, and queue kinds that become ready."""
        self.held[rank] += self.changes[kind]
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
            if not ahead:
                if done < first and rest + held - done * passed > limit:
                    return False
                if not done:
                    break
            ahead = ahead and stage != chosen
            held += done * changes[stage]
            passed += changes[stage]
            rest -= changes[stage]
        return True
