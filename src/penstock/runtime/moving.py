"""Batches brought to where stages live.

    inputs on the CPU ──► the first stage's device      targets on the CPU ──► the last stage's

It looks at nothing but where tensors lie: those on another device than the CPU stay there.
"""

from __future__ import annotations

from typing import TypeVar, cast

import optree
import torch

from penstock.stage.trees import flatten

__all__ = ["moved"]

_Tree = TypeVar("_Tree")


def moved(tree: _Tree, device: torch.device) -> _Tree:
    """A tree whose tensors on the CPU are on ``device``; the host does not wait for them.

    Example:
        >>> moved({"x": torch.ones(2), "scale": 3}, torch.device("meta"))
        {'x': tensor(..., device='meta', size=(2,)), 'scale': 3}
    """
    if device.type == "cpu":
        return tree
    leaves, spec = flatten(tree)
    return cast(_Tree, optree.tree_unflatten(spec, [_moved(leaf, device) for leaf in leaves]))


def _moved(leaf: object, device: torch.device) -> object:
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
        return leaf.to(device, non_blocking=True)
    return leaf
