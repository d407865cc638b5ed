"""The form of a captured call: tensor arguments, fixed arguments, and the output's tree.

forward(ids, *, mask=None, scale=1.0)      called as (ids, mask=m, scale=2.0)
tensors     ids, mask                      found again in any call that means the same
fixed       scale = 2.0                    built into the graph; other values are refused
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.module_state import is_equal, tensors_in
from penstock.partition.spec import RemoteTensor, on_shapes, own_loss
from penstock.stage.pytree import flatten, is_plain, unflatten

__all__ = ["CallForm", "OutputForm"]


class CallForm:
    """The form of one example call of a model in one mode.

    ``names`` has the names of the tensors among the arguments, such as ``"batch.mask"``, and
    ``examples`` those of the example, until the capture is done.
    """

    # Set by the capture: the error message for the shapes of a call's tensors, or None.
    check: Callable[[Sequence[Tensor]], str | None]
    output: OutputForm

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        self.signature = inspect.signature(model.forward)
        try:
            leaves, self._tree = flatten(self._by_parameter(args, kwargs or {}))
        except TypeError as error:
            raise PartitionError(
                f"the example does not fit {type(model).__name__}.forward{self.signature}: {error}"
            ) from error
        self._paths = self._paths_of(self._tree)
        self._kinds = [_kind(leaf) for leaf in leaves]
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for path, leaf in zip(self._paths, self._fixed, strict=True):
            if tensors_in(getattr(leaf, "__dict__", {})):
                raise PartitionError(
                    f"input {path} is a {type(leaf).__qualname__}, an object in which stages don't "
                    "find tensors; pass these in a dict, or register its class with torch's pytree "
                    "(register_pytree_node)"
                )
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.names = tuple(self._paths[i] for i in self._slots)
        # Copies, since a tracer would merge arguments that are one tensor.
        self.examples: tuple[Tensor, ...] = tuple(
            leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in self._slots
        )
        self._checked_shapes: set[tuple[torch.Size, ...]] = set()

    def _by_parameter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter, without defaults."""
        parameters = self.signature.parameters
        given = self.signature.bind(*args, **kwargs).arguments
        return {n: v for n, v in given.items() if not is_equal(v, parameters[n].default)}

    def _paths_of(self, tree: optree.PyTreeSpec) -> list[str]:
        """The names of a call's leaves; entries of ``**kwargs`` go by their own names."""
        parameters = self.signature.parameters.values()
        catch_all = {p.name for p in parameters if p.kind is p.VAR_KEYWORD}
        return [".".join(map(str, p[1:] if p[0] in catch_all else p)) for p in tree.paths()]

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call with other tensors in place of its own."""
        bound = self.signature.bind_partial()
        bound.arguments.update(unflatten(self._tree, _filled(self._fixed, self._slots, tensors)))
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
        """The tensors of a call, in the order of ``names``; None for remote ones.

        Raises:
            BoundaryError: the call differs from the example in more than the values of tensors
                and open sizes.
        """
        try:
            leaves, tree = flatten(self._by_parameter(args, kwargs))
        except TypeError as error:
            problem = f"the inputs do not fit forward{self.signature}: {error}"
            raise BoundaryError(problem) from error
        if tree != self._tree:
            raise BoundaryError(
                f"the inputs are ({', '.join(self._paths_of(tree))}), but the model was captured "
                f"with ({', '.join(self._paths)}); capture it with an example like these"
            )
        for path, leaf, expected in zip(self._paths, leaves, self._kinds, strict=True):
            if _kind(leaf) != expected:
                raise BoundaryError(
                    f"argument {path} is {_kind(leaf)[1]!r}, but the model was captured with "
                    f"{expected[1]!r}, which is built into its graph; capture it again with an "
                    "example like this"
                )
        leaves, remote = on_shapes(leaves)
        tensors = [leaves[i] for i in self._slots]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._checked_shapes:
            if message := self.check(tensors):
                raise BoundaryError(message)
            self._checked_shapes.add(shapes)
        return [None if i in remote else leaves[i] for i in self._slots]


class OutputForm:
    """The tree of a model's output, around the values that its graph computes."""

    def __init__(self, output: Any) -> None:
        leaves, self._tree = flatten(output)
        computed = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, computed)]
        self.computed = [leaves[i] for i in self._slots]  # until the capture is done
        self._fixed = [leaf if is_plain(leaf) else None for leaf in leaves]
        opaque = (leaf for leaf in leaves if not is_plain(leaf) and not isinstance(leaf, computed))
        # The types of leaves that no stage can send, such as caches; None replaces them.
        self.dropped = sorted({type(leaf).__qualname__ for leaf in opaque})
        loss = own_loss(output)
        # A loss is a scalar. An open size is a SymInt; a comparison would specialize it.
        is_loss = isinstance(loss, Tensor) and loss.is_floating_point()
        self.has_loss = is_loss and all(isinstance(n, int) and n == 1 for n in loss.shape)

    def assemble(self, values: Sequence[Any]) -> Any:
        """Assemble the model's output from the values that the graph has computed."""
        return unflatten(self._tree, _filled(self._fixed, self._slots, values))


def _filled(fixed: Sequence[Any], slots: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """The leaves of a tree: ``values`` in their slots, fixed values elsewhere."""
    leaves = list(fixed)
    for slot, value in zip(slots, values, strict=True):
        leaves[slot] = value
    return leaves


def _kind(leaf: Any) -> tuple[Any, Any]:
    """The class and dtype of a tensor; the class and value of any other leaf."""
    if isinstance(leaf, RemoteTensor):
        return (Tensor, leaf.meta.dtype)
    return (Tensor, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
