"""Placeholders: stand-ins for tensors whose values are on other stages.

    h = self.wte(ids) + self.wpe(pos)      wte is a placeholder here: so is h, of h's shape
    mask = ones(h.shape[1])                needs the shape alone: the real mask
    if h.sum() > 0: ...                    needs the value: PartitionError, which names wte's output

A placeholder has the shape, dtype and device of the missing value; results computed from one are
placeholders too. Each carries its provenance: references to the values that it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils.weak import WeakIdKeyDictionary

from penstock._torch_compat import (
    TorchDispatchMode,
    by_positions,
    in_backward,
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
from penstock.partition.plan import abbreviate
from penstock.stage.boundary import TensorMeta

__all__ = [
    "ForeignParameters", "NeedsValue", "PlaceholderTensor", "Provenance", "TopLevelOps",
    "ValueKind", "ValueRef", "describe_refs", "has_value", "make_placeholder", "on_meta", "refs_of",
    "turn_into_placeholder", "with_values",
]  # fmt: skip

# Reads of values in a trace; more are taken for a loop that made-up values never end.
MOST_READS = 1000


class ValueKind(StrEnum):
    """The source of a value; the last three kinds never cross between stages."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"
    WRITE = "write"  # written by a leaf module into one of its arguments
    DRAW = "random draw"  # in the top-level forward
    STATE = "attribute"  # of a container module, as left by the previous microbatch


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A reference to a value in the forward."""

    kind: ValueKind
    call: int  # of an output or write; of a draw, the number of calls before it; else 0
    leaf: int  # of an input or output; of a write, the argument; of a draw, its number; else 0
    name: str  # of the input, module or parameter

    def __str__(self) -> str:
        """``output 0 of encoder.layer.3``."""
        if self.kind is ValueKind.OUTPUT:
            return f"output {self.leaf} of {self.name}"
        if self.kind is ValueKind.WRITE:
            return f"argument {self.leaf} as written by {self.name}"
        return f"{self.kind} {self.name}"


@dataclass(slots=True, eq=False)
class Provenance:
    """The values that a placeholder and its views depend on, and the in-place writes to them."""

    refs: set[ValueRef]
    num_writes: int = 0


class PlaceholderTensor(Tensor):
    """A tensor without a value.

    Args:
        body: the meta tensor that operations run on instead.
        device: the device that the placeholder reports.
        provenance: shared with its views.
    """

    body: Tensor
    provenance: Provenance

    def __new__(
        cls, body: Tensor, device: torch.device, provenance: Provenance
    ) -> PlaceholderTensor:
        made: PlaceholderTensor = wrapper_subclass(cls, body, device)
        made.body, made.provenance = body, provenance
        return made

    @classmethod
    def of(cls, body: Tensor, device: torch.device, *refs: ValueRef) -> PlaceholderTensor:
        """A placeholder for the values of ``refs``."""
        return cls(body, device, Provenance(set(refs)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        origin = describe_refs(self.provenance.refs)
        return f"PlaceholderTensor({tuple(self.shape)}, {self.dtype}, from {origin})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; a tensor that receives placeholders in place becomes one itself."""
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is Tensor.data and func.__name__ == "__set__":
            raise PartitionError(
                "the top-level forward assigns to the .data of a tensor, which other stages would "
                "not see; write into it (copy_), or move that code into a module"
            )
        try:
            return without_torch_function(func, args, kwargs)
        except _Overwrites as error:
            for leaf in _leaves_of(args, kwargs)[0]:
                if isinstance(leaf, Tensor) and any(same_storage(leaf, t) for t in error.targets):
                    error.targets = []  # only the caller may have references to it
                    error.__traceback__ = None
                    if not turn_into_placeholder(leaf, set()):
                        raise error from None
            return without_torch_function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation with at least one placeholder argument."""
        kwargs = kwargs or {}
        args = by_positions(func, args, has_value)
        leaves, tree = _leaves_of(args, kwargs)
        placeholders = [leaf for leaf in leaves if type(leaf) is cls]
        refs = refs_of(placeholders)
        if in_backward():
            raise PartitionError(
                f"a checkpoint computes with {describe_refs(refs)}, which is on another stage, "
                "again in the backward; move that code into a module, or leave the checkpoint out"
            )
        if is_data_dependent(func, args):
            raise NeedsValue(func, refs)
        device = torch.device(kwargs.get("device") or placeholders[0].device)
        written = mutated_arguments(func, args, kwargs)
        real = [target for target in written if type(target) is not cls]
        if real:
            raise _Overwrites(real, refs)
        for target in written:
            target.provenance.refs |= refs
            target.provenance.num_writes += 1
        if not (written or func.is_view):  # new tensors
            known = _meta_result(func, tree, (torch.get_default_dtype(), *map(_form_of, leaves)))
            result = optree.tree_map(on_meta, known, none_is_leaf=True)
        else:
            lowered: Any = optree.tree_unflatten(tree, [_body(leaf) for leaf in leaves])
            result = func(*lowered[0], **lowered[1])
        by_body = {id(each.body): each for each in placeholders}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in by_body:  # an in-place operation returns its argument
                return by_body[id(leaf)]
            base = next((each for each in placeholders if same_storage(each.body, leaf)), None)
            return cls(leaf, device, Provenance(refs) if base is None else base.provenance)

        return optree.tree_map(wrap, result, none_is_leaf=True)


class NeedsValue(PartitionError):
    """The top-level forward needs a value that a placeholder's shape does not give."""

    def __init__(self, func: Any, refs: set[ValueRef]) -> None:
        super().__init__(
            f"the top-level forward needs the value of {describe_refs(refs)} ({func}), which is on "
            "another stage; move that code into a module, or cut at another boundary"
        )
        self.refs = refs


