"""Absent: stands for a tensor whose value is on another stage.

    h = self.wte(ids) + self.wpe(pos)      wte absent here: h is absent too, of h's shape
    mask = ones(h.shape[1])                needs the shape alone: the real mask
    if h.sum() > 0: ...                    needs the value: PartitionError, which names wte's output

A stage runs the model's own code, of which it holds a part. What the rest would have computed is
absent: right in shape, dtype and device, without a value, and every result of it is absent too.
So a wrong number can't come about; what can is an error that names the value. An absent tensor
remembers its sources, the values that it would have been computed from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils import swap_tensors

from penstock._torch_compat import (
    by_positions,
    is_data_dependent,
    is_random,
    is_shared,
    mutated_arguments,
    same_storage,
    without_torch_function,
    wrapper_subclass,
)
from penstock.errors import PartitionError

__all__ = [
    "Absent",
    "LooksAtValue",
    "Origin",
    "Source",
    "SourceKind",
    "draws",
    "named",
    "on_meta",
    "sources_of",
    "told_of_looks",
    "turn_absent",
]


# Numbers random draws apart.
draws = itertools.count()

# Told of what the code between the parts looks at, where a model is run dry on values.
told_of_looks: list[Callable[[set[Source]], None]] = []


class SourceKind(Enum):
    """Where a value comes from."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"
    WRITTEN = "what is written"
    DRAW = "random draw"


@dataclass(frozen=True, slots=True, order=False)
class Source:
    """A value that can cross between stages.

    Args:
        kind: an input of the model, an output of one of its modules, a parameter, or what never
            crosses: what a module wrote into a tensor that it was given, and random numbers that
            were drawn between the modules.
        call: of an output or what was written, which call of a module in the order in which they
            run; of a draw, its number; else 0.
        leaf: of an input or output, which leaf of the tree, and of what was written, which
            argument; else 0.
        name: the name of the input, module or parameter, as users know it.
    """

    kind: SourceKind
    call: int
    leaf: int
    name: str

    def __str__(self) -> str:
        """``output 0 of encoder.layer.3``."""
        if self.kind is SourceKind.OUTPUT:
            return f"output {self.leaf} of {self.name}"
        if self.kind is SourceKind.WRITTEN:
            return f"what {self.name} writes into argument {self.leaf}"
        return f"{self.kind.value} {self.name}"


class Origin:
    """Where an absent tensor, and all that share its memory, comes from.

    Args:
        sources: the values that it would have been computed from.

    Attributes:
        written: whether somebody wrote into it after it was made.
    """

    __slots__ = ("sources", "written")

    def __init__(self, sources: set[Source]) -> None:
        self.sources = sources
        self.written = False


class Absent(Tensor):
    """A tensor without a value.

    Args:
        body: what stands in for it when operations run: a tensor on the meta device, or, while
            a model is run dry on values, the value itself.
        device: where it claims to be.
        origin: what it would have been computed from. Views share one, so that what is written
            into one is known of all.
    """

    body: Tensor
    origin: Origin

    def __new__(cls, body: Tensor, device: torch.device, origin: Origin) -> Absent:
        """Make the tensor that claims ``body``'s shape, dtype and strides."""
        made: Absent = wrapper_subclass(cls, body, device)
        return made

    def __init__(self, body: Tensor, device: torch.device, origin: Origin) -> None:
        self.body = body
        self.origin = origin

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and what it comes from."""
        return f"Absent({tuple(self.shape)}, {self.dtype}, from {named(self.origin.sources)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; a tensor that it writes absent values into becomes absent itself."""
        kwargs = kwargs or {}
        try:
            return without_torch_function(func, args, kwargs)
        except Overwritten as error:
            for leaf in leaves_of(args, kwargs)[0]:
                if type(leaf) is not Absent and isinstance(leaf, Tensor) and error.writes(leaf):
                    error.targets = []  # nobody but the caller shall refer to it
                    error.__traceback__ = None
                    if not turn_absent(leaf, set(), error.on_meta):
                        raise error from None
            return without_torch_function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of which at least one argument is absent."""
        return _run(func, args, kwargs or {})


class LooksAtValue(PartitionError):
    """The code between the parts computes what an absent value's shape does not tell."""

    def __init__(self, func: Any, sources: set[Source]) -> None:
        super().__init__(
            f"the code between the model's parts needs the value of {named(sources)} ({func}), "
            "which is on another stage; cut elsewhere, or move that code into a module"
        )


