"""An order and its times, forwards and backwards; what an exchange of neighbours comes to.

    rank 0   .. u v ..        end(a)    when action a ends, counted from the start of the step
    rank 1   ..  a  ..        tail(a)   from the start of a to the end of the step

An action is critical where nothing of the step is left between its start and its tail. If u and v,
one right after the other, are critical, then the longest way through the two after their exchange
follows from the ends before them and the tails behind them, and no other way has got longer: what
the exchange comes to is known before it is made. This module chooses nothing.

Source: Taillard, Parallel taboo search techniques for the job shop scheduling problem, 1994 (heads
and tails).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeAlias, TypeVar

from penstock.search.problem import Order, SearchProblem, slack

__all__ = ["Timed"]

_NEAR = 1e-9
_Arrows: TypeAlias = Iterable[tuple[int, float]]
_T = TypeVar("_T")


class Timed:
    """An order that changes by exchanges. Actions are numbers: kind x microbatches + microbatch.

    Args:
        problem: what to run.
        order: for each rank, kinds; it can be run, and is within the limit.

    Attributes:
        value: the objective.
    """

    def __init__(self, problem: SearchProblem, order: Order) -> None:
        width, kinds = problem.num_microbatches, range(problem.num_kinds)
        self._problem, self._width = problem, width
        self._most = problem.limit + slack(problem.limit)
        self._durations = _each(problem.durations, width)
        self._changes = _each(problem.changes, width)
        self._rank_of = _each(problem.ranks, width)
        users: list[list[tuple[int, float]]] = [[] for _ in kinds]
        for kind in kinds:
            for before, delay in problem.needs[kind]:
                users[before].append((kind, delay))
        self._needs = _per_action(problem.needs, width)
        self._users = _per_action(users, width)
        self._order = [_numbered(kinds_of_rank, width) for kinds_of_rank in order]
        self._place = [0] * problem.size
        for acts in self._order:
            for place, act in enumerate(acts):
                self._place[act] = place
        self._held = [self._held_before(acts) for acts in self._order]
        self._ends = [0.0] * problem.size
        self._tails = [0.0] * problem.size
        self.value = 0.0
        # All actions by time, none before one that it needs; and where each of them stands.
        self._sequence = self._in_sequence()
        self._index = [0] * problem.size
        self._count(0)
        self._sequence.sort(key=self._ends.__getitem__)
        self._count_back(problem.size)

    @property
    def order(self) -> Order:
        """For each rank, kinds."""
        return tuple(tuple(act // self._width for act in acts) for acts in self._order)

    def neighbours(self, random: Random) -> list[tuple[int, int]]:
        """Neighbours on one critical path that may change places, as far as is seen at once.

        Args:
            random: which path, where there are several.
        """
        ends, place_of = self._ends, self._place
        late = [
            ends[acts[-1]] - origin
            for acts, origin in zip(self._order, self._problem.origins, strict=True)
        ]
        last = random.choice([r for r, time in enumerate(late) if time >= max(late) - _NEAR])
        act = self._order[last][-1]
        pairs = []
        while True:
            start = ends[act] - self._durations[act]
            near = start - _NEAR * (1 + start)
            waited_for = [need for need, delay in self._needs[act] if ends[need] + delay >= near]
            place = place_of[act]
            if place:
                before = self._order[self._rank_of[act]][place - 1]
                if ends[before] >= near and before not in waited_for:
                    waited_for.append(before)
                    if before // self._width != act // self._width:
                        pairs.append((before, act))
            if not waited_for:
                return pairs
            act = waited_for[0] if len(waited_for) == 1 else random.choice(waited_for)

    def fits(self, first: int, second: int) -> bool:
        """Whether the limit is kept if two neighbours change places."""
        held = self._held[self._rank_of[first]][self._place[first]]
        return held + self._changes[second] <= self._most

    def estimate(self, first: int, second: int) -> float:
        """The longest way through two critical neighbours, once they have changed places.

        The value is that, or still what it was, whichever is more.
        """
        ends, tails, durations = self._ends, self._tails, self._durations
        rank, place = self._rank_of[first], self._place[first]
        acts = self._order[rank]
        start = _latest(self._needs[second], ends, ends[acts[place - 1]] if place else 0.0)
        start_of_first = _latest(self._needs[first], ends, start + durations[second])
        behind = place + 2
        tail = tails[acts[behind]] if behind < len(acts) else -self._problem.origins[rank]
        tail_of_first = _latest(self._users[first], tails, tail) + durations[first]
        tail_of_second = _latest(self._users[second], tails, tail_of_first) + durations[second]
        return max(start_of_first + tail_of_first, start + tail_of_second)

    def exchange(self, first: int, second: int) -> bool:
        """Let two neighbours change places; False, and nothing changed, where ranks would wait
        for each other for ever."""
        since, until = self._index[first], self._index[second]
        moved = self._moved(since, until)
        if moved is None:
            return False
        self._sequence[since : until + 1] = moved
        self._put(self._rank_of[first], self._place[first], second, first)
        self._count(since)
        self._count_back(until)
        return True

    def _moved(self, since: int, until: int) -> list[int] | None:
        """A part of the sequence in which its last action, and what that needs, come first.

        None where that needs the first of the part.
        """
        part = self._sequence[since : until + 1]
        first, second = part[0], part[-1]
        needed = {second}
        for act in reversed(part[:-1]):
            acts, behind = self._order[self._rank_of[act]], self._place[act] + 1
            follows = act != first and behind < len(acts) and acts[behind] in needed
            if follows or any(user in needed for user, _ in self._users[act]):
                if act == first:
                    return None
                needed.add(act)
        ahead = [act for act in part if act in needed]
        return [*ahead, first, *(act for act in part[1:] if act not in needed)]

    def _put(self, rank: int, place: int, first: int, second: int) -> None:
        self._order[rank][place : place + 2] = first, second
        self._place[first], self._place[second] = place, place + 1
        held = self._held[rank]
        held[place + 1] = held[place] + self._changes[first]

    def _held_before(self, acts: Sequence[int]) -> list[float]:
        """What a rank holds before each of its actions."""
        held, found = 0.0, []
        for act in acts:
            found.append(held)
            held += self._changes[act]
        return found

    def _in_sequence(self) -> list[int]:
        """All actions, none before one that it needs."""
        done, places = [False] * len(self._durations), [0] * len(self._order)
        waiting: dict[int, list[int]] = {}
        sequence, ready = [], list(range(len(self._order)))
        while ready:
            rank = ready.pop()
            for act in self._order[rank][places[rank] :]:
                missing = [need for need, _ in self._needs[act] if not done[need]]
                if missing:
                    waiting.setdefault(missing[0], []).append(rank)
                    break
                done[act] = True
                sequence.append(act)
                places[rank] += 1
                ready += waiting.pop(act, ())
        assert all(done), "the order can be run"
        return sequence

    def _count(self, since: int) -> None:
        """Ends anew, from a place of the sequence on; and the value."""
        needs, durations, place_of = self._needs, self._durations, self._place
        ends, order, rank_of = self._ends, self._order, self._rank_of
        for act in self._sequence[since:]:
            place = place_of[act]
            start = ends[order[rank_of[act]][place - 1]] if place else 0.0
            for need, delay in needs[act]:
                if ends[need] + delay > start:
                    start = ends[need] + delay
            ends[act] = start + durations[act]
        self.value = self._problem.value([ends[acts[-1]] for acts in order])

    def _count_back(self, until: int) -> None:
        """Tails anew, of what stood up to a place of the sequence; and all places in it."""
        users, durations, rank_of = self._users, self._durations, self._rank_of
        tails, index = self._tails, self._index
        behind = [-origin for origin in self._problem.origins]
        for place in range(len(tails) - 1, -1, -1):
            act = self._sequence[place]
            rank = rank_of[act]
            if index[act] > until:
                behind[rank] = tails[act]
            else:
                tail = behind[rank]
                for user, delay in users[act]:
                    if tails[user] + delay > tail:
                        tail = tails[user] + delay
                behind[rank] = tails[act] = tail + durations[act]
            index[act] = place


def _latest(arrows: _Arrows, times: Sequence[float], least: float) -> float:
    """The latest of times at the other ends of arrows, with the arrows' own."""
    for act, delay in arrows:
        if times[act] + delay > least:
            least = times[act] + delay
    return least


def _each(values: Sequence[_T], width: int) -> list[_T]:
    return [value for value in values for _ in range(width)]


def _per_action(arrows: Sequence[_Arrows], width: int) -> list[tuple[tuple[int, float], ...]]:
    """The same arrows between the actions of each microbatch."""
    return [
        tuple((kind * width + microbatch, delay) for kind, delay in of_kind)
        for of_kind in arrows
        for microbatch in range(width)
    ]


def _numbered(kinds: Sequence[int], width: int) -> list[int]:
    """The actions of kinds, each of which takes microbatches in turn."""
    count: dict[int, int] = {}
    found = []
    for kind in kinds:
        microbatch = count.get(kind, 0)
        found.append(kind * width + microbatch)
        count[kind] = microbatch + 1
    return found
