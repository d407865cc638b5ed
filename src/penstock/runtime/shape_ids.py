"""Ids of input shapes, by which stage runners cache boundary metadata.

The rank of the first stage assigns an id to each microbatch and broadcasts the ids at the start of
each step. Plain values among the inputs count as part of their shapes; objects of other types get
a new id each step. Metadata also depends on *run conditions*: autocast, the modules' training mode,
which parameters require grad, and the shapes of keyword arguments on other ranks. Equal shapes
under other conditions have another id.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from penstock.stage.pytree import flatten, is_plain, tensors_of
from penstock.stage.stage import Stage

__all__ = ["ShapeIds", "run_conditions", "shapes_digest"]


def run_conditions(stages: Iterable[Stage], device: torch.device) -> tuple[Any, ...]:
    """This rank's conditions, besides input shapes, that boundary metadata depends on."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    modules = [stage.submod for stage in stages]
    trained = (param.requires_grad for module in modules for param in module.parameters())
    return (cast, *(module.training for module in modules), *trained)


def shapes_digest(args: Sequence[Any], kwargs: Sequence[Any]) -> int:
    """A checksum of the microbatches' shapes, equal on ranks with different ids."""
    pairs = zip(args, kwargs, strict=True)
    return zlib.crc32(repr([[t.shape for t in tensors_of(pair)] for pair in pairs]).encode())


class ShapeIds:
    """The ids that one rank has assigned; none is used twice.

    Example:
        >>> short, long = (torch.ones(3),), (torch.ones(5),)
        >>> ShapeIds().of([short, long, short], [{}] * 3, (), 0)
        [0, 1, 0]
    """

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        self._next = count()

    def clear(self) -> None:
        """Forget all ids."""
        self._ids.clear()

    def condition(
        self, conditions: tuple[Any, ...], kwargs: Sequence[Mapping[str, Any]], step: int
    ) -> int:
        """The id of run conditions, with the shapes of ``kwargs`` per microbatch."""
        keys = (_key((), named, step) for named in kwargs) if any(kwargs) else ()
        return self._id((conditions, *keys))

    def of(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        conditions: tuple[int, ...],
        step: int,
    ) -> list[int]:
        """Per microbatch the id of its inputs' shapes, under all ranks' conditions."""
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = _key(positional, named, step)
            # Most microbatches repeat the previous shapes, and comparing is faster than hashing.
            found.append(found[-1] if key == last else self._id((conditions, key)))
            last = key
        return found

    def _id(self, key: Hashable) -> int:
        if key not in self._ids:
            self._ids[key] = next(self._next)
        return self._ids[key]


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int) -> tuple[Any, ...]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return (args[0].shape, args[0].dtype)
    leaves, tree = flatten((args, dict(kwargs)))
    parts: list[Any] = [tree]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts += (leaf.shape, leaf.dtype)
        else:
            # An object of another type may be mutated and still be the same object.
            parts += (type(leaf), leaf if is_plain(leaf) else step)
    return tuple(parts)
