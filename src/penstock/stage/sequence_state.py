"""State passed between the chunks of a sequence within one stage.

    forward     chunk 0 ── state ──► chunk 1 ── state ──► chunk 2        (k = 3)
    backward    chunk 0 ◄── grads ── chunk 1 ◄── grads ── chunk 2

The module of such a stage is called as ``module(*args, state=state)`` and returns
``(output, new_state)``. The state is a pytree of tensors and plain values, such as the keys and
values of all chunks so far; None for the first chunk. Each chunk receives detached leaves, so that
its backward ends there; their gradients are further roots of the previous chunk's backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import StageError
from penstock.stage.pytree import flatten, is_plain, unflatten
from penstock.stage.wrappers import unwrapped

__all__ = ["SequenceState", "detach_state", "takes_state"]


@dataclass(slots=True)
class SequenceState:
    """The state that one chunk passes to the next."""

    value: Any  # detached; None once the next chunk has taken it
    leaves: Sequence[Tensor]  # its tensors that take gradients, as the next chunk sees them
    edges: Sequence[GradientEdge]  # of the same tensors in this chunk's graph

    def take(self) -> Any:
        """Return the value once, which transfers its memory to the next chunk."""
        value, self.value = self.value, None
        return value

    def grads(self) -> list[Tensor | None]:
        """The gradients of the leaves after the next chunk's backward; None where unused."""
        return [leaf.grad for leaf in self.leaves]


def detach_state(returned: Any) -> tuple[Any, SequenceState]:
    """Split a module's return value into its output and a detached state.

    Raises:
        StageError: the module did not return ``(output, state)``, or the state holds a leaf that
            is neither a tensor nor a plain value.
    """
    if type(returned) is not tuple or len(returned) != 2:
        what = f"{len(returned)} values" if type(returned) is tuple else type(returned).__name__
        raise StageError(
            f"the module returned {what}, expected (output, state): where sequences are split "
            "into chunks, a stage also returns the state for the next chunk"
        )
    output, state = returned
    values, tree = flatten(state)
    edges: list[GradientEdge] = []
    leaves: list[Tensor] = []
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            values[i] = value.detach()
            if value.requires_grad:
                leaves.append(values[i].requires_grad_())
                edges.append(get_gradient_edge(value))
        elif not is_plain(value):
            # Tensors hidden in it would tie the backwards of both chunks together.
            raise StageError(
                f"the state holds a {type(value).__qualname__}, expected tensors, numbers, "
                "strings, None and containers of these"
            )
    return output, SequenceState(unflatten(tree, values), leaves, edges)


def takes_state(module: nn.Module) -> bool:
    """True if the forward of a module, wrapped (DDP, compiled) or not, accepts ``state``."""
    return "state" in inspect.signature(unwrapped(module).forward).parameters
