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
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import mul, truediv
from typing import TypeAlias

from penstock.partition.balance.chain import Chain
from penstock.schedule.placement import Placement

__all__ = ["MutableSplit", "SharedChain", "best_split"]

# Budgets, in evaluated loads of ranks: some tenths of a second each.
PERTURBING = 400_000
PROVING = 1_500_000
# Sums of the same numbers in another order differ in their last bits.
LESS = 1 - 1e-12

Value: TypeAlias = tuple[float, float, float]
"""The value of a split, compared in order: the excess of the fullest rank, the goal, and the
unevenness of ranks, or of stages if the goal is good enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChain:
    """A chain of blocks to cut into stages that share ranks.

    The goal is ``bottleneck_weight`` × the busiest rank's load + ``communication_weight`` × all
    crossings.

    Args:
        chain: the blocks; its ``limits`` are the ranks'.
        holders: per stage its ranks, one for each direction of the placement.
        communicating: per stage the ranks of the transfer before it: both sides in each direction,
            none if both sides are the same rank.
        bottleneck_weight: the weight of the busiest rank.
        communication_weight: the weight of crossings.
        good_enough: the goal below which only the evenness of stages counts; 0 for none.
    """

    chain: Chain
    holders: tuple[tuple[int, ...], ...]
    communicating: tuple[tuple[int, ...], ...]
    bottleneck_weight: float
    communication_weight: float
    good_enough: float = 0.0

    @classmethod
    def of(
        cls,
        chain: Chain,
        placement: Placement,
        *,
        bottleneck_weight: float,
        communication_weight: float,
    ) -> SharedChain:
        """The problem of a placement, with weights per microbatch."""
        ranks, num = placement.stage_ranks, placement.num_model_stages
        directions = len(ranks) // num
        places = [[stage + d * num for d in range(directions)] for stage in range(num)]
        communicating: list[tuple[int, ...]] = [()]
        for stages in places[1:]:
            sides = [(ranks[stage - 1], ranks[stage]) for stage in stages]
            communicating.append(tuple(rank for a, b in sides if a != b for rank in (a, b)))
        # A microbatch passes one direction, and each crossing is counted on both sides.
        return cls(
            chain=chain,
            holders=tuple(tuple(ranks[stage] for stage in stages) for stages in places),
            communicating=tuple(communicating),
            bottleneck_weight=bottleneck_weight / directions,
            communication_weight=communication_weight / directions / 2,
        )


def best_split(problem: SharedChain, ends: list[int], slack: float) -> tuple[list[int], bool]:
    """The best split found, from the ends of an initial split on, starting with 0.

    ``slack`` is the relative loss of the goal that is accepted for more even stages.

    Returns:
        The ends of its stages, and True if it is proven that no split has a lower goal or, if ranks
        are too full, that no split fits the limits.
    """
    best = MutableSplit(problem, ends)
    descend(best)
    best = perturb(best, PERTURBING // 10)
    search = BranchAndBound(best)
    is_proven = search.run()
    if search.found is not None:
        best = MutableSplit(problem, search.found)
        descend(best)
    if not is_proven:
        best = perturb(best, PERTURBING)
    goal = best.value()[1] * (1 + slack) / LESS
    even = MutableSplit(replace(problem, good_enough=goal), best.ends)
    looks = descend(even, PERTURBING)
    return perturb(even, PERTURBING // 10 - looks).ends, is_proven


class MutableSplit:
    """A mutable split, by the ends of its stages from 0 on, with the loads of its ranks."""

    def __init__(self, problem: SharedChain, ends: list[int]) -> None:
        self.problem = problem
        self.ends = list(ends)
        num_ranks = len(problem.chain.limits)
        self.loads = [0.0] * num_ranks
        self.held = [0.0] * num_ranks
        self._is_limited = min(problem.chain.limits) < math.inf
        self.crossed = 0.0
        self.squares = 0.0  # of the stages' loads
        chain = problem.chain
        for stage, (i, j) in enumerate(pairwise(self.ends)):
            loads, held = chain.loads[stage], chain.held[stage]
            self.squares += (loads[j] - loads[i]) ** 2
            for rank in problem.holders[stage]:
                self.loads[rank] += loads[j] - loads[i]
                self.held[rank] += held[j] - held[i]
            self._cross(stage, chain.crossings[i])

    def _cross(self, stage: int, time_s: float) -> None:
        for rank in self.problem.communicating[stage]:
            self.loads[rank] += time_s
            self.crossed += time_s

    def value(self) -> Value:
        """The split's value; lower is better."""
        problem = self.problem
        fullest, goal = 1.0, self._goal()
        if self._is_limited:
            fullest = max(fullest, *map(truediv, self.held, problem.chain.limits))
        if not problem.good_enough:
            return fullest, goal, sum(map(mul, self.loads, self.loads))
        return fullest, max(goal, problem.good_enough), self.squares

    def better(self, than: Value) -> Value | None:
        """The split's value, if lower than another value by more than rounding."""
        # Most moves are worse, which the goal alone shows if there are no limits.
        if not self._is_limited and self._goal() > than[1] / LESS:
            return None
        value = self.value()
        return value if is_less(value, than) else None

    def _goal(self) -> float:
        problem = self.problem
        return (
            problem.bottleneck_weight * max(self.loads)
            + problem.communication_weight * self.crossed
        )

    def move(self, stage: int, by: int) -> None:
        """Move the cut before a stage by one block, forward (1) or back (-1)."""
        chain, problem = self.problem.chain, self.problem
        old = self.ends[stage]
        new = self.ends[stage] = old + by
        for grows, sign, other in (
            (stage - 1, 1, self.ends[stage - 1]),
            (stage, -1, self.ends[stage + 1]),
        ):
            loads, held = chain.loads[grows], chain.held[grows]
            self.squares += (loads[new] - loads[other]) ** 2 - (loads[old] - loads[other]) ** 2
            for rank in problem.holders[grows]:
                self.loads[rank] += sign * (loads[new] - loads[old])
                self.held[rank] += sign * (held[new] - held[old])
        self._cross(stage, chain.crossings[new] - chain.crossings[old])


