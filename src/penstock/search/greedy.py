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

from penstock.schedule.action import Op
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
    width = problem.num_microbatches
    needs, feeds, durations = problem.needs, problem.feeds, problem.durations
    rank_of, num_ranks = problem.ranks, problem.placement.num_ranks
    rooms = [_Room(problem, rank) for rank in range(num_ranks)]
    num_stages = problem.placement.num_stages
    window = [width] * num_stages if windows is None else windows
    first_weight = problem.kind(Op.WEIGHT_GRAD, 0)
    changes = problem.changes
    kinds_of = [[k for k, r in enumerate(rank_of) if r == rank] for rank in range(num_ranks)]
    ends: list[list[float]] = [[] for _ in range(problem.num_kinds)]
    order: list[list[int]] = [[] for _ in range(num_ranks)]
    free = [0.0] * num_ranks
    idle = [True] * num_ranks
    events = [(0.0, rank) for rank in range(num_ranks)]
    # One loop without calls but the heap's and the rooms': it runs once or twice per action.
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        room = rooms[rank]
        chosen, urgency, until, wake = -1, inf, inf, inf
        coming: list[tuple[float, float]] = []
        for kind in kinds_of[rank]:
            microbatch = len(ends[kind])
            if microbatch == width:
                continue
            ready = 0.0
            for before, delay in needs[kind]:
                done = ends[before]
                if len(done) <= microbatch:
                    break
                at = done[microbatch] + delay
                if at > ready:
                    ready = at
            else:
                if ready <= now:
                    asked = priorities[kind][microbatch]
                    if asked < urgency and (
                        kind >= num_stages
                        or (
                            microbatch - len(ends[kind + first_weight]) < window[kind]
                            and room.takes(kind, ends)
                        )
                    ):
                        chosen, urgency = kind, asked
                elif ready < wake or patience:
                    if ready < wake:
                        wake = ready
                    if ready <= now + patience:
                        coming.append((ready, priorities[kind][microbatch]))
        for ready, asked in coming:
            if asked < urgency and ready < until:
                until = ready
        if chosen < 0 or until < inf:
            idle[rank] = True
            if until < inf or wake < inf:
                heappush(events, (until if until < inf else wake, rank))
            continue
        end = now + durations[chosen]
        ends[chosen].append(end)
        order[rank].append(chosen)
        room.held += changes[chosen]
        free[rank] = end
        idle[rank] = False
        heappush(events, (end, rank))
        for other, delay in feeds[chosen]:
            if idle[other]:
                heappush(events, (end + delay, other))
    assert all(len(done) == width for done in ends), "every order can be finished"
    lasts = [max(ends[kind][-1] for kind in kinds_of[rank]) for rank in range(num_ranks)]
    return Placed(
        order=tuple(map(tuple, order)),
        value=problem.value(lasts),
        ends=tuple(map(tuple, ends)),
    )


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


class _Room:
    """What a rank holds, and whether one more forward leaves a way to finish all."""

    __slots__ = ("before", "behind", "held", "limit", "stages")

    def __init__(self, problem: Problem, rank: int) -> None:
        self.limit = problem.limit + slack(problem.limit)
        self.stages = problem.placement.stages_of(rank)
        self.before = problem.held
        self.behind = problem.held_for_weights
        self.held = 0.0

    def takes(self, stage: int, ends: list[list[float]]) -> bool:
        """Whether the forward of ``stage`` may start: kinds of forwards are the stages."""
        if self.limit == inf:
            return True
        held = self.held + self.before[stage]
        if held > self.limit:
            return False
        stages, count = self.stages, len(self.before)
        if len(stages) == 1:
            return True
        # Done, per stage: a later stage of the rank never has more forwards, nor fewer of others.
        forward = [len(ends[s]) + (s == stage) for s in stages]
        for place in range(1, len(stages)):
            # The first microbatch that still needs this stage and those after it: all before it
            # can be finished, and what they hold comes free for it.
            microbatch = forward[place]
            if microbatch >= forward[0]:
                continue
            lacks = held
            for s, done in zip(stages, forward, strict=True):
                if done <= microbatch:
                    lacks += self.before[s]
                before = min(done, microbatch)
                by_input = min(len(ends[s + count]), before)
                by_weight = min(len(ends[s + 2 * count]), by_input)
                lacks -= self.before[s] * (before - by_input)
                lacks -= self.behind[s] * (by_input - by_weight)
            if lacks > self.limit:
                return False
        return True
