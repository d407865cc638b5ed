"""Splits for ranks that hold several stages: a rank's load is the sum over its stages.

V-shape    rank 0   stages 0 and 3         blocks   2  2  2  2  2  2  6
           rank 1   stages 1 and 2         stages   0     1  2      3
                                           rank 0   2 + 6    rank 1   4 + 6

The dynamic program of ``chain.py`` does not apply: the best start depends on later stages of the
same ranks, and the problem is NP-hard (it contains PARTITION). So a local search finds a good
split, and an enumeration, stage by stage and within a budget, of all splits that might be better
improves it or proves it optimal.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.partition.balance.chain import Array, Chain
from penstock.schedule.placement import Placement

__all__ = ["SharedChain", "best_split"]

# Budgets, in evaluated loads of ranks: some tenths of a second each.
PERTURBING = 400_000
PROVING = 4_000_000
LEAST_LOOKS = 200  # what one call of numpy costs
# Sums of the same numbers in another order differ in their last bits.
DIGITS = 12
LESS = 1 - 10**-DIGITS

Ends: TypeAlias = npt.NDArray[np.intp]
"""The ends of the stages of a split, from 0 on."""
Value: TypeAlias = list[float]
"""The value of a split, compared in order: the excess of the fullest rank, the busiest rank's load,
and the unevenness of ranks, and of stages."""


class SharedChain:
    """A chain of blocks to cut into stages that share ranks; its ``limits`` are the ranks'.

    Times are parts of the time of all blocks.
    """

    def __init__(self, chain: Chain, placement: Placement) -> None:
        ranks, num = placement.stage_ranks, placement.num_model_stages
        directions = range(len(ranks) // num)
        # Per stage its ranks, one for each direction of the placement, and the ranks of the
        # transfer before it: both sides in each direction, none if they are the same rank.
        holders = [[ranks[stage + d * num] for d in directions] for stage in range(num)]
        communicating: list[list[int]] = [[]]
        for before, after in pairwise(holders):
            sides = zip(before, after, strict=True)
            communicating.append([rank for a, b in sides if a != b for rank in (a, b)])
        self.num_ranks, self.num_stages = placement.num_ranks, num
        self._holds, self._sends = self._counts(holders), self._counts(communicating)
        unit = chain.times[-1] or 1.0
        # A microbatch passes one direction.
        self._times, self._crossings = (
            each / unit / len(directions) for each in (chain.times, chain.crossings)
        )
        self._held, self._limits = chain.held, chain.limits

    def _counts(self, ranks: list[list[int]]) -> Array:
        """How often each stage (row) has each rank (column)."""
        return np.array([np.bincount(each, minlength=self.num_ranks) for each in ranks], float)

    def values(self, splits: Ends) -> list[Value]:
        """The values of splits [split, end]; lower is better."""
        starts, ends, stages = splits[:, :-1], splits[:, 1:], np.arange(self.num_stages)
        spans = self._times[ends] - self._times[starts]
        loads = spans @ self._holds + self._crossings[starts] @ self._sends
        held = (self._held[stages, ends] - self._held[stages, starts]) @ self._holds
        fullest = (held / self._limits).max(axis=1).clip(min=1.0)
        uneven = [(each**2).sum(axis=1) for each in (loads, spans)]
        values = np.stack([fullest, loads.max(axis=1), *uneven], axis=1)
        found: list[Value] = values.round(DIGITS).tolist()
        return found

    def value(self, split: Ends) -> Value:
        """The value of one split."""
        return self.values(split[None, :])[0]

    def better_splits(self, known: Ends) -> Ends | None:
        """All splits [split, end] that fit the limits and have less load on the busiest rank than
        ``known``, or as much as any if it does not fit; None if they are too many to enumerate."""
        fullest, most, *_ = self.value(known)
        most = most * LESS if fullest <= 1 else math.inf
        num_blocks, last = len(self._times) - 1, self.num_stages - 1
        splits = np.zeros((1, 1), np.intp)
        loads = held = np.zeros((1, self.num_ranks))
        for stage in range(self.num_stages):
            ends = np.arange(num_blocks - last + stage + 1 if stage < last else num_blocks + 1)
            is_open = ends > splits[:, -1:]
            if stage == last:
                is_open &= ends == num_blocks
            if is_open.sum() * self.num_ranks > PROVING:
                return None
            rows, stops = np.nonzero(is_open)
            starts, holds = splits[rows, -1], self._holds[stage]
            times = self._times[stops] - self._times[starts]
            loads = loads[rows] + times[:, None] * holds
            loads += self._crossings[starts, None] * self._sends[stage]
            bytes_ = self._held[stage, stops] - self._held[stage, starts]
            held = held[rows] + bytes_[:, None] * holds
            # The remaining blocks must fit into the room of the ranks of later stages.
            later = self._holds[stage + 1 :].any(axis=0)
            room = (most - loads)[:, later].sum(axis=1)
            rest = (self._times[-1] - self._times[stops]) * holds.sum()
            fits = (loads < most).all(axis=1) & (held <= self._limits).all(axis=1) & (rest <= room)
            splits = np.column_stack([splits[rows], stops])[fits]
            loads, held = loads[fits], held[fits]
        return splits


def best_split(problem: SharedChain, begin: list[int]) -> tuple[list[int], bool]:
    """The best split found, from the ends of an initial split on, starting with 0.

    Returns:
        The ends of its stages, and True if it is proven that no split has a less busy rank or, if
        ranks are too full, that no split fits the limits.
    """
    best, _ = descend(problem, np.array(begin))
    best = perturb(problem, best, PERTURBING // 10)
    better = problem.better_splits(best)
    if better is None:
        best = perturb(problem, best, PERTURBING)
    elif len(better):
        values = problem.values(better)
        best = better[min(range(len(better)), key=values.__getitem__)]
    return best.tolist(), better is not None


def descend(problem: SharedChain, split: Ends) -> tuple[Ends, int]:
    """Move runs of cuts by one block while that helps; also the number of evaluated loads."""
    best, looks, is_better = problem.value(split), 0, True
    while is_better:
        is_better = False
        for first in range(1, problem.num_stages):
            moved = _neighbours(split, first)
            looks += max(len(moved) * problem.num_ranks, LEAST_LOOKS)
            values = problem.values(moved)
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


def perturb(problem: SharedChain, split: Ends, most_looks: int) -> Ends:
    """The best of several descents from random splits near the best so far; deterministic."""
    draw, num_stages, looks = random.Random(0), problem.num_stages, 0
    best = problem.value(split)
    while looks < most_looks and num_stages > 1:
        other = split.copy()
        for _ in range(draw.randint(1, 4)):
            cut = draw.randrange(1, num_stages)
            other[cut] = draw.randint(other[cut - 1] + 1, other[cut + 1] - 1)
        other, looked = descend(problem, other)
        looks += looked + num_stages * problem.num_ranks
        found = problem.value(other)
        if found <= best:  # an equally good split leads to other neighbours
            best, split = found, other
    return split
