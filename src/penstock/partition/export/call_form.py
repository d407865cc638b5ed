"""How a model is called: which arguments are tensors, which are fixed, and what shapes they had.

    forward(ids, *, mask=None, scale=1.0)      called as (ids, mask=m, scale=2.0)
    leaves      ids: (4, 8) int64              found again in any call that means the same:
                mask: (4, 8) int64             (ids=ids, mask=m, scale=2.0)
    fixed       scale = 2.0                    held to; a graph has it built in

It knows neither graphs nor stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor, nn

from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.module_state import hidden_tensors_message, hides_tensors
from penstock.stage.pytree import flatten, unflatten

__all__ = ["CallForm", "ShapeCheck"]

# Given the leaves' tensors, what is wrong with their shapes, or None.
ShapeCheck = Callable[[Sequence[Tensor]], str | None]


class CallForm:
    """The form of one example call of a model.

    Args:
        model: the model.
        args: positional arguments of the example.
        kwargs: its keyword arguments.

    Attributes:
        names: the names of the tensors among the arguments, such as ``"batch.mask"``.
        examples: these tensors.

    Raises:
        PartitionError: the model can't be called so.
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
        paths = [".".join(str(part) for part in path) for path in self._tree.paths()]
        self._paths = paths
        self._tensor_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._fixed = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        for i, leaf in self._fixed.items():
            if hides_tensors(leaf):
                raise PartitionError(hidden_tensors_message(paths[i], leaf))
        self.names = tuple(paths[i] for i in self._tensor_slots)
        self.examples: tuple[Tensor, ...] = _distinct([leaves[i] for i in self._tensor_slots])
        self._dtypes = tuple(t.dtype for t in self.examples)
        self._place_in_example = self._places()
        self._checks: list[ShapeCheck] = []
        self._known_good: set[tuple[Any, ...]] = set()

    def _canonical(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, whichever way they were passed; defaults left out."""
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
        """For each tensor, its place among the leaves of the example as it was passed."""
        # One tensor may be passed twice (as ids and as labels, say): places stand in for tensors.
        leaves, tree = flatten((self._args, self._kwargs))
        places = [_Place(i) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
        args, kwargs = unflatten(tree, places)
        found, _ = flatten(self._canonical(args, kwargs))
        return [place.index for place in found if isinstance(place, _Place)]

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call with other tensors."""
        leaves, tree = flatten((self._args, self._kwargs))
        for place, tensor in zip(self._place_in_example, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten(tree, leaves)
        return args, kwargs

    def argument_names(self) -> tuple[list[str], list[str]]:
        """Names for the arguments that the example passes by position, and by keyword."""
        parameters = self._signature.parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p.name for p in parameters if p.kind in by_position]
        extra = [f"argument_{i}" for i in range(len(positional), len(self._args))]
        return [*positional, *extra][: len(self._args)], list(self._kwargs)

    def forget_example(self) -> None:
        """Let go of the example's tensors, once the model is captured."""
        self.examples = ()
        self._args, self._kwargs = (), {}

    def add_check(self, check: ShapeCheck) -> None:
        """Hold the tensors of every call to ``check`` too."""
        self._checks.append(check)
        self._known_good.clear()

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of ``names``.

        Raises:
            BoundaryError: the call differs from the example in more than its tensors' values, or
                in shapes that were not left open.
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
        self._check_tensors(tensors)
        return tensors

    def _check_tensors(self, tensors: Sequence[Any]) -> None:
        for name, tensor, dtype in zip(self.names, tensors, self._dtypes, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
                shown = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
                raise BoundaryError(
                    f"input {name} is {shown}, but the model was captured with a tensor of {dtype}"
                )
        key = tuple(t.shape for t in tensors)
        if key in self._known_good:
            return
        for check in self._checks:
            told = check(tensors)
            if told is not None:
                raise BoundaryError(told)
        self._known_good.add(key)


def _distinct(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, each an object of its own: a tracer takes one that comes twice for one input."""
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        apart.append(tensor.detach().clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(apart)


class _Place:
    """Stands for a tensor of the example."""

    def __init__(self, index: int) -> None:
        self.index = index


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return isinstance(value, (bool, int, float, str)) and (type(value), value) == (
        type(default),
        default,
    )


def _names(tree: optree.PyTreeSpec) -> str:
    return f"({', '.join('.'.join(map(str, path)) for path in tree.paths())})"
