"""Splits for ranks that hold several stages: a rank's load is the sum over its stages.

    V-shape    rank 0   stages 0 and 3         blocks   2  2  2  2  2  2  6
               rank 1   stages 1 and 2         stages   0     1  2      3
                                               rank 0   2 + 6    rank 1   4 + 6

The dynamic program of ``chain.py`` does not apply: the best start depends on later stages of the
same ranks, and the problem is NP-hard (it contains PARTITION). So a local search finds a good
split, and branch and bound then tries every split that might be better, within a budget. At last
the stages are made even, as long as the ranks stay as quick.
"""

from __future__ import annotations

import math
import random
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.partition.balance.chain import Array, Chain
from penstock.schedule.placement import Placement

__all__ = ["SharedChain", "best_split"]

# Budgets, in evaluated loads of ranks: some tenths of a second each.
PERTURBING = 400_000
PROVING = 1_500_000
LEAST_LOOKS = 200  # what one call of numpy costs
# Sums of the same numbers in another order differ in their last bits.
DIGITS = 12
LESS = 1 - 10**-DIGITS

Ends: TypeAlias = npt.NDArray[np.intp]
"""The ends of the stages of a split, from 0 on."""
Value: TypeAlias = list[float]
"""The value of a split, compared in order: the excess of the fullest rank, the goal, and the
unevenness of ranks, or of stages if the goal is good enough."""


