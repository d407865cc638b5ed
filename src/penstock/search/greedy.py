"""List scheduling: whenever a rank is free it starts the ready action that matters most.

    priorities   0F 0  1  2 ...      rank 0  0F0 0F1 0F2 ... 0I0 0F3 0W0
                 0I 4  5  6 ...      rank 1  ... 1F0 1F1 1I0 1F2 1I1 1W0
                 0W 5  6  7 ...

What ready means comes from ``penstock.schedule.rules``; what a rank may hold, from the problem's
limit. A forward may start only if the microbatches under way could still be finished one after
the other, in their order, within the limit on every rank: so no choice leads into a dead end.
Ties go to the lower time, rank and kind, so that the same priorities give the same order always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from penstock.schedule.program import Program
from penstock.search.problem import Order, Problem, order_of, program_of, slack
from penstock.simulate.engine import simulate

__all__ = ["Placed", "place", "played", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An order, and what it comes to.

    Args:
        order: for each rank, kinds in the order in which it runs them.
        value: the objective.
        ends: for each kind, the end of each microbatch.
    """

    order: Order
    value: float
    ends: tuple[tuple[float, ...], ...]


def place(
    problem: Problem,
    priorities: Sequence[Sequence[float]],
    *,
    windows: Sequence[int] | None = None,
    patience: float = 0.0,
) -> Placed:
    """The order in which ranks run all actions where they always take the most urgent one.

    Args:
        problem: what to run.
        priorities: for each kind the urgency of each microbatch; the lowest goes first.
        windows: for each stage the most microbatches that it may hold, at least 1, within the
            limits of its rank; None where the limits alone count.
        patience: how long a rank waits for a more urgent action that is known to come; 0 where it
            takes whatever is ready.

    Returns:
        The order and its times.
    """
    state = _State(problem, priorities, windows, patience)
    events, free = state.events, state.free
    while events:
        now, rank = heappop(events)
        if now >= free[rank]:
            kind, wake = state.choose(rank, now)
            if kind is not None:
                state.start(kind, rank, now)
            else:
                state.rest(rank, wake)
    return state.placed()


def played(problem: Problem, program: Program) -> Placed:
    """The order of a program, full backwards taken apart, and its times.

    Args:
        problem: a problem with the program's placement and number of microbatches.
        program: compute only.
    """
    order = order_of(problem, program)
    result = simulate(program_of(problem, order, name=program.name), problem.costs)
    ends: list[list[float]] = [[] for _ in range(problem.num_kinds)]
    for kinds, times in zip(order, result.ends, strict=True):
        for kind, end in zip(kinds, times, strict=True):
            ends[kind].append(end)
    return Placed(
        order=order,
        value=result.makespan if problem.objective == "makespan" else result.span,
        ends=tuple(map(tuple, ends)),
    )


def replay(problem: Problem, order: Sequence[Sequence[int]]) -> Placed | None:
    """An order and its times: every action starts as soon as its rank and its needs allow.

    What ``penstock.simulate`` says of the program, for problems whose messages travel beside the
    compute; several times faster.

    Args:
        problem: what to run.
        order: for each rank, kinds.

    Returns:
        The order with its times; None where ranks wait for each other for ever.
    """
    needs, durations, num_ranks = problem.needs, problem.durations, len(order)
    ends: list[list[float]] = [[] for _ in range(problem.num_kinds)]
    places, free = [0] * num_ranks, [0.0] * num_ranks
    waiting: dict[int, list[int]] = {}
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        kinds, now, index = order[rank], free[rank], places[rank]
        while index < len(kinds):
            kind = kinds[index]
            mine = ends[kind]
            for before, delay in needs[kind]:
                done = ends[before]
                if len(done) <= len(mine):
                    waiting.setdefault(before, []).append(rank)
                    break
                if done[len(mine)] + delay > now:
                    now = done[len(mine)] + delay
            else:
                now += durations[kind]
                mine.append(now)
                index += 1
                if kind in waiting:
                    ready += waiting.pop(kind)
                continue
            break
        # Where it waits, the time of its last end counts, not that of a need that is there.
        places[rank] = index
        free[rank] = ends[kinds[index - 1]][-1] if index else 0.0
    if any(place < len(kinds) for place, kinds in zip(places, order, strict=True)):
        return None
    return Placed(
        order=tuple(map(tuple, order)), value=problem.value(free), ends=tuple(map(tuple, ends))
    )


