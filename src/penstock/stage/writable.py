"""Stages that write into their input, as ``nn.ReLU(inplace=True)`` does.

What a stage receives is a leaf of its autograd graph, and autograd lets nobody write into a leaf
that takes gradients. Within a model cut in two after a convolution this would be no leaf; so such
a stage gets an alias that is none. Others are spared the few microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["writable", "writes_in_place"]


def writes_in_place(module: nn.Module) -> bool:
    """Whether a layer of ``module`` says that it writes into its input (``inplace=True``).

    Example:
        >>> writes_in_place(nn.Sequential(nn.ReLU(inplace=True)))
        True
    """
    return any(getattr(layer, "inplace", False) is True for layer in module.modules())


def writable(leaf: Tensor) -> Tensor:
    """An alias of ``leaf`` that may be written into; its gradient is the leaf's.

    Example:
        >>> leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> writable(leaf).relu_().sum().backward()
        >>> leaf.grad
        tensor([0., 1.])
    """
    alias: Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