class SharedChain:
    """A chain of blocks to cut into stages that share ranks; its ``limits`` are the ranks'.

    The goal is ``bottleneck_weight`` × the busiest rank's load + ``communication_weight`` × all
    crossings, per microbatch. Times are parts of the time of all blocks.

    Attributes:
        holders: per stage its ranks, one for each direction of the placement.
        communicating: per stage the ranks of the transfer before it: both sides in each direction,
            none if both sides are the same rank.
    """

    def __init__(
        self,
        chain: Chain,
        placement: Placement,
        *,
        bottleneck_weight: float,
        communication_weight: float,
    ) -> None:
        ranks, num = placement.stage_ranks, placement.num_model_stages
        directions = range(len(ranks) // num)
        self.holders = [[ranks[stage + d * num] for d in directions] for stage in range(num)]
        self.communicating: list[list[int]] = [[]]
        for before, after in zip(self.holders, self.holders[1:], strict=False):
            sides = zip(before, after, strict=True)
            self.communicating.append([rank for a, b in sides if a != b for rank in (a, b)])
        self.num_ranks, self.num_stages = placement.num_ranks, num
        self._holds = self._counts(self.holders)
        self._sends = self._counts(self.communicating)
        unit = chain.times[-1] or 1.0
        self.times, self.crossings = chain.times / unit, chain.crossings / unit
        self.held, self.limits = chain.held, chain.limits
        # A microbatch passes one direction, and each crossing is counted on both sides.
        self.bottleneck_weight = bottleneck_weight / len(directions)
        self.communication_weight = communication_weight / len(directions) / 2

    def _counts(self, ranks: list[list[int]]) -> Array:
        """How often each stage (row) has each rank (column)."""
        return np.array([np.bincount(each, minlength=self.num_ranks) for each in ranks], float)

    def values(self, splits: Ends, good_enough: float = 0.0) -> list[Value]:
        """The values of splits [split, end]; lower is better.

        Below the goal ``good_enough`` only the evenness of stages counts; 0 for no such goal.
        """
        starts, ends, stages = splits[:, :-1], splits[:, 1:], np.arange(self.num_stages)
        spans, crossed = self.times[ends] - self.times[starts], self.crossings[starts]
        loads = spans @ self._holds + crossed @ self._sends
        held = (self.held[stages, ends] - self.held[stages, starts]) @ self._holds
        fullest = (held / self.limits).max(axis=1).clip(min=1.0)
        goal = self.bottleneck_weight * loads.max(axis=1)
        goal += self.communication_weight * (crossed @ self._sends.sum(axis=1))
        uneven = ((spans if good_enough else loads) ** 2).sum(axis=1)
        values = np.stack([fullest, goal.clip(min=good_enough), uneven], axis=1)
        found: list[Value] = values.round(DIGITS).tolist()
        return found

    def value(self, split: Ends, good_enough: float = 0.0) -> Value:
        """The value of one split."""
        return self.values(split[None, :], good_enough)[0]


def best_split(problem: SharedChain, begin: list[int], slack: float) -> tuple[list[int], bool]:
    """The best split found, from the ends of an initial split on, starting with 0.

    ``slack`` is the relative loss of the goal that is accepted for more even stages.

    Returns:
        The ends of its stages, and True if it is proven that no split has a lower goal or, if ranks
        are too full, that no split fits the limits.
    """
    best, _ = descend(problem, np.array(begin))
    best = perturb(problem, best, PERTURBING // 10)
    search = BranchAndBound(problem, best)
    is_proven = search.run()
    if search.found is not None:
        best, _ = descend(problem, np.array(search.found))
    if not is_proven:
        best = perturb(problem, best, PERTURBING)
    good_enough = problem.value(best)[1] * (1 + slack) / LESS
    best, looks = descend(problem, best, good_enough, PERTURBING)
    best = perturb(problem, best, PERTURBING // 10 - looks, good_enough)
    return best.tolist(), is_proven


def descend(
    problem: SharedChain, split: Ends, good_enough: float = 0.0, most_looks: float = math.inf
) -> tuple[Ends, int]:
    """Move runs of cuts by one block while that helps; also the number of evaluated loads."""
    best, looks, is_better = problem.value(split, good_enough), 0, True
    while is_better and looks < most_looks:
        is_better = False
        for first in range(1, problem.num_stages):
            moved = _neighbours(split, first)
            looks += max(len(moved) * problem.num_ranks, LEAST_LOOKS)
            values = problem.values(moved, good_enough)
            least = min(range(len(values)), key=values.__getitem__, default=0)
            if values and values[least] < best:
                best, split, is_better = values[least], moved[least], True
    return split, looks


def _neighbours(split: Ends, first: int) -> Ends:
    """The splits with a run of cuts, from the cut ``first`` on, moved by one block."""
    num = len(split) - 1 - first
    runs = np.pad(np.tri(num, dtype=np.intp), ((0, 0), (first, 1)))
    moved = np.concatenate([split + runs, split - runs])
    return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]


def perturb(problem: SharedChain, split: Ends, most_looks: int, good_enough: float = 0.0) -> Ends:
    """The best of several descents from random splits near the best so far; deterministic."""
    draw, num_stages, looks = random.Random(0), problem.num_stages, 0
    best = problem.value(split, good_enough)
    while looks < most_looks and num_stages > 1:
        other = split.copy()
        for _ in range(draw.randint(1, 4)):
            cut = draw.randrange(1, num_stages)
            other[cut] = draw.randint(other[cut - 1] + 1, other[cut + 1] - 1)
        other, looked = descend(problem, other, good_enough)
        looks += looked + num_stages * problem.num_ranks
        found = problem.value(other, good_enough)
        if found <= best:  # an equally good split leads to other neighbours
            best, split = found, other
    return split


class OutOfBudget(Exception):
    """The budget of the search is used up."""


class BranchAndBound:
    """Search all splits that may be better than the known one.

    Attributes:
        found: the best split found that is better; None if there is none.
    """

    def __init__(self, problem: SharedChain, known: Ends) -> None:
        fullest, goal, _ = problem.value(known)
        self.problem = problem
        self.found: list[int] | None = None
        self._goal = goal * LESS if fullest <= 1 else math.inf
        self._times, self._crossings = problem.times.tolist(), problem.crossings.tolist()
        self._held, self._limits = problem.held.tolist(), problem.limits.tolist()
        self._looks = 0
        holders = problem.holders
        self._later = [set().union(*holders[stage + 1 :]) for stage in range(len(holders))]

    def run(self) -> bool:
        """Search; return True if the budget sufficed."""
        zeros = [0.0] * self.problem.num_ranks
        try:
            self._cut([0], zeros, zeros, 0.0)
        except OutOfBudget:
            return False
        return True

    def _cut(self, ends: list[int], busy: list[float], full: list[float], crossed: float) -> None:
        """Try all ends of the next stage, given the loads and bytes of the ranks so far."""
        problem, times, stage, start = self.problem, self._times, len(ends) - 1, ends[-1]
        ranks, held, later = problem.holders[stage], self._held[stage], self._later[stage]
        last, num_left = len(times) - 1, problem.num_stages - stage - 1
        for end in range(start + 1 if num_left else last, last - num_left + 1):
            self._looks += len(busy)
            if self._looks > PROVING:
                raise OutOfBudget
            loads, bytes_, now = list(busy), list(full), crossed
            for rank in ranks:
                loads[rank] += times[end] - times[start]
                bytes_[rank] += held[end] - held[start]
            most = self._most(now)
            if any(loads[rank] >= most or bytes_[rank] > self._limits[rank] for rank in ranks):
                break  # both only grow with more blocks
            for rank in problem.communicating[stage + 1] if num_left else ():
                loads[rank] += self._crossings[end]
                now += self._crossings[end]
            most = self._most(now)
            room = sum(most - loads[rank] for rank in later)
            if max(loads) >= most or (times[-1] - times[end]) * len(ranks) > room:
                continue  # a rank is too busy, or the remaining blocks do not fit
            if num_left:
                self._cut([*ends, end], loads, bytes_, now)
            else:
                self.found = [*ends, end]
                goal = problem.bottleneck_weight * max(loads) + problem.communication_weight * now
                self._goal = LESS * goal

    def _most(self, crossed: float) -> float:
        """The load that every rank must stay below."""
        rest = self._goal - self.problem.communication_weight * crossed
        weight = self.problem.bottleneck_weight
        if not weight:
            return math.inf if rest > 0 else 0.0
        return rest / weight