class Overwritten(PartitionError):
    """An absent value is written into tensors that are here."""

    def __init__(self, targets: list[Tensor], sources: set[Source], on_meta: bool) -> None:
        super().__init__(
            f"the code between the model's parts writes {named(sources)}, which is on another "
            "stage, into a part of a tensor of this one; compute the tensor anew instead of "
            "writing into it, or move that code into a module"
        )
        self.targets = targets
        self.sources = sources
        self.on_meta = on_meta

    def writes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with what is written into."""
        return any(same_storage(tensor, target) for target in self.targets)


def turn_absent(tensor: Tensor, sources: set[Source], without_value: bool) -> bool:
    """Make a tensor that is here absent, for whoever refers to it.

    Args:
        tensor: the tensor.
        sources: what it is computed from.
        without_value: whether its value is let go of; else it becomes the body.

    Returns:
        False if others share its memory, and would not notice: then nothing is done.
    """
    absent = Absent(on_meta(tensor), tensor.device, Origin(sources))
    if tensor._is_view() or is_shared(tensor):
        return False
    swap_tensors(tensor, absent)  # type: ignore[no-untyped-call]
    now: Any = tensor
    if not without_value:
        now.body = absent  # which is the tensor that was here
    return True


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def sources_of(leaves: Iterable[Any]) -> set[Source]:
    """All sources of the absent tensors among ``leaves``."""
    found: set[Source] = set()
    for leaf in leaves:
        if type(leaf) is Absent:
            found |= leaf.origin.sources
    return found


def leaves_of(args: tuple[Any, ...], kwargs: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of an operation's arguments."""
    given: Any = (args, kwargs)
    return optree.tree_flatten(given, none_is_leaf=True)


def named(sources: Iterable[Source]) -> str:
    """The sources by name, for messages."""
    names = sorted(str(source) for source in sources)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, tree = leaves_of(args, kwargs)
    absent = [leaf for leaf in leaves if type(leaf) is Absent]
    sources = sources_of(absent)
    valueless = any(each.body.is_meta for each in absent)
    by_place = by_positions(func, args, _has_value) if valueless else args
    if by_place is not args:
        args = by_place
        leaves, tree = leaves_of(args, kwargs)
    if is_data_dependent(func, args):
        if valueless:
            raise LooksAtValue(func, sources)
        for tell in told_of_looks:
            tell(sources)
    device = kwargs.get("device") or absent[0].device
    if is_random(func, args, kwargs):
        sources.add(Source(SourceKind.DRAW, next(draws), 0, str(func)))
    written = mutated_arguments(func, args, kwargs)
    here = [target for target in written if type(target) is not Absent]
    if here:
        raise Overwritten(here, sources, valueless)
    for target in written:
        target.origin.sources |= sources
        target.origin.written = True
    lowered: Any = optree.tree_unflatten(tree, [_inner(leaf, valueless) for leaf in leaves])
    inner_args, inner_kwargs = lowered
    if valueless and inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("meta")
    result = func(*inner_args, **inner_kwargs)
    by_body = {id(each.body): each for each in absent}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in by_body:  # an operation in place gives back what it was given
            return by_body[id(leaf)]
        base = next((each for each in absent if same_storage(each.body, leaf)), None)
        origin = Origin(sources) if base is None else base.origin
        return Absent(leaf, torch.device(device), origin)

    return optree.tree_map(wrap, result, none_is_leaf=True)


def _has_value(tensor: Tensor) -> bool:
    return type(tensor) is not Absent and not tensor.is_meta


def _inner(leaf: Any, valueless: bool) -> Any:
    if type(leaf) is Absent:
        leaf = leaf.body
    return on_meta(leaf) if valueless and isinstance(leaf, Tensor) and not leaf.is_meta else leaf
