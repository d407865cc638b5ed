"""What the pieces of a sequence hand on to each other within one stage.

    forward     piece 0 ── state ──► piece 1 ── state ──► piece 2        (k = 3)
    backward    piece 0 ◄── grads ── piece 1 ◄── grads ── piece 2

The module of such a stage is called as ``module(*args, state=state)`` and returns
``(output, new_state)``. The state is any tree of tensors and values, such as the keys and values
of all pieces so far; None for the first piece of a sequence. Each piece gets the state as leaves
of its own, so that its backward ends there; what their gradients then are is where the backward
of the piece before begins, together with the gradient of its output. This module knows neither
schedules nor messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import StageError
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.tensor_meta import plain_tag
from penstock.stage.wrappers import unwrapped

__all__ = ["Carry", "takes_state"]


@dataclass(slots=True)
class _Handed:
    """What one piece has handed to the next: the state, its leaves there, its edges here."""

    state: Any
    leaves: Sequence[Tensor]
    edges: Sequence[GradientEdge]


class Carry:
    """The states between the pieces in flight of one stage.

    Args:
        num_splits: into how many pieces each sequence is split.
    """

    def __init__(self, num_splits: int) -> None:
        self._num_splits = num_splits
        self._handed: dict[int, _Handed] = {}

    def take(self, piece: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a piece's forward: the state of the piece before is added."""
        state = None
        if piece % self._num_splits:
            before = self._handed[piece - 1]
            state, before.state = before.state, None
            if not before.edges:
                del self._handed[piece - 1]
        return {**kwargs, "state": state}

    def give(self, piece: int, returned: Any) -> Any:
        """Keep the state that a piece's forward returned for the piece after it.

        Returns:
            The output without the state.

        Raises:
            StageError: the module did not return an output and a state, or the state holds
                something whose tensors can't be seen.
        """
        if type(returned) is not tuple or len(returned) != 2:
            what = f"{len(returned)} values" if type(returned) is tuple else type(returned).__name__
            raise StageError(
                f"the module returned {what}, expected (output, state): where sequences are "
                "split, a stage also returns what the next piece has to know of this one"
            )
        output, state = returned
        if (piece + 1) % self._num_splits == 0:
            return output
        values, tree = flatten(state)
        edges: list[GradientEdge] = []
        leaves: list[Tensor] = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                values[i] = value.detach()
                if value.requires_grad:
                    leaves.append(values[i].requires_grad_())
                    edges.append(get_gradient_edge(value))
            elif plain_tag(value) is None:
                # Tensors hidden in it would tie the backwards of both pieces together.
                raise StageError(
                    f"the state holds a {type(value).__qualname__}, expected tensors, numbers, "
                    "strings, None and containers of these"
                )
        self._handed[piece] = _Handed(unflatten(tree, values), leaves, edges)
        return output

    def join(
        self,
        piece: int,
        roots: Sequence[GradientEdge | None],
        grads: Sequence[Tensor | None],
    ) -> tuple[Sequence[GradientEdge | None], Sequence[Tensor | None]]:
        """Where a piece's backward begins: at its output, and at the state that it handed on."""
        handed = self._handed.pop(piece, None)
        if handed is None:
            return roots, grads
        # What the next piece made no use of has no gradient.
        return [*roots, *handed.edges], [*grads, *(leaf.grad for leaf in handed.leaves)]


def takes_state(module: nn.Module) -> bool:
    """Whether a module's forward takes ``state``; wrappers (DDP, compiled) are looked through.

    Example:
        >>> takes_state(nn.Linear(2, 2))
        False
    """
    return "state" in inspect.signature(unwrapped(module).forward).parameters