class _Overwrites(PartitionError):
    """A placeholder is written into tensors with values."""

    def __init__(self, targets: list[Tensor], refs: set[ValueRef]) -> None:
        super().__init__(
            f"the top-level forward writes {describe_refs(refs)}, which is on another stage, into "
            "a part of a tensor of this one; compute a new tensor instead, or move that code into "
            "a module"
        )
        self.targets = targets


def turn_into_placeholder(tensor: Tensor, refs: set[ValueRef]) -> bool:
    """Turn a tensor into a placeholder in place, for all its references.

    False, without any change, if other tensors share its memory, which would stay as they are.
    """
    if is_view(tensor) or is_shared(tensor):
        return False
    provenance = Provenance(refs, version_of(tensor) + 1)
    made = PlaceholderTensor(on_meta(tensor), tensor.device, provenance)
    swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    return True


def make_placeholder(meta: TensorMeta, device: torch.device, ref: ValueRef) -> Tensor:
    """A placeholder for the tensor that ``meta`` describes.

    If gradients are enabled, it requires grad, and a backward that reaches it raises.
    """
    body = meta.unpack(torch.empty(meta.wire_shape, dtype=meta.dtype, device="meta"))
    made = PlaceholderTensor.of(body, device, ref)
    if not (meta.dtype.is_floating_point and torch.is_grad_enabled()):
        return made

    def refuse(grad: Tensor) -> None:
        raise PartitionError(
            f"a gradient is computed for {ref} on a stage that does not have it: an autograd "
            "function in the top-level forward takes it without using its value; move that into "
            "a module"
        )

    made.requires_grad_().register_hook(refuse)  # type: ignore[no-untyped-call]
    return made.clone()  # no leaf of the graph, which could not be written in place


class ForeignParameters(TorchDispatchMode):
    """Refuse the model's parameters where a trace meets them themselves, not their placeholders.

    A list or a closure leads to them; another stage would use a copy, which would not train.
    """

    running = ""  # the leaf module that runs, whose own parameters may be used by any way

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = WeakIdKeyDictionary()
        for name, param in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(param, []).append(name)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        for leaf in _leaves_of(args, kwargs or {})[0]:
            names = self._names.get(leaf, ()) if isinstance(leaf, nn.Parameter) else ()  # type: ignore[no-untyped-call]
            if names and not any(name.startswith(f"{self.running}.") for name in names):
                raise PartitionError(
                    f"{self.running or 'the top-level forward'} reaches {names[0]} by a list, a "
                    "closure or a partial, so that it would not train on another stage; register "
                    "the parameter, or its module, where it is used"
                )
        return func(*args, **(kwargs or {}))


