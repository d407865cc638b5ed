"""List scheduling: whenever a rank is free it starts the ready action that matters most.

    priorities   0F 0  1  2 ...      rank 0  0F0 0F1 0F2 ... 0I0 0F3 0W0
                 0I 4  5  6 ...      rank 1  ... 1F0 1F1 1I0 1F2 1I1 1W0
                 0W 5  6  7 ...

What ready means comes from ``penstock.schedule.rules``; what a rank may hold, from the problem's
limit. A forward may start only if the microbatches under way could still be finished one after
the other, in their order, within the limit on every rank: so no choice leads into a dead end.
Where W holds more than F left, forwards leave room for the most that one I may add, and a rank
without that room takes one microbatch at a time.
Ties go to the lower time, rank and kind, so that the same priorities give the same order always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.search.problem import Order, SearchProblem, order_of, program_of, slack
from penstock.simulate.simulation import simulate

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
    problem: SearchProblem,
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


def played(problem: SearchProblem, program: Program) -> Placed:
    """The order of a program, full backwards taken apart, and its times.

    Args:
        problem: a problem with the program's placement and number of microbatches.
        program: compute only.
    """
    order = order_of(problem, program)
    result = simulate(program_of(problem, order, name=program.name), problem.costs)
    ends: list[list[float]] = [[] for _ in range(problem.num_kinds)]
    runs = problem.num_kinds if problem.splits else 2 * problem.placement.num_stages
    for kinds, times in zip(order, result.ends, strict=True):
        coming, end = iter(times), 0.0
        for kind in kinds:
            end = next(coming) if kind < runs else end
            ends[kind].append(end)
    return Placed(
        order=order,
        value=result.makespan if problem.objective == "makespan" else result.span,
        ends=tuple(map(tuple, ends)),
    )


def replay(problem: SearchProblem, order: Sequence[Sequence[int]]) -> Placed | None:
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
        "coming",
        "durations",
        "ends",
        "events",
        "feeds",
        "forwards",
        "free",
        "idle",
        "needs",
        "order",
        "patience",
        "priorities",
        "problem",
        "ranks",
        "rooms",
        "touched",
        "urgent",
        "width",
        "windows",
    )

    def __init__(
        self,
        problem: SearchProblem,
        priorities: Sequence[Sequence[float]],
        windows: Sequence[int] | None,
        patience: float,
    ) -> None:
        ranks = range(problem.placement.num_ranks)
        self.problem, self.priorities, self.patience = problem, priorities, patience
        self.width = problem.num_microbatches
        self.needs, self.feeds, self.durations = problem.needs, problem.feeds, problem.durations
        self.touched = [(kind, *users) for kind, users in enumerate(problem.users)]
        self.changes, self.forwards = problem.changes, problem.placement.num_stages
        self.ranks = problem.ranks
        self.rooms = [_Room(problem, rank) for rank in ranks]
        stages = problem.placement.num_stages
        self.windows = [self.width] * stages if windows is None else windows
        self.ends: list[list[float]] = [[] for _ in self.needs]
        # Of each rank, as heaps, the kinds whose next microbatch can run: those that will, by
        # when, and those that can by now, by how much they matter.
        self.coming: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self.urgent: list[list[tuple[float, int]]] = [[] for _ in ranks]
        for kind, needs in enumerate(self.needs):
            if not needs:
                heappush(self.coming[self.ranks[kind]], (0.0, kind))
        self.order: list[list[int]] = [[] for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.idle = [True for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]

    def choose(self, rank: int, now: float) -> tuple[int | None, float]:
        """The most urgent kind that can run now; or none, and when there may be one."""
        coming, urgent = self.coming[rank], self.urgent[rank]
        while coming and coming[0][0] <= now:
            kind = heappop(coming)[1]
            heappush(urgent, (self.asked(kind), kind))
        without_room = []
        while urgent and not self.has_room(urgent[0][1], rank):
            without_room.append(heappop(urgent))
        urgency, chosen = urgent[0] if urgent else (inf, None)
        wake = coming[0][0] if coming else inf
        until = now + self.patience
        # A rank waits for the first of those that are more urgent.
        if wake <= until and (
            waits := [at for at, kind in coming if at <= until and self.asked(kind) < urgency]
        ):
            chosen, wake = None, min(waits)
        elif urgent:
            heappop(urgent)
        for each in without_room:
            heappush(urgent, each)
        return chosen, wake

    def asked(self, kind: int) -> float:
        """How urgent the next microbatch of a kind is."""
        return self.priorities[kind][len(self.ends[kind])]

    def has_room(self, kind: int, rank: int) -> bool:
        """Whether what one more of a kind leaves behind fits; W leaves nothing."""
        if kind >= self.forwards:
            return self.changes[kind] <= 0 or self.rooms[rank].grows(self.changes[kind])
        stage, ends = kind, self.ends
        held = len(ends[stage]) - len(ends[stage + 2 * self.forwards])
        return held < self.windows[stage] and self.rooms[rank].takes(stage, ends)

    def start(self, kind: int, rank: int, now: float) -> None:
        """Run the next microbatch of a kind; all that waits for it learns when it ends."""
        ends, needs = self.ends, self.needs
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
            if microbatch == self.width or (microbatch != started and user != kind):
                continue
            latest = 0.0
            for before, delay in needs[user]:
                done = ends[before]
                if len(done) <= microbatch:
                    break
                if done[microbatch] + delay > latest:
                    latest = done[microbatch] + delay
            else:
                heappush(self.coming[self.ranks[user]], (latest, user))

    def rest(self, rank: int, wake: float) -> None:
        """Let the rank wait until it is woken, or until then."""
        self.idle[rank] = True
        if wake < inf:
            heappush(self.events, (wake, rank))

    def placed(self) -> Placed:
        """What came of it."""
        ends = self.ends
        assert all(len(done) == self.width for done in ends), "every order can be finished"
        return Placed(
            order=tuple(map(tuple, self.order)),
            value=self.problem.value(self.free),
            ends=tuple(map(tuple, ends)),
        )


class _Room:
    """What a rank holds, and whether one more forward leaves a way to finish all."""

    __slots__ = ("alone", "growing", "held", "limit", "rest", "safe", "sizes", "stages")

    def __init__(self, problem: SearchProblem, rank: int) -> None:
        self.limit = problem.limit + slack(problem.limit)
        self.stages = problem.placement.stages_of(rank)
        self.sizes = [problem.held[stage] for stage in self.stages]
        # What a microbatch needs from each stage on.
        self.rest = [sum(self.sizes[place:]) for place in range(len(self.stages))]
        # What forwards may take, so that an I has its room once no W is left to run.
        growths = [problem.growths[stage] for stage in self.stages]
        self.safe = self.limit - max(growths)
        self.alone = self.rest[0] > self.safe
        self.growing = [
            (more, problem.kind(Op.INPUT_GRAD, stage), problem.kind(Op.WEIGHT_GRAD, stage))
            for more, stage in zip(growths, self.stages, strict=True)
            if any(growths)
        ]
        self.held = 0.0

    def grows(self, more: float) -> bool:
        """Whether an I that leaves so much more may start."""
        return self.held + more <= self.limit

    def takes(self, stage: int, ends: list[list[float]]) -> bool:
        """Whether the forward of ``stage`` may start: kinds of forwards are the stages."""
        if self.limit == inf:
            return True
        stages, sizes = self.stages, self.sizes
        chosen = stages.index(stage)
        if self.held + sizes[chosen] > self.limit:
            return False
        if self.alone:
            return all(len(ends[by_weight]) == len(ends[stage]) for *_, by_weight in self.growing)
        grown = sum(
            more * (len(ends[by_input]) - len(ends[by_weight]))
            for more, by_input, by_weight in self.growing
        )
        if self.held - grown + sizes[chosen] > self.safe:
            return False
        first = len(ends[stages[0]]) + (chosen == 0)
        held, passed = sizes[chosen], 0.0
        for place, each in enumerate(stages):
            # Done here; a later stage of the rank never has more forwards.
            done = len(ends[each])
            # The first microbatch that still needs this stage and those after it: all before it
            # can be finished, and what they hold comes free; those from it on hold the stages
            # that they have passed. Up to the chosen stage this forward adds nothing to that.
            if place > chosen:
                if done < first and self.rest[place] + held - done * passed > self.safe:
                    return False
                if not done:
                    break
            held += done * sizes[place]
            passed += sizes[place]
        return True