def descend(split: MutableSplit, most_looks: float = math.inf) -> int:
    """Move runs of cuts by one block while that helps; return the number of evaluated loads."""
    num_stages, ends = split.problem.chain.num_stages, split.ends
    best, looks, is_better = split.value(), 0, True
    while is_better and looks < most_looks:
        is_better = False
        for first in range(1, num_stages):
            for by in (1, -1):
                moved = kept = 0
                for cut in range(first, num_stages):
                    # A block leaves the stage on one side of the run, another enters at its end.
                    if by < 0 and cut == first and ends[cut] - ends[cut - 1] < 2:
                        break
                    if ends[cut] + by == ends[-1]:
                        break
                    split.move(cut, by)
                    moved += 1
                    if ends[cut + 1] == ends[cut]:
                        continue
                    looks += len(split.loads)
                    better = split.better(best)
                    if better is not None:
                        best, kept, is_better = better, moved, True
                for cut in range(first + kept, first + moved):
                    split.move(cut, -by)
    return looks


def is_less(value: Value, other: Value) -> bool:
    """True if a value is lower than another by more than rounding."""
    for one, two in zip(value, other, strict=True):
        if one < two * LESS:
            return True
        if one > two / LESS:
            return False
    return False


def perturb(best: MutableSplit, most_looks: int) -> MutableSplit:
    """The best of several descents from random splits near the best so far; deterministic."""
    problem, draw = best.problem, random.Random(0)
    num_stages = problem.chain.num_stages
    if num_stages == 1:
        return best
    looks, value = 0, best.value()
    while looks < most_looks:
        ends = list(best.ends)
        for _ in range(draw.randint(1, 4)):
            cut = draw.randrange(1, num_stages)
            ends[cut] = draw.randint(ends[cut - 1] + 1, ends[cut + 1] - 1)
        other = MutableSplit(problem, ends)
        looks += num_stages * len(other.loads) + descend(other)
        found = other.value()
        if not is_less(value, found):  # an equally good split leads to other neighbours
            best, value = other, found
    return best


class OutOfBudget(Exception):
    """The budget of the search is used up."""


class BranchAndBound:
    """Search all splits that may be better than the known one.

    Attributes:
        found: the best split found that is better; None if there is none.
    """

    def __init__(self, known: MutableSplit) -> None:
        fullest, goal, _ = known.value()
        self.problem = known.problem
        self.found: list[int] | None = None
        self._goal = goal * LESS if fullest <= 1 else math.inf
        self._ends = [0]
        self._loads = [0.0] * len(known.loads)
        self._held = [0.0] * len(known.loads)
        self._looks = 0
        holders = self.problem.holders
        self._later = [set().union(*holders[stage + 1 :]) for stage in range(len(holders))]

    def run(self) -> bool:
        """Search; return True if the budget sufficed."""
        try:
            self._cut(0, 0, 0.0)
        except OutOfBudget:
            return False
        return True

    def _cut(self, stage: int, start: int, crossed: float) -> None:
        """Try all ends of a stage that starts at block ``start``."""
        problem, chain = self.problem, self.problem.chain
        ranks, before = problem.holders[stage], (self._loads, self._held)
        loads, held = chain.loads[stage], chain.held[stage]
        last = stage + 1 == chain.num_stages
        for end in chain.ends(stage):
            if end <= start:
                continue
            self._looks += len(self._loads)
            if self._looks > PROVING:
                raise OutOfBudget
            self._loads, self._held = list(before[0]), list(before[1])
            for rank in ranks:
                self._loads[rank] += loads[end] - loads[start]
                self._held[rank] += held[end] - held[start]
            most = self._most(crossed)
            if any(self._loads[r] >= most or self._held[r] > chain.limits[r] for r in ranks):
                break  # both only grow with more blocks
            now = crossed
            for rank in () if last else problem.communicating[stage + 1]:
                self._loads[rank] += chain.crossings[end]
                now += chain.crossings[end]
            if self._is_hopeless(stage, end, now):
                continue
            self._ends.append(end)
            if last:
                self.found = list(self._ends)
                weighed = problem.communication_weight * now
                self._goal = LESS * (problem.bottleneck_weight * max(self._loads) + weighed)
            else:
                self._cut(stage + 1, end, now)
            self._ends.pop()

    def _most(self, crossed: float) -> float:
        """The load that every rank must stay below."""
        rest = self._goal - self.problem.communication_weight * crossed
        return (
            rest / self.problem.bottleneck_weight
            if self.problem.bottleneck_weight
            else (math.inf if rest > 0 else 0)
        )

    def _is_hopeless(self, stage: int, end: int, crossed: float) -> bool:
        """True if a rank is already too busy, or the remaining blocks do not fit."""
        most = self._most(crossed)
        if max(self._loads) >= most:
            return True
        loads = self.problem.chain.loads[stage]
        room = sum(most - self._loads[rank] for rank in self._later[stage])
        return (loads[-1] - loads[end]) * len(self.problem.holders[0]) > room
