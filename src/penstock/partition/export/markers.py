"""Where a model is to be cut: marks that its forward leaves in the graph while it is captured.

    def forward(self, x):               x = self.first(x)
        x = self.first(x)               ──── pipe_split ────      a node of the graph; no work,
        pipe_split()                    return self.second(x)     and no trace in an eager run
        return self.second(x)

It knows no graph and no stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.fx.node import has_side_effect

from penstock.errors import PartitionError

__all__ = [
    "HERE",
    "MARK",
    "SplitPoint",
    "annotate_split_points",
    "label_of",
    "listening",
    "marked",
    "pipe_split",
]

_LIBRARY: Any = torch.library.Library("penstock", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("pipe_split(str label) -> ()")
_LIBRARY.impl("pipe_split", lambda label: None, "CompositeExplicitAutograd")
# The operation of a mark in a captured graph; its argument says where it stands.
MARK: Any = torch.ops.penstock.pipe_split.default
has_side_effect(MARK)

# What a mark in the code is called; those of split points name a module.
HERE = "pipe_split()"
_listeners: list[Callable[[str], None]] = []


class SplitPoint(Enum):
    """On which side of a module a model is cut."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """Mark a cut here, in a module's forward: what follows belongs to the next stage.

    It does nothing but in a model that ``pipeline`` captures.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, x):
        ...         x = x * 2
        ...         pipe_split()
        ...         return x + 1
        >>> Net()(torch.ones(1))
        tensor([3.])
    """
    leave_mark(HERE)


def leave_mark(label: str) -> None:
    """Mark a cut that is known as ``label``."""
    for listener in _listeners:
        listener(label)
    MARK(label)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Have marks told to ``listener`` too, for tracers that see no operations."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def label_of(name: str, point: SplitPoint) -> str:
    """What the mark on one side of a module is called.

    Example:
        >>> label_of("layers.2", SplitPoint.BEGINNING)
        'before layers.2'
    """
    return f"{'before' if point is SplitPoint.BEGINNING else 'after'} {name}"


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Mark cuts around modules of ``mod``, for good, as ``pipe_split()`` in its code would.

    Args:
        mod: the model.
        spec: for names of its modules, on which side to cut.

    Raises:
        PartitionError: a name is no module, or its place is no ``SplitPoint``.
    """
    place_marks(mod, spec)


@contextmanager
def marked(model: nn.Module, spec: Mapping[str, SplitPoint] | None) -> Iterator[None]:
    """The model with marks, for as long as this is open. See ``annotate_split_points``."""
    handles = place_marks(model, spec or {})
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def place_marks(model: nn.Module, spec: Mapping[str, SplitPoint]) -> list[Any]:
    """Put the marks on, as hooks; returns the hooks' handles."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise PartitionError(
                f"the split point of {name!r} is {point!r}, expected SplitPoint.BEGINNING or "
                "SplitPoint.END"
            )
        if not name or name not in modules:
            raise PartitionError(
                f"split point {name!r} is no module of the {type(model).__name__}"
                f"{_did_you_mean(name, modules)}; name one of its named_modules()"
            )
    return [_mark_one(modules[name], label_of(name, point), point) for name, point in spec.items()]


def _mark_one(module: nn.Module, label: str, point: SplitPoint) -> Any:
    if point is SplitPoint.BEGINNING:
        return module.register_forward_pre_hook(lambda *_: leave_mark(label))
    return module.register_forward_hook(lambda *_: leave_mark(label))


def _did_you_mean(name: str, modules: Mapping[str, nn.Module]) -> str:
    close = get_close_matches(name, [known for known in modules if known], n=3, cutoff=0.5)
    return f" (near it: {', '.join(close)})" if close else ""
