"""Choices by a seed, some of which can be switched off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

__all__ = ["FEATURES", "Draws"]

T = TypeVar("T")

# What a case may have, by the name that switches it off.
FEATURES = (
    "accumulating",
    "any-order",
    "auto",
    "autocast",
    "average",
    "beside",
    "by-module",
    "captured",
    "clipping",
    "compiled",
    "crossings",
    "dynamic-shapes",
    "eval",
    "failing",
    "forms",
    "freezing",
    "groups",
    "hooks",
    "in-backward",
    "keeping",
    "metrics",
    "offload",
    "optimizers",
    "pieces",
    "random",
    "rates",
    "recompute",
    "reloading",
    "resuming",
    "scaler",
    "sums",
    "tied",
    "two-ways",
    "uneven",
)


class Draws:
    """Choices by a seed.

    What is switched off is drawn all the same, and then not taken: the rest of the case stays as
    it is, so that a fault can be narrowed down.

    Args:
        seed: of the choices.
        without: the features that are switched off.
    """

    def __init__(self, seed: object, without: frozenset[str] = frozenset()) -> None:
        self._seed, self._without = seed, without
        self._random = random.Random(str(seed))

    def part(self, name: str) -> Draws:
        """Choices of their own, which do not depend on how many others are drawn."""
        return Draws(f"{self._seed}/{name}", self._without)

    def takes(self, feature: str, chance: float) -> bool:
        """Whether the case is to have a feature."""
        assert feature in FEATURES, feature
        return self._random.random() < chance and feature not in self._without

    def has(self, feature: str) -> bool:
        """Whether a feature may be taken at all."""
        assert feature in FEATURES, feature
        return feature not in self._without

    def chance(self, chance: float) -> bool:
        """True so often."""
        return self._random.random() < chance

    def number(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return self._random.randint(least, most)

    def one_of(self, choices: Sequence[T]) -> T:
        """One of them."""
        return self._random.choice(choices)

    def some_of(self, choices: Sequence[T], chance: float) -> tuple[T, ...]:
        """Each of them so often."""
        return tuple(choice for choice in choices if self._random.random() < chance)

    def parts_of(self, total: int, num: int) -> tuple[int, ...]:
        """``total`` as a sum of ``num`` numbers of at least one each."""
        ends = [0, *sorted(self._random.sample(range(1, total), num - 1)), total]
        return tuple(end - begin for begin, end in pairwise(ends))
