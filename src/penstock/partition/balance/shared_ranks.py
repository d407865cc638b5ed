"""A split for ranks that hold several stages each: a rank is as busy as its stages together.

    V-shape    rank 0   stages 0 and 3         blocks   2  2  2  2  2  2  6
               rank 1   stages 1 and 2         stages   0     1  2      3
                                               rank 0   2 + 6    rank 1   4 + 6

With one stage per rank the best split is found in steps (``chain.py``). Here it is not: what is
best for the stages so far depends on what their ranks get later, and for ranks of any number of
stages the question is NP-hard (it holds PARTITION). So a good split is looked for first, and then
every split that might be better, as far as a budget reaches; whether it reached is told.

    descend     move a cut, or several neighbouring ones, by a block while that helps
    shake       ... from splits near to the best so far, again and again, always the same ones
    prove       depth first over all cuts, left as soon as no better split can come of them
    level       make the stages even, as far as the ranks stay as quick

It knows loads, crossings and bytes as plain numbers, and not what they stand for.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import mul
from typing import TypeAlias

from penstock.partition.balance.chain import Chain
from penstock.schedule.placement import Placement

__all__ = ["SharedChain", "MutableSplit", "best_split"]

# Loads looked at: some tenths of a second each.
SHAKING = 400_000
PROVING = 1_500_000
# Sums of the same numbers in another order differ in their last bits.
LESS = 1 - 1e-12

Value: TypeAlias = tuple[float, float, float]
"""What a split is judged by: how much too full the fullest rank is, the goal, unevenness of ranks,
or of stages where the goal is good enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChain:
    """A chain of blocks to be cut into stages that share ranks.

    The goal is ``pace`` × the busiest rank's load + ``toll`` × what all ranks pay for crossings.

    Args:
        chain: the blocks; its ``limits`` are the ranks'.
        holders: per stage the ranks that hold it, one for each copy of the model.
        payers: per stage the ranks that pay for the cut before it: both sides in each copy, and
            none where both sides are one rank.
        pace: the weight of the busiest rank.
        toll: the weight of crossings.
        good_enough: the goal below which stages count that are even; 0 to reach the least.
    """

    chain: Chain
    holders: tuple[tuple[int, ...], ...]
    payers: tuple[tuple[int, ...], ...]
    pace: float
    toll: float
    good_enough: float = 0.0

    @classmethod
    def of(
        cls, chain: Chain, placement: Placement, *, pace: float = 1.0, toll: float = 0
    ) -> SharedChain:
        """The problem of stages that lie so.

        Args:
            chain: the blocks; its ``limits`` are the ranks'.
            placement: where the stages lie.
            pace: the weight of what the busiest rank does for a microbatch.
            toll: the weight of a microbatch's crossings.
        """
        copies, num = placement.copies, placement.num_model_stages
        ranks = placement.stage_ranks
        places = [[stage + copy * num for copy in range(copies)] for stage in range(num)]
        payers: list[tuple[int, ...]] = [()]
        for stages in places[1:]:
            sides = [(ranks[stage - 1], ranks[stage]) for stage in stages]
            payers.append(tuple(rank for a, b in sides if a != b for rank in (a, b)))
        # A microbatch passes one of the copies, and each crossing is paid for on both sides.
        return cls(
            chain=chain,
            holders=tuple(tuple(ranks[stage] for stage in stages) for stages in places),
            payers=tuple(payers),
            pace=pace / copies,
            toll=toll / copies / 2,
        )

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.chain.limits)


