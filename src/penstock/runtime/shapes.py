"""Which shapes have been met: every distinct shape of inputs gets a number.

The rank of the first stage sees the inputs and hands out the numbers; the others learn them at
the start of each step. What a number means at a boundary, the players on both sides remember.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.stage.trees import flatten

__all__ = ["ShapeBook"]


class ShapeBook:
    """The numbers given out so far."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._met: set[int] = set()

    def ids(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """For each microbatch, the number of its inputs' shapes."""
        numbers = self._numbers
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = _key(positional, named)
            # Most microbatches are like the one before: comparing is quicker than hashing.
            if key != last:
                last, number = key, numbers.setdefault(key, len(numbers))
            found.append(number)
        return found

    def learn(self, ids: Sequence[int]) -> bool:
        """Note that these numbers are now met; returns whether one of them is new."""
        distinct = set(ids)
        if distinct <= self._met:
            return False
        self._met |= distinct
        return True

    def digest(self, ids: Sequence[int]) -> int:
        """A number that tells the shapes behind ``ids`` apart, on whichever rank they were met."""
        keys = {number: key for key, number in self._numbers.items()}
        shapes = [[part for part in keys[i] if isinstance(part, tuple)] for i in ids]
        return zlib.crc32(repr(shapes).encode())


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return ((args[0].shape, args[0].dtype),)
    leaves, tree = flatten((args, dict(kwargs)))
    marks = [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]
    return (tree, *marks)
