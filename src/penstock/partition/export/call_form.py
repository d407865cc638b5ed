"""The form of a captured call: tensor arguments, fixed arguments, and the output's tree.

    forward(ids, *, mask=None, scale=1.0)      called as (ids, mask=m, scale=2.0)
    leaves      ids: (4, 8) int64              found again in any call that means the same:
                mask: (4, 8) int64             (ids=ids, mask=m, scale=2.0)
    fixed       scale = 2.0                    built into the graph; other values are refused

This module knows neither graphs nor stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.module_state import hidden_tensors_message, hides_tensors
from penstock.partition.spec import own_loss
from penstock.stage.pytree import flatten, is_plain, unflatten

__all__ = ["CallForm", "OutputForm", "ShapeCheck"]

# Given the leaves' tensors, returns the error message for their shapes, or None.
ShapeCheck = Callable[[Sequence[Tensor]], str | None]


class CallForm:
    """The form of one example call of a model.

    Args:
        model: the model.
        args: positional arguments of the example.
        kwargs: its keyword arguments.

    Attributes:
        names: the names of the tensors among the arguments, such as ``"batch.mask"``.
        examples: the tensors of the example.
        output: the form of the output in the last capture.

    Raises:
        PartitionError: the arguments do not fit the model's forward.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        self._signature = inspect.signature(model.forward)
        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        try:
            canonical = self._canonical(self._args, self._kwargs)
        except TypeError as error:
            raise PartitionError(
                f"the example does not fit {type(model).__name__}.forward{self._signature}: {error}"
            ) from error
        leaves, self._tree = flatten(canonical)
        self._paths = [".".join(map(str, path)) for path in self._tree.paths()]
        self._tensor_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._fixed = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        for i, leaf in self._fixed.items():
            if hides_tensors(leaf):
                raise PartitionError(hidden_tensors_message(self._paths[i], leaf))
        self.names = tuple(self._paths[i] for i in self._tensor_slots)
        self.examples: tuple[Tensor, ...] = _distinct([leaves[i] for i in self._tensor_slots])
        self._dtypes = tuple(t.dtype for t in self.examples)
        self._place_in_example = self._places()
        self.output: OutputForm | None = None
        self._checks: list[ShapeCheck] = []
        self._checked_shapes: set[tuple[Any, ...]] = set()

    def _canonical(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, in canonical order, without defaults."""
        bound = self._signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            parameter = self._signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update({k: v for k, v in value.items() if v is not None})
            elif not _is_default(value, parameter.default):
                named[name] = value
        return named

    def _places(self) -> list[int]:
        """The position of each tensor among the leaves of the example."""
        # One tensor may be passed twice (as ids and as labels), so numbered objects stand in.
        leaves, tree = flatten((self._args, self._kwargs))
        places = [_Place(i) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
        args, kwargs = unflatten(tree, places)
        found, _ = flatten(self._canonical(args, kwargs))
        return [place.index for place in found if isinstance(place, _Place)]

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call with other tensors in place of its own."""
        leaves, tree = flatten((self._args, self._kwargs))
        for place, tensor in zip(self._place_in_example, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten(tree, leaves)
        return args, kwargs

    def argument_names(self) -> tuple[list[str], list[str]]:
        """Names for the example's positional and keyword arguments."""
        parameters = self._signature.parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p.name for p in parameters if p.kind in by_position]
        extra = [f"argument_{i}" for i in range(len(positional), len(self._args))]
        return [*positional, *extra][: len(self._args)], list(self._kwargs)

    def forget_example(self) -> None:
        """Release the example's tensors after the capture."""
        self.examples = ()
        self._args, self._kwargs = (), {}

    def add_check(self, check: ShapeCheck) -> None:
        """Apply ``check`` to the tensors of every call."""
        self._checks.append(check)
        self._checked_shapes.clear()

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of ``names``.

        Raises:
            BoundaryError: the call differs from the example in more than the values of tensors
                and open sizes.
        """
        try:
            canonical = self._canonical(args, kwargs)
        except TypeError as error:
            raise BoundaryError(
                f"the inputs do not fit forward{self._signature}: {error}"
            ) from error
        leaves, tree = flatten(canonical)
        if tree != self._tree:
            raise BoundaryError(
                f"the inputs are {_names(tree)}, but the model was captured with "
                f"{_names(self._tree)}; pass the same arguments, or capture it with an example "
                "like these"
            )
        for i, expected in self._fixed.items():
            if type(leaves[i]) is not type(expected) or leaves[i] != expected:
                raise BoundaryError(
                    f"argument {self._paths[i]} is {leaves[i]!r}, but the model was captured with "
                    f"{expected!r}, which is built into its graph; pass a tensor, or capture again"
                )
        tensors = [leaves[i] for i in self._tensor_slots]
        for name, tensor, dtype in zip(self.names, tensors, self._dtypes, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
                shown = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
                raise BoundaryError(
                    f"input {name} is {shown}, but the model was captured with a tensor of {dtype}"
                )
        shapes = tuple(t.shape for t in tensors)
        if shapes not in self._checked_shapes:
            message = next(filter(None, (check(tensors) for check in self._checks)), None)
            if message is not None:
                raise BoundaryError(message)
            self._checked_shapes.add(shapes)
        return tensors


class OutputForm:
    """The tree of a model's output, around the values that its graph computes.

    Args:
        output: the model's output during the capture.

    Attributes:
        dropped: the types of leaves that no stage can send (such as caches); None replaces them.
        has_loss: True if the model computes its loss itself: a scalar, called ``loss``.
    """

    def __init__(self, output: Any) -> None:
        leaves, self._tree = flatten(output)
        self._slots = [i for i, leaf in enumerate(leaves) if _is_computed(leaf)]
        self._computed = [leaves[i] for i in self._slots]
        self._leaves = [leaf if is_plain(leaf) else None for leaf in leaves]
        opaque = {
            type(leaf).__qualname__
            for leaf in leaves
            if not is_plain(leaf) and not _is_computed(leaf)
        }
        self.dropped = tuple(sorted(opaque))
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


def _distinct(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as distinct objects, since a tracer merges repeated tensors into one input."""
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        apart.append(tensor.detach().clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(apart)


class _Place:
    """A stand-in for a tensor of the example."""

    def __init__(self, index: int) -> None:
        self.index = index


def _is_default(value: Any, default: Any) -> bool:
    plain = isinstance(value, (bool, int, float, str))
    return value is default or (plain and type(value) is type(default) and bool(value == default))


def _names(tree: optree.PyTreeSpec) -> str:
    return f"({', '.join('.'.join(map(str, path)) for path in tree.paths())})"
