"""Local search: exchanges neighbours on the critical path of an order.

    rank 0  F0 F1 F2 [I0 F3] W0 ...       the longest chain of actions goes through I0 and F3, one
    rank 1  .. F0 F1  I0     I1 ...       right after the other: only another order of such
                                          neighbours can make it shorter

``end(a)`` is the end of action a from the start of the step, ``tail(a)`` the time from the start of
a to the end of the step. After an exchange of critical neighbours, the longest path through both
follows from the ends before them and the tails behind them. No other path gets longer, so the
result of an exchange is known in advance.

Sources: Taillard, Parallel taboo search techniques for the job shop scheduling problem, 1994 (heads
and tails); van Laarhoven, Aarts and Lenstra, Job shop scheduling by simulated annealing, 1992.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from random import Random

from penstock.search.problem import Order, SearchProblem

__all__ = ["ExchangedOrder", "anneal"]

_NEAR = 1e-9
# The increase per exchange that is accepted at first, in mean actions.
_HEAT = 0.3
# The work of an exchange per action of the step, and of a rejected exchange, in placed actions.
_TAKEN, _REFUSED = 0.15, 3
# The exchanges between two looks at the clock.
_LOOK = 64


class ExchangedOrder:
    """An order under exchange of neighbours; actions are integers (``SearchProblem.ids``).

    Args:
        problem: the search problem.
        order: the kinds of each rank in order; free of deadlocks and within the limit.

    Attributes:
        value: the objective.
    """

    def __init__(self, problem: SearchProblem, order: Order) -> None:
        self._problem, self._width = problem, problem.num_microbatches
        self._rank_of = [rank for rank in problem.ranks for _ in range(self._width)]
        self._durations, self._changes = (
            [value for value in values for _ in range(self._width)]
            for values in (problem.durations, problem.changes)
        )
        self._needs, self._users = (
            [
                tuple((kind * self._width + microbatch, delay) for kind, delay in of_kind)
                for of_kind in edges
                for microbatch in range(self._width)
            ]
            for edges in (problem.needs, problem.users)
        )
        self._order = [problem.ids(kinds) for kinds in order]
        self._place = [0] * problem.size
        for acts in self._order:
            for place, act in enumerate(acts):
                self._place[act] = place
        # The memory that a rank holds before each of its actions.
        changes = self._changes.__getitem__
        self._held = [[*accumulate(map(changes, acts), initial=0.0)] for acts in self._order]
        played = problem.play(self._order)
        assert played is not None, "the order does not deadlock"
        self.value = problem.value([ends[-1] for ends in played.ends])
        self._ends, self._tails = played.done, [0.0] * problem.size
        # All actions sorted by end, each after its prerequisites, and the position of each.
        runs = (self._order[rank][first:stop] for rank, first, stop in played.runs())
        self._sequence = sorted(chain.from_iterable(runs), key=self._ends.__getitem__)
        self._index = [0] * problem.size
        self._count_back(problem.size)

    @property
    def order(self) -> Order:
        """The kinds of each rank in order."""
        return tuple(tuple(act // self._width for act in acts) for acts in self._order)

    def neighbours(self, random: Random) -> list[tuple[int, int]]:
        """Pairs of neighbours of different kinds on one critical path, chosen at random."""
        ends, place_of = self._ends, self._place
        late = [
            ends[acts[-1]] - origin
            for acts, origin in zip(self._order, self._problem.origins, strict=True)
        ]
        last = random.choice([r for r, time in enumerate(late) if time >= max(late) * (1 - _NEAR)])
        act = self._order[last][-1]
        pairs = []
        while True:
            start = ends[act] - self._durations[act]
            near = start * (1 - _NEAR)
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
        """True if two neighbours can change places within the memory limit."""
        held = self._held[self._rank_of[first]][self._place[first]]
        return held + self._changes[second] <= self._problem.most

    def estimate(self, first: int, second: int) -> float:
        """The longest path through two critical neighbours after their exchange: the new objective
        if that exceeds the old one."""
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
        """Exchange two neighbours; return False and change nothing if that would deadlock."""
        since, until = self._index[first], self._index[second]
        moved = self._moved(since, until)
        if moved is None:
            return False
        self._sequence[since : until + 1] = moved
        rank, place = self._rank_of[first], self._place[first]
        self._order[rank][place : place + 2] = second, first
        self._place[second], self._place[first] = place, place + 1
        self._held[rank][place + 1] = self._held[rank][place] + self._changes[second]
        self._count(since)
        self._count_back(until)
        return True

    def _moved(self, since: int, until: int) -> list[int] | None:
        """Reorder a slice so that its last action and the prerequisites of that come first.

        None if the last action depends on the first.
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

    def _count(self, since: int) -> None:
        """Update the ends from a position on, and the objective."""
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
        """Update the tails up to a position, and all positions before it."""
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


def _latest(edges: Iterable[tuple[int, float]], times: Sequence[float], least: float) -> float:
    """The latest time at the other end of an edge, plus the length of that edge."""
    for act, delay in edges:
        if times[act] + delay > least:
            least = times[act] + delay
    return least


def anneal(
    problem: SearchProblem,
    start: Order,
    *,
    seed: int,
    work: float,
    share_used: Callable[[float], float] = lambda done: 0.0,
) -> tuple[float, Order]:
    """Search by simulated annealing, one exchange at a time.

    Args:
        problem: the search problem.
        start: the initial order, within the memory limit.
        seed: the random seed.
        work: the total work, in placed actions; towards its end only better orders are accepted.
        share_used: takes the share of the work done, and returns the share of the time used if
            that limits the search, else 0. To finish the cooling schedule gains more than a longer
            run at high temperature.

    Returns:
        The best objective, and its order.
    """
    random, now = Random(seed), ExchangedOrder(problem, start)
    best = now.value, start
    heat = _HEAT * sum(problem.durations) / problem.num_kinds
    pairs, worked, used, tried = now.neighbours(random), 0.0, 0.0, 0
    while pairs and (done := max(worked / work, used)) < 1:
        tried += 1
        if tried % _LOOK == 0:
            used = share_used(done)
        first, second = random.choice(pairs)
        worked += _REFUSED
        if not now.fits(first, second):
            continue
        more = now.estimate(first, second) - now.value
        is_longer = more > _NEAR * now.value
        now_heat = heat * (1 - done)
        if is_longer and (not now_heat or random.random() >= math.exp(-more / now_heat)):
            continue
        worked += _TAKEN * problem.size
        if now.exchange(first, second):
            pairs = now.neighbours(random)
            if now.value < best[0] * (1 - _NEAR):
                best = now.value, now.order
    return best
