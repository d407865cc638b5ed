"""Which shapes have been met: every distinct shape of inputs gets a number.

The rank of the first stage sees the inputs and hands out the numbers; the others learn them at
the start of each step. What a number means at a boundary, the players on both sides remember.

What crosses follows from more than the inputs' shapes. What a rank sees of it, gets a number too,
which all ranks are told as a step begins: autocast, whether its modules train, which of its
parameters take gradients, and the shapes of what it is given beside the inputs. The same shapes
under other such conditions are another number. What nobody sees ahead, makes what crosses
*restless* (see ``Act``): values that are no tensors.

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

from penstock.stage.pytree import flatten
from penstock.stage.stage import Stage

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
        # Of what this rank sees, and what it saw last.
        self._conditions: dict[tuple[Any, ...], int] = {}
        self._seen: tuple[Any, ...] = ()
        # By every rank's conditions that they were met under, and by the shapes themselves.
        self._numbers: dict[tuple[tuple[int, ...], tuple[Any, ...]], int] = {}
        self._met: set[int] = set()
        self._next, self._next_condition = count(), count()
        self.met_values = self.forgot = False

    def condition(self, seen: tuple[Any, ...], beside: Sequence[Mapping[str, Any]] = ()) -> int:
        """The number of what this rank sees, and is given ``beside`` the inputs per microbatch."""
        if any(beside):
            seen = (*seen, *(_key((), named) for named in beside))
        if seen not in self._conditions:
            self._conditions[seen] = next(self._next_condition)
        self._seen = seen
        return self._conditions[seen]

    def ids(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        under: tuple[int, ...] = (),
    ) -> list[int]:
        """For each microbatch, the number of its inputs' shapes under the ranks' conditions."""
        numbers = self._numbers
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = _key(positional, named)
            # Most microbatches are like the one before: comparing is quicker than hashing.
            if key != last:
                if (under, key) not in numbers:
                    numbers[under, key] = next(self._next)
                last, number = key, numbers[under, key]
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
            if self._seen in self._conditions:
                self._conditions = {self._seen: self._conditions[self._seen]}
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
