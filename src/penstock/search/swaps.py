"""Improves an order by exchanging neighbours on its critical path.

    rank 0  F0 F1 F2 [I0 F3] W0 ...       the chain of actions that makes the step as long as it is
    rank 1  .. F0 F1  I0     I1 ...       goes through I0 and F3, one right after the other: only
                                          another order of such neighbours can make it shorter

Exchanges that make it longer by little are taken now and then, so that the next ones may lead
further. This module places nothing itself.

Source: van Laarhoven, Aarts and Lenstra, Job shop scheduling by simulated annealing, 1992.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from penstock.search.greedy import Placed, replay
from penstock.search.problem import Problem, slack

__all__ = ["Swapper"]

_NEAR = 1e-9
# How much longer an order may get by one exchange at first, in mean actions.
_HEAT = 0.3


class Swapper:
    """A search among orders, one exchange at a time.

    Args:
        problem: what to run.
        start: an order to begin with, within the limit, and its times.
        seed: of its random choices.
        steps: how many exchanges are to be tried in all; towards the end only better ones are
            taken.

    Attributes:
        best: the best order so far.
    """

    def __init__(self, problem: Problem, start: Placed, *, seed: int, steps: int) -> None:
        self._problem = problem
        self._random = random.Random(seed)
        self._steps = steps
        self._tried = 0
        self._now = start
        self._pairs = self._critical(start)
        self.best = start

    def step(self) -> bool:
        """Try one exchange; False where there is none to try."""
        self._tried += 1
        if not self._pairs:
            return False
        rank, place = self._random.choice(self._pairs)
        kinds = list(self._now.order[rank])
        kinds[place - 1], kinds[place] = kinds[place], kinds[place - 1]
        if not self._fits(rank, kinds):
            return True
        order = [*self._now.order]
        order[rank] = tuple(kinds)
        placed = replay(self._problem, order)
        if placed is None or not self._takes(placed.value):
            return True
        self._now, self._pairs = placed, self._critical(placed)
        if placed.value < self.best.value * (1 - _NEAR):
            self.best = placed
        return True

    def _takes(self, value: float) -> bool:
        more = value - self._now.value
        if more <= _NEAR * value:
            return True
        left = 1 - self._tried / self._steps
        heat = _HEAT * left * sum(self._problem.durations) / self._problem.num_kinds
        return heat > 0 and self._random.random() < math.exp(-more / heat)

    def _fits(self, rank: int, kinds: Sequence[int]) -> bool:
        problem = self._problem
        most, changes = problem.limit + slack(problem.limit), problem.changes
        held = 0.0
        for kind in kinds:
            held += changes[kind]
            if held > most:
                return False
        return True

    def _critical(self, placed: Placed) -> list[tuple[int, int]]:
        """Places on ranks whose action is on the critical path right behind the one before it."""
        problem, ends = self._problem, placed.ends
        numbers: list[list[int]] = []
        places: dict[tuple[int, int], int] = {}
        for kinds in placed.order:
            count = [0] * problem.num_kinds
            mine = []
            for place, kind in enumerate(kinds):
                places[kind, count[kind]] = place
                mine.append(count[kind])
                count[kind] += 1
            numbers.append(mine)
        origins = problem.origins
        lasts = [ends[kinds[-1]][-1] for kinds in placed.order]
        late = [last - origin for last, origin in zip(lasts, origins, strict=True)]
        rank = late.index(max(late))
        place = len(placed.order[rank]) - 1
        pairs = []
        while True:
            kind, microbatch = placed.order[rank][place], numbers[rank][place]
            start = ends[kind][microbatch] - problem.durations[kind]
            near = start - _NEAR * (1 + start)
            waited_for = [
                need
                for need, delay in problem.needs[kind]
                if ends[need][microbatch] + delay >= near
            ]
            before = placed.order[rank][place - 1] if place else kind
            if place and ends[before][numbers[rank][place - 1]] >= near:
                needed = before in waited_for and numbers[rank][place - 1] == microbatch
                if before != kind and not needed:
                    pairs.append((rank, place))
                place -= 1
            elif waited_for:
                rank, place = problem.ranks[waited_for[0]], places[waited_for[0], microbatch]
            else:
                return pairs
