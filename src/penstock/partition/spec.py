"""User input about a model: the places to cut it, and its calls.

    split=                                   SplitSpec
    "auto"                                   auto       measured and balanced
    "plan.toml", Plan                        plan       names per stage
    [["embed", "h.0"], ["h.1", "head"]]      stages     names per stage
    [2, 2]                                   counts     blocks per stage
    ["h.1"]                                  starts     the first module of each later stage
                                                        (of a Sequential: stages of one layer)

Every way of cutting (layer by layer, by module, by export) takes this one type.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.blocks import find_blocks
from penstock.partition.plan import Plan, abbreviate
from penstock.stage.boundary import TensorMeta, shape_text
from penstock.stage.pytree import as_args, flatten, unflatten

__all__ = [
    "Example", "RemoteTensor", "Split", "SplitSpec", "as_call", "on_shapes", "own_loss",
    "value_text", "with_remote_kwargs",
]  # fmt: skip

Split: TypeAlias = Plan | Sequence[int] | Sequence[str] | Sequence[Sequence[str]] | str
"""The forms of a user's split."""

Example: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | Tensor
"""One microbatch: positional arguments, keyword arguments, or the only argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSpec:
    """The places to cut a model, in one of four forms."""

    stages: tuple[tuple[str, ...], ...] = ()  # per stage the names of its modules
    counts: tuple[int, ...] = ()  # per stage the number of its blocks, or of a sequence's layers
    starts: tuple[str, ...] = ()  # the first module of each stage but the first
    auto: bool = False  # balance the stages by a measurement
    plan: Plan | None = None  # that ``stages`` comes from
    blocks: tuple[str, ...] = ()  # that ``counts`` refers to; set by ``resolve``

    @classmethod
    def parse(cls, split: Any, *, sequence: bool = False) -> SplitSpec:
        """Parse a ``Split``, or the path of a plan; in a ``sequence`` each name is a stage."""
        if isinstance(split, SplitSpec):
            return split
        if isinstance(split, os.PathLike) or str(split).endswith(".toml"):
            split = Plan.load(os.fspath(split))
        if isinstance(split, Plan):
            return cls(stages=split.stages, plan=split)
        if isinstance(split, str) and split == "auto":
            return cls(auto=True)
        items = list(split) if isinstance(split, Sequence) and not isinstance(split, str) else []
        kinds = {type(item) for item in items}
        if kinds == {int}:
            return cls(counts=tuple(items))
        if kinds == {str} and not sequence:
            return cls(starts=tuple(items))
        if kinds and kinds <= ({str, list, tuple} if sequence else {list, tuple}):
            return cls(stages=tuple((i,) if isinstance(i, str) else tuple(i) for i in items))
        raise PartitionError(
            f"split={split!r}: expected 'auto', a plan or its file (.toml), or a list that has "
            "for each stage the names of its modules, or the number of its layers, not a mix"
        )

    def resolve(self, model: nn.Module) -> SplitSpec:
        """Check the spec against a model that is no sequence; find the blocks of ``counts``."""
        if self.stages:
            (self.plan or Plan(stages=self.stages)).check(model)
        if not self.counts:
            return self
        blocks = tuple(find_blocks(model))
        if sum(self.counts) != len(blocks) or min(self.counts) < 1:
            raise PartitionError(
                f"the counts {list(self.counts)} make {sum(self.counts)} blocks, at least 1 per "
                f"stage, but this {type(model).__name__} has {len(blocks)} repeated blocks"
                f"{': ' if blocks else ''}{abbreviate(blocks, most=3)}; to give a stage other "
                "modules alone, name the modules of each stage"
            )
        return replace(self, blocks=blocks)

    @property
    def num_stages(self) -> int:
        """The number of stages; ``auto`` has none of its own."""
        assert not self.auto, "auto takes the number from the schedule"
        return len(self.stages) or len(self.counts) or len(self.starts) + 1

    @property
    def places(self) -> tuple[str, ...]:
        """The modules that a cut must separate."""
        return tuple(n for names in self.stages for n in names) or self.blocks or self.starts

    def begins(self, order: Mapping[str, int]) -> tuple[str, ...]:
        """The first modules of later stages, given the place of each module's first call."""
        blocks = sorted(self.blocks, key=lambda name: order.get(name, len(order)))
        starts = list(accumulate(self.counts))[:-1]
        return self.starts or tuple(blocks[start] for start in starts)


# --- calls --------------------------------------------------------------------------------------


class RemoteTensor:
    """In the first stage's call, a tensor that another rank passes to its own stages."""

    def __init__(self, meta: TensorMeta) -> None:
        self.meta = meta

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteTensor) and self.meta == other.meta

    def __hash__(self) -> int:
        return hash(self.meta)


def with_remote_kwargs(
    forward: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], others: Any
) -> dict[str, Any]:
    """The keyword arguments of a call, with those of other ranks that it lacks."""
    given = {**forward.bind_partial(*args).arguments, **kwargs}
    return {**kwargs, **{name: value for name, value in others.items() if name not in given}}


def on_shapes(call: Any) -> tuple[Any, tuple[int, ...]]:
    """A call with its remote tensors on the meta device, and their indices."""
    leaves, tree = flatten(call)
    found = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor))
    for i in found:
        meta = leaves[i].meta
        leaves[i] = meta.unpack(torch.empty(meta.wire_shape, dtype=meta.dtype, device="meta"))
    return unflatten(tree, leaves), found


def as_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword arguments."""
    return ((), dict(example)) if isinstance(example, Mapping) else (as_args(example), {})


def own_loss(output: Any, target: object = None) -> Any:
    """Return the attribute or item ``loss`` of a model's output; None without one."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def value_text(value: Any) -> str:
    """Describe tensors by dtype and shape (``*`` for an open size), other values by class."""
    if isinstance(value, Tensor):
        return shape_text(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {value_text(each)}" for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(value_text, value))
    return type(value).__name__
