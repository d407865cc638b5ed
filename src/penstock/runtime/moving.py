"""Batches brought to where stages live.

    inputs on the CPU ──► the first stage's device      targets on the CPU ──► the last stage's

Where some of a batch lies on a device already, whoever put it there has placed all of it: lengths
of sequences, for instance, belong on the CPU. What has a method ``to`` of its own, such as a mask
or a packed sequence, is moved by that.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import optree
import torch

from penstock.stage.pytree import NAMESPACE, flatten, tensors_of

__all__ = ["is_placed", "moved"]

_Tree = TypeVar("_Tree")


def is_placed(tree: Any) -> bool:
    """Whether a tensor of ``tree`` lies on another device than the CPU.

    Example:
        >>> is_placed([torch.ones(2), 3]), is_placed({"x": torch.ones(2, device="meta")})
        (False, True)
    """
    return any(tensor.device.type != "cpu" for tensor in tensors_of(tree))


def moved(tree: _Tree, device: torch.device) -> _Tree:
    """A tree whose tensors are on ``device``; for those that were pinned the host does not wait.

    Example:
        >>> moved({"x": torch.ones(2), "scale": 3}, torch.device("meta"))
        {'x': tensor(..., device='meta', size=(2,)), 'scale': 3}
    """

    def to_device(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node.to(device, non_blocking=True)
        return node.to(device) if _moves(node) else node

    flatten(tree)  # which makes its dataclasses known
    found: Any = optree.tree_map(to_device, cast(Any, tree), is_leaf=_moves, namespace=NAMESPACE)
    return cast(_Tree, found)


def _moves(node: Any) -> bool:
    return callable(getattr(node, "to", None))
