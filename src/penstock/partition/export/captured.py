"""A model's forward as a graph: what capturing it gives, and cutting it takes.

    placeholder    the tensors of the call, in the order of ``CallForm.names``
    get_attr       parameters and buffers, by the names that they have in the model; constants
                   that the forward makes, as ``captured.<name>``
    call_function  the forward's work in the order in which it ran
    call_module    likewise, where a module was captured as a whole
    output         the tensors (and sizes) among what the model returns

Each node's ``meta`` holds ``modules`` (the names of the modules in whose call it ran, outermost
first) and ``regions`` (see ``regions.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from penstock.partition.export.call_form import CallForm
from penstock.partition.spec import own_loss
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.tensor_meta import plain_tag

__all__ = ["CONSTANTS", "Captured", "OutputForm"]

# Where a stage keeps the tensors that its graph itself brings along.
CONSTANTS = "captured"


class OutputForm:
    """The tree that a model returns, around the values that its graph computes.

    Args:
        output: what the model returned while it was captured.

    Attributes:
        dropped: the kinds of leaves that nothing can carry (such as caches); None stands for them.
        has_loss: whether the model computes its loss itself: a scalar, called ``loss``.
    """

    def __init__(self, output: Any) -> None:
        leaves, self._tree = flatten(output)
        self._slots = [i for i, leaf in enumerate(leaves) if is_computed(leaf)]
        self._computed = [leaves[i] for i in self._slots]
        opaque = [leaf for leaf in leaves if not is_computed(leaf) and plain_tag(leaf) is None]
        self.dropped = tuple(sorted({type(leaf).__qualname__ for leaf in opaque}))
        self.has_loss = _has_loss(output)
        self._leaves = [
            leaf if not is_computed(leaf) and plain_tag(leaf) is not None else None
            for leaf in leaves
        ]

    def take(self) -> list[Any]:
        """The leaves that the graph computes, as seen while capturing; given out once."""
        taken, self._computed = self._computed, []
        return taken

    def assemble(self, values: Sequence[Any]) -> Any:
        """The model's output, from the values that the graph has computed."""
        leaves = list(self._leaves)
        for slot, value in zip(self._slots, values, strict=True):
            leaves[slot] = value
        return unflatten(self._tree, leaves)


def _has_loss(output: Any) -> bool:
    if isinstance(output, fx.Proxy):
        return False  # it has every attribute, for all that torch.fx knows
    loss = own_loss(output)
    if isinstance(loss, fx.Proxy):
        return True  # its shape is not known before it runs
    # Sizes that were left open are not asked: that would fix them.
    sizes = loss.shape if isinstance(loss, Tensor) and loss.is_floating_point() else (None,)
    return all(isinstance(size, int) and size == 1 for size in sizes)


def is_computed(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, fx.Proxy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One capture of a model's forward.

    Args:
        graph: the graph, as above.
        form: how the model was called.
        output: what it returns.
        constants: tensors and inner graphs that the graph brings along.
        by_modules: whether the graph calls modules, rather than operations alone.
        read: the plain values that code around such modules has read of them, and that are built
            into the graph: module, attribute and value.
    """

    graph: fx.Graph
    form: CallForm
    output: OutputForm
    constants: Mapping[str, Any] = field(default_factory=dict)
    by_modules: bool = False
    read: tuple[tuple[str, str, Any], ...] = ()
