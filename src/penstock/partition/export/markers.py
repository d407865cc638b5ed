"""Marks of cuts: an operation in the captured graph at which a stage starts, without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.fx.node import has_side_effect

from penstock.errors import PartitionError

__all__ = [
    "HERE", "MARK", "SplitPoint", "annotate_split_points", "label_of", "marked", "pipe_split",
]  # fmt: skip

_LIBRARY: Any = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("pipe_split(str label) -> ()")
_LIBRARY.impl("pipe_split", lambda label: None, "CompositeExplicitAutograd")
# The op of a mark in a captured graph; its argument is the cut's label.
MARK: Any = torch.ops.penstock.pipe_split.default
has_side_effect(MARK)

# The label of marks in the code; labels of split points name a module.
HERE = "pipe_split()"


class SplitPoint(Enum):
    """The side of a module on which a model is cut."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """Mark a cut in a module's forward: the code after it belongs to the next stage.

    It does nothing except in a model that ``pipeline`` captures.

    Examples:
        >>> class Net(nn.Module):
        ...     def forward(self, x):
        ...         x = x * 2
        ...         pipe_split()
        ...         return x + 1
        >>> Net()(torch.ones(1))
        tensor([3.])
    """
    MARK(HERE)


def label_of(name: str, point: SplitPoint = SplitPoint.BEGINNING) -> str:
    """The label of the mark on one side of a module, such as ``"before layers.2"``."""
    return f"{'before' if point is SplitPoint.BEGINNING else 'after'} {name}"


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Mark cuts around modules of ``mod`` permanently, like ``pipe_split()`` calls in their code.

    Args:
        mod: the model.
        spec: for names of its modules, the side on which to cut.

    Raises:
        PartitionError: a name is not a module, or its value is not a ``SplitPoint``.
    """
    _register_marks(mod, spec)


@contextmanager
def marked(model: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Mark cuts around modules within this block."""
    hooks = _register_marks(model, spec)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _register_marks(model: nn.Module, spec: Mapping[str, SplitPoint]) -> list[Any]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise PartitionError(
                f"the split point of {name!r} is {point!r}, expected SplitPoint.BEGINNING or "
                "SplitPoint.END"
            )
        if not name or name not in modules:
            raise PartitionError(
                f"split point {name!r} is no module of the {type(model).__name__}; name one of its "
                "named_modules()"
            )
    return [_register_mark(modules[name], label_of(name, p), p) for name, p in spec.items()]


def _register_mark(module: nn.Module, label: str, point: SplitPoint) -> Any:
    if point is SplitPoint.BEGINNING:
        return module.register_forward_pre_hook(lambda *_: MARK(label))
    return module.register_forward_hook(lambda *_: MARK(label))