class _State:
    """What ranks have done and what they may do next, while ``place`` goes on."""

    __slots__ = (
        "changes",
        "durations",
        "ends",
        "events",
        "feeds",
        "forwards",
        "free",
        "idle",
        "kinds_of",
        "needs",
        "order",
        "patience",
        "priorities",
        "problem",
        "ready",
        "rooms",
        "touched",
        "width",
        "windows",
    )

    def __init__(
        self,
        problem: Problem,
        priorities: Sequence[Sequence[float]],
        windows: Sequence[int] | None,
        patience: float,
    ) -> None:
        ranks, kinds = range(problem.placement.num_ranks), range(problem.num_kinds)
        self.problem, self.priorities, self.patience = problem, priorities, patience
        self.width = problem.num_microbatches
        self.needs, self.feeds, self.durations = problem.needs, problem.feeds, problem.durations
        self.touched = [(kind, *users) for kind, users in enumerate(problem.users)]
        self.changes, self.forwards = problem.changes, problem.placement.num_stages
        self.kinds_of = [[k for k in kinds if problem.ranks[k] == rank] for rank in ranks]
        self.rooms = [_Room(problem, rank) for rank in ranks]
        stages = problem.placement.num_stages
        self.windows = [self.width] * stages if windows is None else windows
        self.ends: list[list[float]] = [[] for _ in kinds]
        # When the next microbatch of each kind can run; infinite as long as that is not known.
        self.ready = [inf if problem.needs[kind] else 0.0 for kind in kinds]
        self.order: list[list[int]] = [[] for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.idle = [True for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]

    def choose(self, rank: int, now: float) -> tuple[int | None, float]:
        """The most urgent kind that can run now; or none, and when there may be one."""
        ready, ends, priorities, forwards = self.ready, self.ends, self.priorities, self.forwards
        chosen, urgency, wake = None, inf, inf
        for kind in self.kinds_of[rank]:
            at = ready[kind]
            if at <= now:
                asked = priorities[kind][len(ends[kind])]
                if asked < urgency and (kind >= forwards or self.has_room(kind, rank)):
                    chosen, urgency = kind, asked
            elif at < wake:
                wake = at
        if self.patience and wake <= now + self.patience:
            # A rank waits for the first of those that are more urgent.
            coming = [
                kind for kind in self.kinds_of[rank] if now < ready[kind] <= now + self.patience
            ]
            waits = [ready[k] for k in coming if priorities[k][len(ends[k])] < urgency]
            if waits:
                return None, min(waits)
        return chosen, wake

    def has_room(self, stage: int, rank: int) -> bool:
        """Whether what one more forward leaves behind fits."""
        ends = self.ends
        held = len(ends[stage]) - len(ends[stage + 2 * self.forwards])
        return held < self.windows[stage] and self.rooms[rank].takes(stage, ends)

    def start(self, kind: int, rank: int, now: float) -> None:
        """Run the next microbatch of a kind; all that waits for it learns when it ends."""
        ends, ready, needs = self.ends, self.ready, self.needs
        end = now + self.durations[kind]
        started = len(ends[kind])
        ends[kind].append(end)
        self.order[rank].append(kind)
        self.rooms[rank].held += self.changes[kind]
        self.free[rank] = end
        self.idle[rank] = False
        heappush(self.events, (end, rank))
        for other, delay in self.feeds[kind]:
            if self.idle[other]:
                heappush(self.events, (end + delay, other))
        # Of the kind itself the next microbatch is next, of its users perhaps this one.
        for user in self.touched[kind]:
            microbatch = len(ends[user])
            if microbatch != started and user != kind:
                continue
            latest = 0.0 if microbatch < self.width else inf
            for before, delay in needs[user]:
                done = ends[before]
                if len(done) <= microbatch:
                    latest = inf
                    break
                if done[microbatch] + delay > latest:
                    latest = done[microbatch] + delay
            ready[user] = latest

    def rest(self, rank: int, wake: float) -> None:
        """Let the rank wait until it is woken, or until then."""
        self.idle[rank] = True
        if wake < inf:
            heappush(self.events, (wake, rank))

    def placed(self) -> Placed:
        """What came of it."""
        ends = self.ends
        assert all(len(done) == self.width for done in ends), "every order can be finished"
        lasts = [max(ends[kind][-1] for kind in kinds) for kinds in self.kinds_of]
        return Placed(
            order=tuple(map(tuple, self.order)),
            value=self.problem.value(lasts),
            ends=tuple(map(tuple, ends)),
        )


class _Room:
    """What a rank holds, and whether one more forward leaves a way to finish all."""

    __slots__ = ("held", "limit", "rest", "sizes", "stages")

    def __init__(self, problem: Problem, rank: int) -> None:
        self.limit = problem.limit + slack(problem.limit)
        self.stages = problem.placement.stages_of(rank)
        self.sizes = [problem.held[stage] for stage in self.stages]
        # What a microbatch needs from each stage on.
        self.rest = [sum(self.sizes[place:]) for place in range(len(self.stages))]
        self.held = 0.0

    def takes(self, stage: int, ends: list[list[float]]) -> bool:
        """Whether the forward of ``stage`` may start: kinds of forwards are the stages."""
        if self.limit == inf:
            return True
        stages, sizes = self.stages, self.sizes
        place = stages.index(stage)
        if self.held + sizes[place] > self.limit:
            return False
        # Done, per stage: a later stage of the rank never has more forwards.
        done = [len(ends[each]) for each in stages]
        done[place] += 1
        for place in range(1, len(stages)):
            # The first microbatch that still needs this stage and those after it: all before it
            # can be finished, and what they hold comes free; those from it on hold the stages
            # that they have passed.
            microbatch = done[place]
            if microbatch < done[0]:
                lacks = self.rest[place]
                for before in range(place):
                    lacks += (done[before] - microbatch) * sizes[before]
                if lacks > self.limit:
                    return False
        return True
