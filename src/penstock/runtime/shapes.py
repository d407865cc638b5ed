"""Which shapes have been met: every distinct shape of inputs gets a number.

The rank of the first stage sees the inputs and hands out the numbers; the others learn them at
the start of each step. What a number means at a boundary, the players on both sides remember.

What crosses follows from more than the inputs' shapes. What the first rank sees of it, gets numbers
of its own: autocast, whether its modules train, and which of its parameters take gradients. What
nobody sees ahead, makes what crosses *restless* (see ``Act``): values that are no tensors.

Where every step has shapes of its own, all are forgotten after so many, on all ranks alike: each
has learned the same numbers. None is given out twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from penstock.stage.stage import Stage
from penstock.stage.trees import flatten

__all__ = ["MANY", "ShapeBook", "conditions"]

# How many numbers are remembered at the least before all are forgotten.
MANY = 4096


def conditions(stages: Iterable[Stage], device: torch.device) -> tuple[Any, ...]:
    """What crosses may follow from beside the inputs, as far as this rank sees it."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    modules = [stage.submod for stage in stages]
    trained = (param.requires_grad for module in modules for param in module.parameters())
    return (cast, *(module.training for module in modules), *trained)


class ShapeBook:
    """The numbers given out so far.

    Attributes:
        met_values: whether inputs have been met that are no tensors.
        forgot: whether what was last learned came after all else was forgotten.
    """

    def __init__(self) -> None:
        # Conditions may be long: each is kept once, under a number of its own.
        self._conditions: dict[tuple[Any, ...], int] = {}
        # By the number of the conditions that they were met under, and by the shapes themselves.
        self._numbers: dict[tuple[int, tuple[Any, ...]], int] = {}
        self._met: set[int] = set()
        self._next, self._next_condition = count(), count()
        self.met_values = self.forgot = False

    def ids(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        under: tuple[Any, ...] = (),
    ) -> list[int]:
        """For each microbatch, the number of its inputs' shapes under the same conditions."""
        numbers = self._numbers
        if under not in self._conditions:
            self._conditions[under] = next(self._next_condition)
        condition = self._conditions[under]
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = _key(positional, named)
            # Most microbatches are like the one before: comparing is quicker than hashing.
            if key != last:
                if (condition, key) not in numbers:
                    numbers[condition, key] = next(self._next)
                last, number = key, numbers[condition, key]
                self.met_values |= any(isinstance(mark, type) for mark in key)
            found.append(number)
        return found

    def learn(self, ids: Sequence[int]) -> bool:
        """Note that these numbers are now met; returns whether one of them is new."""
        distinct = set(ids)
        self.forgot = False
        if distinct <= self._met:
            return False
        if len(self._met) >= MANY:
            self.forgot = True
            self._met.clear()
            self._numbers = {key: i for key, i in self._numbers.items() if i in distinct}
            kept = {condition for condition, _ in self._numbers}
            self._conditions = {c: n for c, n in self._conditions.items() if n in kept}
        self._met |= distinct
        return True

    def digest(self, ids: Sequence[int]) -> int:
        """A number that tells the shapes behind ``ids`` apart, on whichever rank they were met."""
        keys = {number: key for (_, key), number in self._numbers.items()}
        shapes = [[part for part in keys[i] if isinstance(part, tuple)] for i in ids]
        return zlib.crc32(repr(shapes).encode())


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return ((args[0].shape, args[0].dtype),)
    leaves, tree = flatten((args, dict(kwargs)))
    marks = [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]
    return (tree, *marks)