class TopLevelOps(TorchDispatchMode):
    """Trace the top-level forward: random draws are placeholders, reads of values are recorded.

    Attributes:
        num_draws: the number of random draws.
        reads: the errors of the operations that read values; they run on made-up ones.
    """

    def __init__(self, calls: Sized) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self.num_draws = self._num_reads = 0
        self.reads: list[NeedsValue] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the mode, the innermost one, within this block."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except NeedsValue as error:
            return self._read(error, func, args, kwargs)
        if not is_random(func, args, kwargs):
            return result
        if any(type(x) is not PlaceholderTensor for x in mutated_arguments(func, args, kwargs)):
            raise PartitionError(
                f"the top-level forward draws random numbers into a tensor ({func}), and each "
                "stage would draw its own; use an nn.Dropout module there, or draw within a module"
            )
        ref = ValueRef(ValueKind.DRAW, len(self._calls), self.num_draws, str(func))
        self.num_draws += 1
        return _marked(result, {ref})

    def _read(self, error: NeedsValue, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The result on made-up values: only the last stage may read values, behind all calls.

        A draw may be read anywhere: as a layer's chance to be dropped, which is zero.
        """
        if any(ref.kind is not ValueKind.DRAW for ref in error.refs):
            self.reads.append(error)
        self._num_reads += 1
        if self._num_reads > MOST_READS:
            raise error
        leaves, tree = _leaves_of(args, kwargs)
        device = next(leaf.device for leaf in leaves if type(leaf) is PlaceholderTensor)
        given: Any = optree.tree_unflatten(tree, [with_values(leaf, device) for leaf in leaves])
        return _marked(func(*given[0], **given[1]), error.refs)


def _marked(result: Any, refs: set[ValueRef]) -> Any:
    """An operation's result as placeholders that depend on ``refs`` too."""

    def mark(leaf: Any) -> Any:
        if type(leaf) is PlaceholderTensor:
            leaf.provenance.refs |= refs
        elif isinstance(leaf, Tensor):
            return PlaceholderTensor.of(on_meta(leaf), leaf.device, *refs)
        return leaf

    return optree.tree_map(mark, result, none_is_leaf=True)


def with_values(leaf: Any, device: torch.device) -> Any:
    """A copy of a tensor with values: its own or, of a placeholder or on the meta device, small
    numbers, the same on each rank; integers without values become zeros."""
    if not isinstance(leaf, Tensor):
        return leaf
    if has_value(leaf):
        return leaf.detach().to(device, copy=True)
    made = torch.zeros_like(_body(leaf), device=device)
    if made.is_floating_point():
        made.copy_(torch.linspace(-0.02, 0.02, made.numel(), device=device).view(made.shape))
    return made


def on_meta(tensor: Any) -> Any:
    """A tensor of the same shape, strides and dtype on the meta device; other values themselves."""
    if not isinstance(tensor, Tensor):
        return tensor
    if type(tensor) is PlaceholderTensor:
        tensor = tensor.body  # an in-place transpose, as of recurrent layers, changes it alone
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _form_of(leaf: Any) -> tuple[Any, Any]:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    body = leaf.body if type(leaf) is PlaceholderTensor else leaf
    return (body.shape, body.stride()), body.dtype


@lru_cache(maxsize=4096)
def _meta_result(func: Any, tree: optree.PyTreeSpec, forms: tuple[Any, ...]) -> Any:
    """An operation's result on meta tensors, given the default dtype and their forms; kept, since
    layers alike run the same operations, and torch takes 0.2 ms for many of them."""
    make = partial(torch.empty_strided, device="meta")
    given = [x if isinstance(form, type) else make(*form, dtype=x) for form, x in forms[1:]]
    lowered: Any = optree.tree_unflatten(tree, given)
    args, kwargs = lowered
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    return func(*args, **kwargs)


def refs_of(leaves: Iterable[Any]) -> set[ValueRef]:
    """The provenance references of all placeholders among ``leaves``."""
    found = (leaf.provenance.refs for leaf in leaves if type(leaf) is PlaceholderTensor)
    return set().union(*found)


def describe_refs(refs: Iterable[ValueRef]) -> str:
    """Name the values, for messages."""
    return abbreviate(sorted(map(str, refs)), most=4)


def _leaves_of(args: tuple[Any, ...], kwargs: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    given: Any = (args, kwargs)
    return optree.tree_flatten(given, none_is_leaf=True)


def has_value(tensor: Tensor) -> bool:
    """False for a placeholder, and for a tensor on the meta device."""
    return type(tensor) is not PlaceholderTensor and not tensor.is_meta


def _body(leaf: Any) -> Any:
    if type(leaf) is PlaceholderTensor:
        return leaf.body
    return on_meta(leaf) if isinstance(leaf, Tensor) and has_value(leaf) else leaf
