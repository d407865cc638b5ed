"""Ids of input shapes, by which stage runners cache boundary metadata.

The first stage's rank computes an id per microbatch, a digest of the inputs' shapes and plain
values but floats (objects of other types get a new id each step) and of all ranks' *run
conditions*: autocast, the modules' classes (which sharding changes) and training mode, which
parameters require grad, in which dtype, and keyword arguments on other ranks.

Where the first stage's module plans the whole model's forward, its rank also learns what keyword
arguments other ranks pass to their stages alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._torch_compat import autocast_state
from penstock.partition.spec import RemoteTensor
from penstock.runtime.comm.agreement import BatchFacts
from penstock.runtime.step import StepState
from penstock.stage.boundary import BoundarySpec, TensorMeta, describe
from penstock.stage.pytree import flatten, is_plain, unflatten
from penstock.stage.stage import Stage
from penstock.stage.wrappers import unwrapped

__all__ = ["MAX_SHAPES", "RemoteKwargs", "condition_id", "inputs_id", "shape_ids"]

# After so many ids all are forgotten, on all ranks at the same step.
MAX_SHAPES = 4096


def condition_id(
    stages: Iterable[Stage], device: torch.device, kwargs: Sequence[Mapping[str, Any]], step: int
) -> int:
    """The id of this rank's run conditions, with the shapes of its keyword arguments."""
    modules = [stage.submod for stage in stages]
    params = [(p.requires_grad, p.dtype) for module in modules for p in module.parameters()]
    kinds = [(type(each), each.training) for module in modules for each in module.modules()]
    named = [_key((), each, step) for each in kwargs] if any(kwargs) else []
    return _digest((autocast_state(device), kinds, params, named))


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


class RemoteKwargs:
    """The keyword arguments of every rank but the first stage's, described once per conditions."""

    def __init__(self) -> None:
        # By rank and run conditions; the same on every rank.
        self._known: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def describe(
        self,
        rank: int,
        conditions: int,
        kwargs: Sequence[Mapping[str, Any]],
        stages: Iterable[Stage],
    ) -> str:
        """Describe this rank's, unless the others know them; floats, which change, are left out."""
        are_planned = any(hasattr(unwrapped(stage.submod), "complete_call") for stage in stages)
        if not are_planned or not any(kwargs) or (rank, conditions) in self._known:
            return ""
        shown = [{n: v for n, v in each.items() if _is_describable(v)} for each in kwargs]
        return json.dumps([describe((each,)).encode().decode() for each in shown])

    def note(self, facts: Sequence[BatchFacts]) -> None:
        """Keep the descriptions of all ranks; at the limit, forget those that are not in use."""
        if len(self._known) >= MAX_SHAPES:
            used = {(rank, each.conditions) for rank, each in enumerate(facts)}
            self._known = {key: known for key, known in self._known.items() if key in used}
        for rank, each in enumerate(facts):
            if each.kwargs:
                self._known[rank, each.conditions] = list(map(_stubs, json.loads(each.kwargs)))

    def complete(self, step: StepState, facts: Sequence[BatchFacts], first: Stage) -> None:
        """Add those of other ranks to the calls of the first stage that lack them."""
        complete_call: Any = getattr(unwrapped(first.submod), "complete_call", None)
        for key in ((rank, each.conditions) for rank, each in enumerate(facts)):
            if key in self._known and complete_call is not None:
                assert step.args is not None
                calls = zip(step.args, step.kwargs, self._known[key], strict=False)
                step.kwargs = [complete_call(*call) for call in calls]


def _is_describable(value: Any) -> bool:
    leaves = flatten(value)[0]
    return bool(leaves) and all(
        (leaf.layout is torch.strided and not leaf.is_nested)
        if isinstance(leaf, Tensor)
        else is_plain(leaf) and not isinstance(leaf, float)
        for leaf in leaves
    )


def _stubs(encoded: str) -> dict[str, Any]:
    """Keyword arguments as described, with stubs of tensors."""
    spec = BoundarySpec.decode(encoded.encode())
    leaves = [RemoteTensor(leaf) if isinstance(leaf, TensorMeta) else leaf for leaf in spec.leaves]
    (kwargs,) = unflatten(spec.tree, leaves)
    return dict(kwargs)


def _digest(key: object) -> int:
    data = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(data) >> 1  # as a signed integer


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int) -> tuple[Any, ...]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return (args[0].shape, args[0].dtype, args[0].requires_grad)
    leaves, tree = flatten((args, dict(kwargs)))
    parts: list[Any] = [tree]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts += (leaf.shape, leaf.dtype, leaf.requires_grad)
        else:
            # Floats change often, and shapes seldom with them. An object of another type may be
            # mutated and still be the same object.
            value = None if isinstance(leaf, float) else leaf
            parts += (type(leaf), value if is_plain(leaf) else step)
    return tuple(parts)
