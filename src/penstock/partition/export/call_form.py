"""The form of a captured call: tensor arguments, fixed arguments, and the output's tree.

forward(ids, *, mask=None, scale=1.0)      called as (ids, mask=m, scale=2.0)
tensors     ids: (4, 8) int64              found again in any call that means the same:
            mask: (4, 8) int64             (ids=ids, mask=m, scale=2.0)
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
from penstock.partition.forward.module_state import tensors_in
from penstock.partition.spec import own_loss
from penstock.stage.pytree import flatten, is_plain, unflatten

__all__ = ["CallForm", "OutputForm"]


class CallForm:
    """The form of one example call of a model in one mode.

    Attributes:
        names: the names of the tensors among the arguments, such as ``"batch.mask"``.
        examples: the tensors of the example; to be cleared after the capture.
        check: given such tensors, returns the error message for their shapes, or None.
        output: the form of the output; set by the capture, as ``check`` is.

    Raises:
        PartitionError: the arguments do not fit the model's forward.
    """

    check: Callable[[Sequence[Tensor]], str | None]
    output: OutputForm

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        self._signature = inspect.signature(model.forward)
        leaves, self._call = flatten((tuple(args), dict(kwargs or {})))
        leaves = [_copied(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = unflatten(self._call, leaves)
        try:
            canonical, self._tree = flatten(self._canonical(args, kwargs))
        except TypeError as error:
            raise PartitionError(
                f"the example does not fit {type(model).__name__}.forward{self._signature}: {error}"
            ) from error
        self._paths = [".".join(map(str, path)) for path in self._tree.paths()]
        self._kinds = [_kind(leaf) for leaf in canonical]
        for path, leaf in zip(self._paths, canonical, strict=True):
            if tensors_in(getattr(leaf, "__dict__", {})) and not isinstance(leaf, Tensor):
                raise PartitionError(
                    f"input {path} is a {type(leaf).__qualname__}, an object in which stages don't "
                    "find tensors; pass these in a dict, or register its class with torch's pytree "
                    "(torch.utils._pytree.register_pytree_node)"
                )
        self._slots = [i for i, leaf in enumerate(canonical) if isinstance(leaf, Tensor)]
        self.names = tuple(self._paths[i] for i in self._slots)
        self.examples: tuple[Tensor, ...] = tuple(canonical[i] for i in self._slots)
        places = {id(leaf): i for i, leaf in enumerate(leaves)}
        self._places = [places[id(tensor)] for tensor in self.examples]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._checked_shapes: set[tuple[torch.Size, ...]] = set()

    def _canonical(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, in canonical order, without defaults."""
        named: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            parameter = self._signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update({k: v for k, v in value.items() if v is not None})
            elif not _is_default(value, parameter.default):
                named[name] = value
        return named

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call with other tensors in place of its own."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten(self._call, leaves)
        return args, kwargs

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of ``names``.

        Raises:
            BoundaryError: the call differs from the example in more than the values of tensors
                and open sizes.
        """
        try:
            leaves, tree = flatten(self._canonical(args, kwargs))
        except TypeError as error:
            problem = f"the inputs do not fit forward{self._signature}: {error}"
            raise BoundaryError(problem) from error
        if tree != self._tree:
            raise BoundaryError(
                f"the inputs are {_names(tree)}, but the model was captured with "
                f"{_names(self._tree)}; capture it with an example like these"
            )
        for path, leaf, expected in zip(self._paths, leaves, self._kinds, strict=True):
            if _kind(leaf) != expected:
                raise BoundaryError(
                    f"argument {path} is {_kind(leaf)[1]!r}, but the model was captured with "
                    f"{expected[1]!r}, which is built into its graph; capture it again with an "
                    "example like this"
                )
        tensors = [leaves[i] for i in self._slots]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._checked_shapes:
            message = self.check(tensors)
            if message is not None:
                raise BoundaryError(message)
            self._checked_shapes.add(shapes)
        return tensors


class OutputForm:
    """The tree of a model's output, around the values that its graph computes.

    Attributes:
        dropped: the types of leaves that no stage can send (such as caches); None replaces them.
        has_loss: True if the model computes its loss itself: a scalar, called ``loss``.
    """

    def __init__(self, output: Any) -> None:
        leaves, self._tree = flatten(output)
        self._slots = [i for i, leaf in enumerate(leaves) if _is_computed(leaf)]
        self._computed = [leaves[i] for i in self._slots]
        self._leaves = [leaf if is_plain(leaf) else None for leaf in leaves]
        opaque = (x for x in leaves if not is_plain(x) and not _is_computed(x))
        self.dropped = sorted({type(leaf).__qualname__ for leaf in opaque})
        loss = own_loss(output)
        # An open size is a SymInt; a comparison would specialize it.
        is_loss = isinstance(loss, Tensor) and loss.is_floating_point()
        self.has_loss = is_loss and all(isinstance(n, int) and n == 1 for n in loss.shape)

    def take(self) -> list[Any]:
        """The computed leaves as seen during the capture; this call releases them."""
        taken, self._computed = self._computed, []
        return taken

    def assemble(self, values: Sequence[Any]) -> Any:
        """Assemble the model's output from the values that the graph has computed."""
        leaves = list(self._leaves)
        for slot, value in zip(self._slots, values, strict=True):
            leaves[slot] = value
        return unflatten(self._tree, leaves)


def _is_computed(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _copied(tensor: Tensor) -> Tensor:
    """A copy, since a tracer would merge inputs that are one tensor."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _kind(leaf: Any) -> tuple[Any, Any]:
    """The class and dtype of a tensor; the class and value of any other leaf."""
    return (Tensor, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _is_default(value: Any, default: Any) -> bool:
    plain = isinstance(value, (bool, int, float, str))
    return value is default or (plain and type(value) is type(default) and bool(value == default))


def _names(tree: optree.PyTreeSpec) -> str:
    return f"({', '.join('.'.join(map(str, path)) for path in tree.paths())})"
