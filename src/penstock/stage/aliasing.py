"""In-place writes into a stage's inputs, as ``nn.ReLU(inplace=True)`` and ``x.add_(1)`` do.

A received tensor is a leaf of the stage's autograd graph, and autograd refuses in-place writes
into leaves that require grad. In the unsplit model the tensor would not be a leaf, so the module
gets differentiable aliases. An alias costs a few microseconds. A module without ``inplace=True``
layers whose first forward writes into no alias gets the leaves from then on.

Two outputs that share memory arrive as separate tensors. A write into one of them raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch_compat import version_of
from penstock.errors import BoundaryError

__all__ = ["InputAliases", "sharing_memory", "writable"]


class InputAliases:
    """The writable aliases of one stage's inputs.

    Example:
        >>> module, aliases = nn.ReLU(inplace=True), InputAliases()
        >>> for _ in range(2):
        ...     inputs = [torch.tensor([-1.0], requires_grad=True)]
        ...     if aliases.may_write(module):
        ...         inputs = aliases.of(inputs)
        ...     _ = module(*inputs)
        >>> aliases.may_write(module)
        True
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._writes: bool | None = None
        # The inputs of the first forward, and inputs with shared memory, each with its version.
        self._first: list[tuple[Tensor, int]] = []
        self._shared: list[tuple[int, int, Tensor, int]] = []

    def may_write(self, module: nn.Module) -> bool:
        """True if ``module`` may write into its inputs; called before each forward."""
        if module is not self._module:
            self._module, self._writes = module, None
        elif self._writes is None and self._first:
            written = any(version_of(tensor) != version for tensor, version in self._first)
            self._writes = written or any(
                getattr(layer, "inplace", False) is True for layer in module.modules()
            )
        self._first = []
        return self._writes is not False

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors`` with an alias in place of each that requires grad."""
        aliases = [writable(t) if t.requires_grad else t for t in tensors]
        if self._writes is None:
            self._first = [(t, version_of(t)) for t in aliases]
        return aliases

    def watch(self, tensors: Sequence[Tensor], shared: Sequence[tuple[int, int]]) -> None:
        """Record inputs that a forward must not write into.

        Args:
            tensors: the inputs.
            shared: the pairs that shared memory in the previous stage, by index.
        """
        pairs = [pair for one, other in shared for pair in ((one, other), (other, one))]
        watched = ((i, j, tensors[i]) for i, j in pairs if not tensors[i].is_inference())
        self._shared = [(i, j, tensor, version_of(tensor)) for i, j, tensor in watched]

    def check(self) -> None:
        """Check, after the forward, that no watched input was written into.

        Raises:
            BoundaryError: the forward wrote into a watched input.
        """
        if not self._shared:
            return
        shared, self._shared = self._shared, []
        for one, other, tensor, version in shared:
            if version_of(tensor) != version:
                raise BoundaryError(
                    f"the stage writes into tensor {one} of its inputs in place; it has memory in "
                    f"common with tensor {other} in the stage before, which would not see the "
                    "write here: return a clone of one of them there, or don't write in place"
                )


def sharing_memory(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """The pairs of tensors, by index, that share a storage.

    Example:
        >>> h = torch.zeros(2, 6)
        >>> sharing_memory([h, h[:, :2], h.clone()])
        ((0, 1),)
    """
    plain = [(i, t) for i, t in enumerate(tensors) if type(t) is Tensor and not t.is_meta]
    places = [(i, t.untyped_storage().data_ptr()) for i, t in plain if t.numel()]
    return tuple(
        (i, j)
        for at, (i, here) in enumerate(places)
        for j, there in places[at + 1 :]
        if here == there
    )


def writable(leaf: Tensor) -> Tensor:
    """A differentiable alias of ``leaf`` that may be written into.

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
        return leaf.detach()  # the shared version counter shows writes to autograd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
