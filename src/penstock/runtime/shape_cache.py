"""Ids of input shapes, the same on all ranks.

The rank of the first stage sees the inputs and assigns the ids; it broadcasts them at the start of
each step. Stage runners cache boundary metadata by id. Plain values among the inputs count as part
of their shapes; objects of other types get a new id each step. Metadata also depends on *run
conditions*: autocast, the modules' training mode, which parameters require grad, and the shapes of
keyword arguments on other ranks. Equal shapes under other conditions have another id.

After ``MAX_SHAPES`` ids all are forgotten, on all ranks at the same step; no id is reused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from penstock.stage.pytree import flatten, is_plain
from penstock.stage.stage import Stage

__all__ = ["MAX_SHAPES", "ShapeCache", "run_conditions"]

MAX_SHAPES = 4096


def run_conditions(stages: Iterable[Stage], device: torch.device) -> tuple[Any, ...]:
    """This rank's conditions, besides input shapes, that boundary metadata depends on."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    modules = [stage.submod for stage in stages]
    trained = (param.requires_grad for module in modules for param in module.parameters())
    return (cast, *(module.training for module in modules), *trained)


class ShapeCache:
    """The ids of all shapes seen so far.

    Attributes:
        was_cleared: whether ``learn`` has just forgotten all earlier ids.
    """

    def __init__(self) -> None:
        self._conditions: dict[tuple[Any, ...], int] = {}
        self._last_condition: tuple[Any, ...] = ()
        # By all ranks' conditions, and by the shapes themselves.
        self._ids: dict[tuple[tuple[int, ...], tuple[Any, ...]], int] = {}
        self._known: set[int] = set()
        self._next, self._next_condition = count(), count()
        self._num_calls = 0
        self.was_cleared = False

    def condition_id(
        self, condition: tuple[Any, ...], kwargs: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """The id of this rank's run conditions, with the shapes of ``kwargs`` per microbatch."""
        if any(kwargs):
            condition = (*condition, *(self._key((), named) for named in kwargs))
        if condition not in self._conditions:
            self._conditions[condition] = next(self._next_condition)
        self._last_condition = condition
        return self._conditions[condition]

    def ids(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        conditions: tuple[int, ...] = (),
    ) -> list[int]:
        """Per microbatch the id of its inputs' shapes, under all ranks' conditions."""
        ids = self._ids
        self._num_calls += 1
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = self._key(positional, named)
            # Most microbatches repeat the previous shapes, and comparing is faster than hashing.
            if key != last:
                if (conditions, key) not in ids:
                    ids[conditions, key] = next(self._next)
                last, number = key, ids[conditions, key]
            found.append(number)
        return found

    def learn(self, ids: Sequence[int]) -> bool:
        """Record ids; returns True if at least one is new."""
        distinct = set(ids)
        self.was_cleared = False
        if distinct <= self._known:
            return False
        if len(self._known) >= MAX_SHAPES:
            self.was_cleared = True
            self._known.clear()
            self._ids = {key: i for key, i in self._ids.items() if i in distinct}
            last = self._last_condition
            if last in self._conditions:
                self._conditions = {last: self._conditions[last]}
        self._known |= distinct
        return True

    def digest(self, ids: Sequence[int]) -> int:
        """A checksum of the shapes of ``ids``, comparable between ranks with different ids."""
        keys = {number: key for (_, key), number in self._ids.items()}
        shapes = [[part for part in keys[i] if isinstance(part, torch.Size)] for i in ids]
        return zlib.crc32(repr(shapes).encode())

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            return (args[0].shape, args[0].dtype)
        leaves, tree = flatten((args, dict(kwargs)))
        parts: list[Any] = [tree]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                parts += (leaf.shape, leaf.dtype)
            else:
                # An object of another type may be mutated and still be the same object.
                parts += (type(leaf), leaf if is_plain(leaf) else self._num_calls)
        return tuple(parts)
