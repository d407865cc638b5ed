"""Pytrees: containers flattened into leaves, unflattened, and described as JSON.

container                                 opened
tuple, list, dict, named tuple, …         as optree opens them
classes registered with torch's pytree    as registered
dataclasses                               by their fields; others of tensors are refused
other mappings of tensors (UserDict)      refused
all else                                  not opened: a leaf
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import Tensor, nn

from penstock._torch_compat import pytree_node
from penstock.errors import BoundaryError

__all__ = ["NAMESPACE", "Args", "Kwargs", "Plain", "as_args", "decode", "encode", "flatten"]
__all__ += ["is_plain", "map_tensors", "same_value", "tensors_of", "unflatten"]

# The arguments of a call.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
# The classes of most leaves: no containers, whatever is registered.
_LEAF_CLASSES = frozenset((Tensor, nn.Parameter, bool, int, float, str))
# The optree namespace in which containers are registered when they are first met.
NAMESPACE = "penstock"


def as_args(output: Any) -> tuple[Any, ...]:
    """A stage's output as the positional arguments of the next stage."""
    # Named tuples, torch.return_types and torch.Size are tuples too, but count as one argument.
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


def flatten(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a pytree; ``is_leaf`` says which containers stay closed."""
    leaves, tree = optree.tree_flatten(value, is_leaf, namespace=NAMESPACE)
    classes = set(map(type, leaves)) - _LEAF_CLASSES
    new = [cls for cls in classes - _registered if _is_container(cls)]
    if not new:
        if any(issubclass(cls, Mapping) for cls in classes):
            _refuse_mappings(leaves)
        return leaves, tree
    for cls in new:
        _register(cls)
    return flatten(value, is_leaf)


def unflatten(tree: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The pytree of this structure around these leaves."""
    return optree.tree_unflatten(tree, leaves)


def leaves_in_order(value: Any) -> list[Any]:
    """The leaves, None included, in torch's order: dicts by insertion, not by key."""
    flatten(value)  # registers classes
    with optree.dict_insertion_ordered(True, namespace=NAMESPACE):
        return optree.tree_leaves(value, none_is_leaf=True, namespace=NAMESPACE)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a pytree."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A pytree like ``value`` with ``change(tensor)`` in place of each tensor."""
    leaves, tree = flatten(value)
    return unflatten(tree, [change(x) if isinstance(x, Tensor) else x for x in leaves])


def same_value(left: Any, right: Any) -> bool:
    """True if two values are equal; False if they can't be compared."""
    if left is right:
        return True
    try:
        if isinstance(left, Tensor):
            return isinstance(right, Tensor) and torch.equal(left, right)
        return bool(left == right)
    except (ValueError, TypeError, RuntimeError):  # such as arrays, compared element by element
        return False


# --- plain values --------------------------------------------------------------------------------

# A leaf that is no tensor: a number, a string, a dtype, a device. None is structure, no leaf.
Plain: TypeAlias = Any

_IN_JSON = (bool, int, float, str)
# Class → its value as a JSON value, and back.
_CODECS: dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: (str, complex),
    bytes: (bytes.hex, bytes.fromhex),
    torch.dtype: (lambda dtype: str(dtype).removeprefix("torch."), lambda x: getattr(torch, x)),
    torch.device: (str, torch.device),
    torch.Size: (list, torch.Size),
}


def is_plain(value: object) -> bool:
    """True if a leaf that is no tensor can be sent; subclasses, such as NumPy's floats, can't."""
    return type(value) in _IN_JSON or type(value) in _CODECS


# --- containers ----------------------------------------------------------------------------------

# Opens a container: children, context, and the children's names in paths (None: their indices).
_Open: TypeAlias = Callable[[Any], tuple[Sequence[Any], Any, Any]]
# Makes a container of children and context.
_Make: TypeAlias = Callable[[Sequence[Any], Any], Any]

_registered: set[type[Any]] = set()
# Its type wants a Collection; optree takes any class.
_register_node: Any = optree.register_pytree_node


