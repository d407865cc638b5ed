"""Stages that write into their input, as ``nn.ReLU(inplace=True)`` and ``x.add_(1)`` do.

What a stage receives is a leaf of its autograd graph, and autograd lets nobody write into a leaf
that takes gradients. Within a model cut in two after a convolution this would be no leaf; so a
stage gets aliases that are none, until its first forward has shown that it writes into none of
them: others are spared the few microseconds. Layers that say of themselves that they write
(``inplace=True``) may do so later, where what is before them copies only some shapes: they get
aliases always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import BoundaryError

__all__ = ["InputWriter", "writable"]


class InputWriter:
    """Whether a stage's module writes into what it receives: found out from its first forward.

    Example:
        >>> module, writer = nn.ReLU(inplace=True), InputWriter()
        >>> for _ in range(2):
        ...     inputs = [torch.tensor([-1.0], requires_grad=True)]
        ...     if writer.may_write(module):
        ...         inputs = writer.lend(inputs)
        ...     _ = module(*inputs)
        >>> writer.may_write(module)
        True
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._writes: bool | None = None
        # What was lent for the forward that is to tell, each with its version.
        self._lent: list[tuple[Tensor, int]] = []
        # Tensors that had memory in common with others, with their numbers and versions.
        self._guarded: list[tuple[int, int, Tensor, int]] = []

    def may_write(self, module: nn.Module) -> bool:
        """Whether ``module`` has to be lent aliases; asked before each of its forwards."""
        if module is not self._module:
            self._module, self._writes = module, None
        elif self._writes is None and self._lent:
            written = any(tensor._version != version for tensor, version in self._lent)
            self._writes = written or _says_in_place(module)
        self._lent = []
        return self._writes is not False

    def lend(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors``, with an alias in place of each that takes gradients."""
        lent = [writable(t) if t.requires_grad else t for t in tensors]
        if self._writes is None:
            self._lent = [(t, t._version) for t in lent]
        return lent

    def guard(self, tensors: Sequence[Tensor], shared: Sequence[tuple[int, int]]) -> None:
        """Note what a forward may not write into.

        Args:
            tensors: what it is called with.
            shared: pairs of them that had memory in common in the stage before, and have none here.
        """
        pairs = [pair for one, other in shared for pair in ((one, other), (other, one))]
        guarded = ((i, j, tensors[i]) for i, j in pairs if not tensors[i].is_inference())
        self._guarded = [(i, j, tensor, tensor._version) for i, j, tensor in guarded]

    def check(self) -> None:
        """After the forward: see that it wrote into nothing that others hold too.

        Raises:
            BoundaryError: it did.
        """
        if not self._guarded:
            return
        guarded, self._guarded = self._guarded, []
        for one, other, tensor, version in guarded:
            if tensor._version != version:
                raise BoundaryError(
                    f"the stage writes into tensor {one} of what it receives, which has memory in "
                    f"common with tensor {other} in the stage before; here that would not see it: "
                    "let the stage before return a clone of one of them, or don't write in place"
                )


def _says_in_place(module: nn.Module) -> bool:
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