def best_split(problem: SharedChain, ends: list[int], slack: float) -> tuple[list[int], bool]:
    """The best split that is found.

    Args:
        problem: the problem.
        ends: a split to begin with: where the stages end, with a 0 in front.
        slack: by what share of the goal a split may be worse whose stages are more even.

    Returns:
        Where the stages end, and whether it is proven that no split reaches a lower goal, or, if
        ranks are too full, none keeps to the limits.
    """
    best = MutableSplit(problem, ends)
    descend(best)
    best = shaken(best, SHAKING // 10)
    better, is_proven = proven(best)
    if better is not None:
        best = MutableSplit(problem, better)
        descend(best)
    if not is_proven:
        best = shaken(best, SHAKING)
    return leveled(best, slack).ends, is_proven


def leveled(best: MutableSplit, slack: float) -> MutableSplit:
    """The split with the evenest stages that is found among those as good as the best."""
    goal = best.value()[1] * (1 + slack) / LESS
    even = MutableSplit(replace(best.problem, good_enough=goal), best.ends)
    looks = descend(even, SHAKING)
    return shaken(even, SHAKING // 10 - looks)


class MutableSplit:
    """A split that changes, and what its ranks have to bear.

    Args:
        problem: the problem.
        ends: where the stages end, with a 0 in front.
    """

    def __init__(self, problem: SharedChain, ends: list[int]) -> None:
        self.problem = problem
        self.ends = list(ends)
        self.loads = [0.0] * problem.num_ranks
        self.held = [0.0] * problem.num_ranks
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
            self._pay(stage, chain.crossings[i])

    def _pay(self, stage: int, price: float) -> None:
        for rank in self.problem.payers[stage]:
            self.loads[rank] += price
            self.crossed += price

    def value(self) -> Value:
        """What it is judged by; less is better."""
        problem = self.problem
        fullest = 0.0
        if self._is_limited:
            limits = problem.chain.limits
            fullest = max(held / most for held, most in zip(self.held, limits, strict=True))
        goal = self._goal()
        if not problem.good_enough:
            return max(fullest, 1.0), goal, sum(map(mul, self.loads, self.loads))
        return max(fullest, 1.0), max(goal, problem.good_enough), self.squares

    def better(self, than: Value) -> Value | None:
        """Its value, if that is lower than another one by more than rounding."""
        # Most moves make it worse, which the goal alone tells where memory is no matter.
        if not self._is_limited and self._goal() > than[1] / LESS:
            return None
        value = self.value()
        return value if is_less(value, than) else None

    def _goal(self) -> float:
        return self.problem.pace * max(self.loads) + self.problem.toll * self.crossed

    def move(self, stage: int, by: int) -> None:
        """Move the cut before a stage by one block: on (1) or back (-1)."""
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
        self._pay(stage, chain.crossings[new] - chain.crossings[old])


def descend(split: MutableSplit, most_looks: float = math.inf) -> int:
    """Move runs of cuts by one block while that helps; returns how many loads were looked at."""
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
                    looks += split.problem.num_ranks
                    better = split.better(best)
                    if better is not None:
                        best, kept, is_better = better, moved, True
                for cut in range(first + kept, first + moved):
                    split.move(cut, -by)
    return looks


def is_less(value: Value, other: Value) -> bool:
    """Whether a value is lower than another by more than rounding."""
    for one, two in zip(value, other, strict=True):
        if one < two * LESS:
            return True
        if one > two / LESS:
            return False
    return False


def shaken(best: MutableSplit, most_looks: int) -> MutableSplit:
    """The best of several descents, each from near to the best so far."""
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
        looks += num_stages * problem.num_ranks + descend(other)
        found = other.value()
        if not is_less(value, found):  # an equal one leads to other places
            best, value = other, found
    return best


def proven(known: MutableSplit) -> tuple[list[int] | None, bool]:
    """A split of a lower goal than a known one, if there is one, and whether all were looked at."""
    search = Proof(known)
    try:
        search.go(0, 0, 0.0)
    except OutOfBudget:
        return search.found, False
    return search.found, True


class OutOfBudget(Exception):
    """More splits to look at than there is time for."""


class Proof:
    """Looks through all splits that may be better than a known one.

    Args:
        known: the split to beat.
    """

    def __init__(self, known: MutableSplit) -> None:
        fullest, goal, _ = known.value()
        self.problem = known.problem
        self.goal = goal * LESS if fullest <= 1 else float("inf")
        self.found: list[int] | None = None
        self._ends = [0]
        self._loads = [0.0] * self.problem.num_ranks
        self._held = [0.0] * self.problem.num_ranks
        self._looks = 0
        holders = self.problem.holders
        self._later = [
            sorted({rank for each in holders[stage + 1 :] for rank in each})
            for stage in range(len(holders))
        ]

    def go(self, stage: int, start: int, crossed: float) -> None:
        """Try all ends of a stage that begins at block ``start``."""
        problem, chain = self.problem, self.problem.chain
        ranks = problem.holders[stage]
        before = list(self._loads), list(self._held)
        loads, held = chain.loads[stage], chain.held[stage]
        last = stage + 1 == chain.num_stages
        for end in chain.ends(stage):
            if end <= start:
                continue
            self._looks += problem.num_ranks
            if self._looks > PROVING:
                raise OutOfBudget
            self._loads, self._held = list(before[0]), list(before[1])
            for rank in ranks:
                self._loads[rank] += loads[end] - loads[start]
                self._held[rank] += held[end] - held[start]
            most = self._most(crossed)
            if any(
                self._loads[rank] >= most or self._held[rank] > chain.limits[rank] for rank in ranks
            ):
                break  # either only grows with more blocks
            paid = crossed
            for rank in () if last else problem.payers[stage + 1]:
                self._loads[rank] += chain.crossings[end]
                paid += chain.crossings[end]
            if self._is_hopeless(stage, end, paid):
                continue
            self._ends.append(end)
            if last:
                self.found = list(self._ends)
                self.goal = LESS * (problem.pace * max(self._loads) + problem.toll * paid)
            else:
                self.go(stage + 1, end, paid)
            self._ends.pop()

    def _most(self, crossed: float) -> float:
        """The load below which every rank has to stay."""
        left = self.goal - self.problem.toll * crossed
        return left / self.problem.pace if self.problem.pace else (float("inf") if left > 0 else 0)

    def _is_hopeless(self, stage: int, end: int, crossed: float) -> bool:
        """Whether a rank is too busy already, or what is left can't find room."""
        most = self._most(crossed)
        if max(self._loads) >= most:
            return True
        chain = self.problem.chain
        left = chain.loads[stage][-1] - chain.loads[stage][end]
        room = sum(most - self._loads[rank] for rank in self._later[stage])
        return left * len(self.problem.holders[0]) > room
