"""Ids of input shapes, by which stage runners cache boundary metadata.

The first stage's rank computes an id per microbatch, a digest of the inputs' shapes and plain
values but floats (objects of other types get a new id each step) and of all ranks' *run
conditions*: autocast, the modules' classes (which sharding changes) and training mode, which
parameters require grad, in which dtype, and keyword arguments on other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.stage.pytree import flatten, is_plain
from penstock.stage.stage import Stage

__all__ = ["condition_id", "inputs_id", "shape_ids"]


def condition_id(
    stages: Iterable[Stage], device: torch.device, kwargs: Sequence[Mapping[str, Any]], step: int
) -> int:
    """The id of this rank's run conditions, with the shapes of its keyword arguments."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    modules = [stage.submod for stage in stages]
    params = [(p.requires_grad, p.dtype) for module in modules for p in module.parameters()]
    kinds = [(type(each), each.training) for module in modules for each in module.modules()]
    named = [_key((), each, step) for each in kwargs] if any(kwargs) else []
    return _digest((cast, kinds, params, named))


def shape_ids(
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[Mapping[str, Any]],
    conditions: Sequence[int],
    step: int,
) -> list[int]:
    """Per microbatch the id of its inputs' shapes, under the ids of all ranks' conditions.

    Examples:
        >>> short, long = (torch.ones(3),), (torch.ones(5),)
        >>> one, other, again = shape_ids([short, long, short], [{}] * 3, [0], 0)
        >>> one == again, one == other
        (True, False)
    """
    calls = zip(args, kwargs, strict=True)
    return [_digest((*conditions, _key(*call, step))) for call in calls]


def inputs_id(
    args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]], step: int
) -> int:
    """The id of the shapes of all microbatches' inputs, without conditions; 32 bits, never 0."""
    return _digest([_key(*call, step) for call in zip(args, kwargs, strict=True)]) >> 31 | 1


def _digest(key: object) -> int:
    data = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(data) >> 1  # as a signed integer


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int) -> tuple[Any, ...]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return (args[0].shape, args[0].dtype)
    leaves, tree = flatten((args, dict(kwargs)))
    parts: list[Any] = [tree]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts += (leaf.shape, leaf.dtype)
        else:
            # Floats change often, and shapes seldom with them. An object of another type may be
            # mutated and still be the same object.
            value = None if isinstance(leaf, float) else leaf
            parts += (type(leaf), value if is_plain(leaf) else step)
    return tuple(parts)
