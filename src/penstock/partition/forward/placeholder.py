"""Placeholders: stand-ins for tensors whose values are on other stages.

    h = self.wte(ids) + self.wpe(pos)      wte is a placeholder here: so is h, of h's shape
    mask = ones(h.shape[1])                needs the shape alone: the real mask
    if h.sum() > 0: ...                    needs the value: PartitionError, which names wte's output

Each stage runs the model's own forward, but holds only some of its modules. A placeholder has the
shape, dtype and device of the missing value, and every result computed from one is a placeholder
too. So the outcome is never a wrong number, only an error that names the missing value. A
placeholder carries its provenance: references to the values that it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils import swap_tensors

from penstock._torch_compat import (
    TorchDispatchMode,
    by_positions,
    is_data_dependent,
    is_random,
    is_shared,
    is_view,
    mutated_arguments,
    same_storage,
    version_of,
    without_torch_function,
    wrapper_subclass,
)
from penstock.errors import PartitionError
from penstock.stage.boundary import TensorMeta

__all__ = [
    "NeedsValue",
    "PlaceholderTensor",
    "Provenance",
    "TopLevelOps",
    "ValueKind",
    "ValueRef",
    "describe_refs",
    "leaves_of",
    "make_placeholder",
    "on_meta",
    "refs_of",
    "turn_into_placeholder",
]


class ValueKind(Enum):
    """The source of a value; the last three kinds never cross between stages."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"
    WRITE = "write"  # written by a leaf module into one of its arguments
    DRAW = "random draw"  # in the top-level forward
    STATE = "attribute"  # of a container module, as left by the previous microbatch


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A reference to a value in the forward.

    Args:
        kind: the kind of the value.
        call: of an output or write, the number of the leaf module's call; of a draw, the number of
            calls before it; else 0.
        leaf: of an input or output, the leaf of the tree; of a write, the argument; of a draw, its
            number; else 0.
        name: the name of the input, module or parameter.
    """

    kind: ValueKind
    call: int
    leaf: int
    name: str

    def __str__(self) -> str:
        """``output 0 of encoder.layer.3``."""
        if self.kind is ValueKind.OUTPUT:
            return f"output {self.leaf} of {self.name}"
        if self.kind is ValueKind.WRITE:
            return f"argument {self.leaf} as written by {self.name}"
        return f"{self.kind.value} {self.name}"


class Provenance:
    """References to the values that a placeholder and its views depend on.

    Args:
        refs: the references.

    Attributes:
        num_writes: the number of in-place writes to the placeholder or its views.
    """

    __slots__ = ("num_writes", "refs")

    def __init__(self, refs: set[ValueRef]) -> None:
        self.refs = refs
        self.num_writes = 0


class PlaceholderTensor(Tensor):
    """A tensor without a value.

    Args:
        body: the tensor that operations run on instead: a meta tensor or, if a model is traced on
            values, the value itself.
        device: the device that the placeholder reports.
        provenance: shared with its views, so that a write to one is recorded for all.
    """

    body: Tensor
    provenance: Provenance

    def __new__(
        cls, body: Tensor, device: torch.device, provenance: Provenance
    ) -> PlaceholderTensor:
        """Create a tensor with ``body``'s shape, dtype and strides."""
        made: PlaceholderTensor = wrapper_subclass(cls, body, device)
        return made

    def __init__(self, body: Tensor, device: torch.device, provenance: Provenance) -> None:
        self.body = body
        self.provenance = provenance

    @classmethod
    def of(cls, ref: ValueRef, body: Tensor, device: torch.device) -> PlaceholderTensor:
        """A placeholder for one value."""
        return cls(body, device, Provenance({ref}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and provenance."""
        origin = describe_refs(self.provenance.refs)
        return f"PlaceholderTensor({tuple(self.shape)}, {self.dtype}, from {origin})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; a tensor that receives placeholders in place becomes one itself."""
        kwargs = kwargs or {}
        try:
            return without_torch_function(func, args, kwargs)
        except _Overwrites as error:
            for leaf in leaves_of(args, kwargs)[0]:
                if type(leaf) is not PlaceholderTensor and error.writes(leaf):
                    error.targets = []  # only the caller may have references to it
                    error.__traceback__ = None
                    if not turn_into_placeholder(leaf, set(), keep_value=error.has_values):
                        raise error from None
            return without_torch_function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation with at least one placeholder argument."""
        return _dispatch(func, args, kwargs or {})


class NeedsValue(PartitionError):
    """The top-level forward needs a value that a placeholder's shape does not give."""

    def __init__(self, func: Any, refs: set[ValueRef]) -> None:
        super().__init__(
            f"the top-level forward needs the value of {describe_refs(refs)} ({func}), which is on "
            "another stage; move that code into a module, or cut at another boundary"
        )


class _Overwrites(PartitionError):
    """A placeholder is written into tensors with values."""

    def __init__(self, targets: list[Tensor], refs: set[ValueRef], has_values: bool) -> None:
        super().__init__(
            f"the top-level forward writes {describe_refs(refs)}, which is on another stage, into "
            "a part of a tensor of this one; compute a new tensor instead, or move that code into "
            "a module"
        )
        self.targets = targets
        self.has_values = has_values

    def writes(self, value: object) -> bool:
        """True for a tensor that shares memory with a target."""
        return isinstance(value, Tensor) and any(same_storage(value, t) for t in self.targets)


def turn_into_placeholder(tensor: Tensor, refs: set[ValueRef], *, keep_value: bool) -> bool:
    """Turn a tensor into a placeholder in place, for all its references.

    Args:
        tensor: the tensor.
        refs: the values that the tensor depends on.
        keep_value: True to keep the value as the placeholder's body.

    Returns:
        True on success; False, without any change, if other tensors share its memory, since they
        would not become placeholders.
    """
    made = PlaceholderTensor(on_meta(tensor), tensor.device, Provenance(refs))
    made.provenance.num_writes = version_of(tensor) + 1
    if is_view(tensor) or is_shared(tensor):
        return False
    swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    now: Any = tensor
    if keep_value:
        now.body = made  # after the swap, the tensor with the value
    return True


def make_placeholder(meta: TensorMeta, device: torch.device, ref: ValueRef) -> PlaceholderTensor:
    """A placeholder for the tensor that ``meta`` describes.

    If gradients are enabled, the placeholder requires grad. A backward that reaches it raises,
    since the gradient would be lost.
    """
    body = meta.unpack(torch.empty(meta.wire_shape, dtype=meta.dtype, device="meta"))
    if not (meta.dtype.is_floating_point and torch.is_grad_enabled()):
        return PlaceholderTensor.of(ref, body, device)
    made: PlaceholderTensor = _Guarded.apply(_anchor, body, device, ref)  # type: ignore[no-untyped-call]
    return made


# Requires grad, so that placeholders computed from it do too.
_anchor = torch.zeros(0, requires_grad=True)


class _Guarded(torch.autograd.Function):
    """Make placeholders that refuse gradients.

    No value is computed from a placeholder, but a custom autograd function may take one, ignore its
    value, and return a gradient for it.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, body: Tensor, device: torch.device, ref: ValueRef
    ) -> PlaceholderTensor:
        ctx.ref = ref
        return PlaceholderTensor.of(ref, body, device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise PartitionError(
            f"a gradient is computed for {ctx.ref} on a stage that does not have it: an autograd "
            "function in the top-level forward takes it without using its value; move that into "
            "a module"
        )


class TopLevelOps(TorchDispatchMode):
    """Turn random draws into placeholders, and record reads of values, within this mode.

    Args:
        calls: the calls of leaf modules up to now.

    Attributes:
        num_draws: the number of random draws.
        looks: the values that the forward read, each with the number of calls before it.
    """

    def __init__(self, calls: Sized) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self.num_draws = 0
        self.looks: list[tuple[int, set[ValueRef]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        given = [x for x in leaves_of(args, kwargs)[0] if type(x) is PlaceholderTensor]
        if given and is_data_dependent(func, args) and not any(x.body.is_meta for x in given):
            self.looks.append((len(self._calls), refs_of(given)))
        result = func(*args, **kwargs)
        if not is_random(func, args, kwargs):
            return result
        if any(type(x) is not PlaceholderTensor for x in mutated_arguments(func, args, kwargs)):
            raise PartitionError(
                f"the top-level forward draws random numbers into a tensor ({func}), and each "
                "stage would draw its own; use an nn.Dropout module there, or draw within a module"
            )
        ref = ValueRef(ValueKind.DRAW, len(self._calls), self.num_draws, str(func))
        self.num_draws += 1

        def drawn(leaf: Any) -> Any:
            if type(leaf) is PlaceholderTensor:
                leaf.provenance.refs.add(ref)
            elif isinstance(leaf, Tensor):
                return PlaceholderTensor.of(ref, leaf, leaf.device)
            return leaf

        return optree.tree_map(drawn, result, none_is_leaf=True)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def refs_of(leaves: Iterable[Any]) -> set[ValueRef]:
    """The provenance references of all placeholders among ``leaves``."""
    found: set[ValueRef] = set()
    for leaf in leaves:
        if type(leaf) is PlaceholderTensor:
            found |= leaf.provenance.refs
    return found


def leaves_of(args: tuple[Any, ...], kwargs: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of an operation's arguments."""
    given: Any = (args, kwargs)
    return optree.tree_flatten(given, none_is_leaf=True)


def describe_refs(refs: Iterable[ValueRef]) -> str:
    """Name the values, for messages."""
    names = sorted(map(str, refs))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, tree = leaves_of(args, kwargs)
    placeholders = [leaf for leaf in leaves if type(leaf) is PlaceholderTensor]
    refs = refs_of(placeholders)
    valueless = any(each.body.is_meta for each in placeholders)
    by_place = by_positions(func, args, _has_value) if valueless else args
    if by_place is not args:
        args = by_place
        leaves, tree = leaves_of(args, kwargs)
    if valueless and is_data_dependent(func, args):
        raise NeedsValue(func, refs)
    device = torch.device(kwargs.get("device") or placeholders[0].device)
    written = mutated_arguments(func, args, kwargs)
    real = [target for target in written if type(target) is not PlaceholderTensor]
    if real:
        raise _Overwrites(real, refs, not valueless)
    for target in written:
        target.provenance.refs |= refs
        target.provenance.num_writes += 1
    lowered: Any = optree.tree_unflatten(tree, [_body(leaf, valueless) for leaf in leaves])
    inner_args, inner_kwargs = lowered
    if valueless and inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("meta")
    result = func(*inner_args, **inner_kwargs)
    by_body = {id(each.body): each for each in placeholders}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in by_body:  # an in-place operation returns its argument
            return by_body[id(leaf)]
        base = next((each for each in placeholders if same_storage(each.body, leaf)), None)
        provenance = Provenance(refs) if base is None else base.provenance
        return PlaceholderTensor(leaf, device, provenance)

    return optree.tree_map(wrap, result, none_is_leaf=True)


def _has_value(tensor: Tensor) -> bool:
    return type(tensor) is not PlaceholderTensor and not tensor.is_meta


def _body(leaf: Any, valueless: bool) -> Any:
    if type(leaf) is PlaceholderTensor:
        leaf = leaf.body
    return on_meta(leaf) if valueless and isinstance(leaf, Tensor) and not leaf.is_meta else leaf
