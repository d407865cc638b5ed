"""Improves an order by exchanging neighbours on its critical path.

    rank 0  F0 F1 F2 [I0 F3] W0 ...       the chain of actions that makes the step as long as it is
    rank 1  .. F0 F1  I0     I1 ...       goes through I0 and F3, one right after the other: only
                                          another order of such neighbours can make it shorter

Exchanges that make it longer by little are taken now and then, the less the more of the work is
done, so that the next ones may lead further. This module works out no times.

Source: van Laarhoven, Aarts and Lenstra, Job shop scheduling by simulated annealing, 1992.
"""

from __future__ import annotations

import math
import random

from penstock.search.critical import Timed
from penstock.search.problem import Order, SearchProblem

__all__ = ["Swapper"]

_NEAR = 1e-9
# How much longer an order may get by one exchange at first, in mean actions.
_HEAT = 0.3
# What an exchange takes, per action of the step, and a refusal: in actions placed.
_TAKEN, _REFUSED = 0.15, 3


class Swapper:
    """A search among orders, one exchange at a time.

    Args:
        problem: what to run.
        start: an order to begin with, within the limit.
        seed: of its random choices.
        work: how much is to be done in all, in actions placed; towards the end only better orders
            are taken.

    Attributes:
        best: the best order so far.
        value: what it comes to.
        work: how much is to be done in all; may be made less on the way.
        worked: how much is done.
    """

    def __init__(self, problem: SearchProblem, start: Order, *, seed: int, work: float) -> None:
        self._random = random.Random(seed)
        self._heat = _HEAT * sum(problem.durations) / problem.num_kinds
        self.work = work
        self._size = problem.size
        self._now = Timed(problem, start)
        self._pairs = self._now.neighbours(self._random)
        self.best, self.value = start, self._now.value
        self.worked = 0.0

    def step(self) -> bool:
        """Try one exchange; False where there is none to try, or the work is done."""
        if not self._pairs or self.worked >= self.work:
            return False
        first, second = self._random.choice(self._pairs)
        self.worked += _REFUSED
        if not (self._now.fits(first, second) and self._takes(first, second)):
            return True
        self.worked += _TAKEN * self._size
        if self._now.exchange(first, second):
            self._pairs = self._now.neighbours(self._random)
            if self._now.value < self.value * (1 - _NEAR):
                self.best, self.value = self._now.order, self._now.value
        return True

    def _takes(self, first: int, second: int) -> bool:
        more = self._now.estimate(first, second) - self._now.value
        if more <= _NEAR * self._now.value:
            return True
        heat = self._heat * (1 - self.worked / self.work)
        return heat > 0 and self._random.random() < math.exp(-more / heat)