@dataclasses.dataclass(eq=False, slots=True)
class _Context:
    """The part of a container that is no child, compared by value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Context) or type(self.value) is not type(other.value):
            return False
        return same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _is_container(cls: type[Any]) -> bool:
    return dataclasses.is_dataclass(cls) or pytree_node(cls) is not None


def _register(cls: type[Any]) -> None:
    """Let optree open and make containers of a class."""
    open_, make = _functions_of(cls)

    def flatten_node(value: Any) -> tuple[Sequence[Any], _Context, Any]:
        children, context, names = open_(value)
        return tuple(children), _Context(context), names

    def unflatten_node(context: Any, children: Sequence[Any]) -> Any:
        return make(children, context.value)

    _register_node(cls, flatten_node, unflatten_node, namespace=NAMESPACE)
    _registered.add(cls)


def _functions_of(cls: type[Any]) -> tuple[_Open, _Make]:
    # Hugging Face's ModelOutput is a dict and a dataclass: both views of its fields are kept.
    if dataclasses.is_dataclass(cls) and issubclass(cls, dict):
        names = tuple(f.name for f in dataclasses.fields(cls))
        return (
            lambda value: ([getattr(value, name) for name in names], None, names),
            lambda children, _: cls(**dict(zip(names, children, strict=True))),
        )
    node = pytree_node(cls)
    if node is not None:
        open_, make = node
        return lambda value: (*open_(value), None), make
    return _of_dataclass(cls)


def _of_dataclass(cls: type[Any]) -> tuple[_Open, _Make]:
    """A dataclass as its fields, if they are all that it holds; one of plain values may hold more.

    What ``__post_init__`` computes of the whole batch would be wrong for a part of it.
    """
    names = tuple(field.name for field in dataclasses.fields(cls))
    params = tuple(inspect.signature(cls.__init__).parameters)[1:]
    holds_fields = {*params} == {*names} and not hasattr(cls, "__post_init__")

    def open_(value: Any) -> tuple[Sequence[Any], Any, Any]:
        held: Any = {name: getattr(value, name, None) for name in names}
        held |= getattr(value, "__dict__", {})
        others = (name for name in held if name not in names)
        if holds_fields and all(isinstance(getattr(cls, n, None), cached_property) for n in others):
            return [held[name] for name in names], None, names
        if not all(map(is_plain, optree.tree_leaves(held))):
            raise BoundaryError(
                f"a {cls.__qualname__} can't be split, moved or sent: it holds more than fields, "
                "or has an __init__ or __post_init__ of its own; use a dict, or register the class "
                "with torch's pytree (register_pytree_node)"
            )
        return (), value, ()

    def make(children: Sequence[Any], closed: Any) -> Any:
        if closed is not None:
            return closed
        made = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return open_, make


def _refuse_mappings(leaves: Sequence[Any]) -> None:
    """Refuse mappings of tensors that no registry knows: they would go whole to each microbatch."""
    for leaf in leaves:
        is_mapping = isinstance(leaf, Mapping) and not isinstance(leaf, nn.Module)
        if is_mapping and tensors_of([dict(leaf), getattr(leaf, "__dict__", {})]):
            raise BoundaryError(
                f"a {type(leaf).__qualname__} can't be split, moved or sent: pass dict(...) of it, "
                "or register the class with torch's pytree (register_pytree_node)"
            )


# --- descriptions for other ranks ----------------------------------------------------------------

# The classes that this process has sent, or found in its modules, by module and name.
_known_classes: dict[str, type[Any]] = {}


def encode(value: Any) -> Any:
    """Plain values, containers and structures of them as JSON: itself, or ``[kind, contents]``."""
    cls = type(value)
    if value is None or cls in _IN_JSON:
        return value
    if cls in _CODECS:
        return [cls.__name__, _CODECS[cls][0](value)]
    if isinstance(value, type):
        name = f"{value.__module__}:{value.__qualname__}"
        _known_classes[name] = value
        return ["class", name]
    if cls is optree.PyTreeSpec:
        return ["structure", encode(value.__getstate__())]
    if cls is _Context:
        return ["context", encode(value.value)]
    if cls in (tuple, list):
        return [cls.__name__, [encode(item) for item in value]]
    if cls is dict:
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    leaves, tree = flatten(value)
    if not leaves or leaves[0] is value:
        raise BoundaryError(
            f"a container can't cross between stages: a key, or the context that it is registered "
            f"with, holds a {cls.__qualname__}, expected numbers, strings, None and containers of "
            "these"
        )
    return ["tree", [encode(tree), encode(leaves)]]


def decode(data: Any) -> Any:
    """Read what ``encode`` wrote, of classes that this process has imported."""
    if not isinstance(data, list):
        return data
    kind, contents = data
    if kind in _DECODERS:
        return _DECODERS[kind](contents)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in contents}
    items = [decode(item) for item in contents]
    return tuple(items) if kind == "tuple" else items


def _decode_structure(data: Any) -> optree.PyTreeSpec:
    tree = optree.PyTreeSpec.__new__(optree.PyTreeSpec)
    cast(Any, tree).__setstate__(decode(data))
    return tree


def _find_class(name: str) -> type[Any]:
    """The class of this name in the modules that this process has imported."""
    if name in _known_classes:
        return _known_classes[name]
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_tuple = hasattr(found, "_fields") or optree.is_structseq_class(found)
    is_known = is_tuple or module_name == "builtins"  # such as the factory of a defaultdict
    if not isinstance(found, type) or not (is_known or _is_container(found)):
        raise BoundaryError(
            f"a stage sends a {name}, a class that this rank can't find; define it at the top "
            "level of a module that every rank imports, and register it there, where it is "
            "registered with torch's pytree"
        )
    if not is_known and found not in _registered:
        _register(found)
    _known_classes[name] = found
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    **{cls.__name__: decode_plain for cls, (_, decode_plain) in _CODECS.items()},
    "class": _find_class,
    "structure": _decode_structure,
    "context": lambda contents: _Context(decode(contents)),
    "tree": lambda contents: unflatten(*map(decode, contents)),
}
