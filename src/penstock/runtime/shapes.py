"""Which shapes have been met: every distinct shape of inputs gets a number.

The rank of the first stage sees the inputs and hands out the numbers; the others learn them at
the start of each step. What a number means at a boundary, the players on both sides remember.

Shapes follow from more than the inputs' shapes. What the first rank sees of it, gets numbers of its
own: autocast, and whether modules train. What nobody sees ahead, makes what crosses *restless*
(see ``Act``): values that are no tensors, and what other ranks than the first are given.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.stage.stage import Stage
from penstock.stage.trees import flatten

__all__ = ["ShapeBook", "conditions"]


def conditions(stages: Iterable[Stage], device: torch.device) -> tuple[Any, ...]:
    """What shapes and dtypes may follow from beside the inputs, as far as this rank sees it."""
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (cast, *(stage.submod.training for stage in stages))


class ShapeBook:
    """The numbers given out so far.

    Attributes:
        met_values: whether inputs have been met that are no tensors.
    """

    def __init__(self) -> None:
        # By the conditions that they were met under, and by the shapes themselves.
        self._numbers: dict[tuple[tuple[Any, ...], tuple[Any, ...]], int] = {}
        self._met: set[int] = set()
        self.met_values = False

    def ids(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        under: tuple[Any, ...] = (),
    ) -> list[int]:
        """For each microbatch, the number of its inputs' shapes under the same conditions."""
        numbers = self._numbers
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = _key(positional, named)
            # Most microbatches are like the one before: comparing is quicker than hashing.
            if key != last:
                last, number = key, numbers.setdefault((under, key), len(numbers))
                self.met_values |= any(isinstance(mark, type) for mark in key)
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
        keys = {number: key for (_, key), number in self._numbers.items()}
        shapes = [[part for part in keys[i] if isinstance(part, tuple)] for i in ids]
        return zlib.crc32(repr(shapes).encode())


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return ((args[0].shape, args[0].dtype),)
    leaves, tree = flatten((args, dict(kwargs)))
    marks = [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]
    return (tree, *marks)
