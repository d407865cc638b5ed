"""Trees of values: opened into leaves, and written as JSON without them.

    opened                                   how
    tuple, list, dict, named tuple, …        as optree does
    classes registered with torch's pytree   as they are registered
    dataclasses                              by fields, and by what was set on the instance beside
                                             them, where that is made of tensors and plain values
    other classes of mappings                as in ``mappings.py``

Any nesting of these is a tree, wherever one is taken apart: inputs, what crosses, outputs. Leaves
are put back into the same value; a value of other rows is made otherwise (``row_trees.py``). This
module does not care what the leaves are.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock._torch_compat import pytree_node
from penstock.errors import BoundaryError
from penstock.stage.mappings import Whole, is_mapping, mapping_parts
from penstock.stage.tensor_meta import decode_leaf, encode_leaf, plain_tag

__all__ = [
    "NAMESPACE",
    "Leaf",
    "Make",
    "Open",
    "as_args",
    "attributes",
    "decode_tree",
    "encode_tree",
    "flatten",
    "flatten_in",
    "how_to_open",
    "is_carried",
    "is_container",
    "map_tensors",
    "register_in",
    "same_value",
    "tensors_of",
    "unflatten",
]

NAMESPACE = "penstock"

# What a container's class is known by: (children, context) of a value, and a value of these.
Open: TypeAlias = Callable[[Any], tuple[Sequence[Any], Any]]
Make: TypeAlias = Callable[[Sequence[Any], Any], Any]


def as_args(output: Any) -> tuple[Any, ...]:
    """A stage's output as the positional arguments of the next stage (see the table above)."""
    # Named tuples, torch.return_types and torch.Size are tuples too, but one value each.
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


def flatten(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of any tree (see the table above)."""
    return flatten_in(NAMESPACE, value, lambda cls: _register(cls, *how_to_open(cls)))


def unflatten(tree: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The tree of this structure around these leaves."""
    return optree.tree_unflatten(tree, leaves)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a tree."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A tree like ``value``, with what ``change`` makes of its tensors in their places."""
    leaves, tree = flatten(value)
    return unflatten(tree, [change(x) if isinstance(x, Tensor) else x for x in leaves])


def flatten_in(
    namespace: str, value: Any, register: Callable[[type[Any]], None]
) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of a tree, containers opened as they are in an optree namespace.

    Args:
        namespace: the namespace.
        value: the tree.
        register: makes a class known there; called where a container is first met.
    """
    leaves, tree = optree.tree_flatten(value, namespace=namespace)
    fresh = [cls for cls in {type(leaf) for leaf in leaves} if is_container(cls)]
    if not fresh:
        return leaves, tree
    for cls in fresh:
        register(cls)
    return flatten_in(namespace, value, register)


def is_container(cls: type[Any]) -> bool:
    """Whether a class is opened because of what it is, or of what torch's pytree knows of it."""
    return dataclasses.is_dataclass(cls) or is_mapping(cls) or pytree_node(cls) is not None


def how_to_open(cls: type[Any]) -> tuple[Open, Make]:
    """What opens a container of this class, and what makes the same one again."""
    # Hugging Face's ModelOutput is a dict and a dataclass: both views of its fields are kept.
    is_both = dataclasses.is_dataclass(cls) and issubclass(cls, dict)
    node = None if is_both else pytree_node(cls)
    if node is not None:
        return node
    if not dataclasses.is_dataclass(cls):
        return mapping_parts(cls)
    names = tuple(f.name for f in dataclasses.fields(cls))
    if is_both:
        return (
            lambda value: ([getattr(value, name) for name in names], names),
            lambda children, names: cls(**dict(zip(names, children, strict=True))),
        )

    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        held = attributes(value)
        here = {n: x for n, x in held.items() if n in names or is_carried(x)}
        return list(here.values()), tuple(here)

    def make(children: Sequence[Any], names: Any) -> Any:
        made = object.__new__(cls)
        for name, value in zip(names, children, strict=True):
            object.__setattr__(made, name, value)
        return made

    return open_, make


def attributes(value: Any) -> dict[str, Any]:
    """What a dataclass's fields hold, and what was set beside them; not what is computed anew."""
    cls = type(value)
    beside = (
        name
        for name in getattr(value, "__dict__", ())
        if not isinstance(getattr(cls, name, None), cached_property)
    )
    names = dict.fromkeys((*(f.name for f in dataclasses.fields(cls)), *beside))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def is_carried(value: Any) -> bool:
    """Whether a value is a tensor, a plain value, or a container of these.

    What stands beside a dataclass's fields is carried along if so. Other objects may point back to
    the dataclass itself.
    """
    if isinstance(value, (list, tuple)):
        return all(map(is_carried, value))
    if isinstance(value, dict):
        return all(map(is_carried, value.values()))
    return value is None or isinstance(value, Tensor) or plain_tag(value) is not None


def same_value(left: Any, right: Any) -> bool:
    """Whether two values are equal; where nobody can tell, they are not."""
    if left is right:
        return True
    try:
        if isinstance(left, Tensor):
            return isinstance(right, Tensor) and torch.equal(left, right)
        return bool(left == right)
    except (ValueError, TypeError, RuntimeError):  # such as arrays, of which each item is compared
        return False


class Context:
    """What a container is beside its children, compared by value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context) or type(self.value) is not type(other.value):
            return False
        return same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(slots=True)
class _Sketch:
    """Stands for a container of a registered class, which nobody makes without its leaves."""

    cls: type[Any]
    context: Any
    children: Sequence[Any]


_sketches: ContextVar[bool] = ContextVar("sketches", default=False)
# Bare instances that stand for values while their structure is read, by id.
_sketched: dict[int, _Sketch] = {}
_registered: set[type[Any]] = set()


def register_in(namespace: str, cls: type[Any], open_: Open, make: Make) -> None:
    """Let optree open a class and make it again, in one of its namespaces.

    Args:
        namespace: its name, as ``flatten_in`` takes it.
        cls: the class.
        open_: takes one apart, into children and context.
        make: makes one of these.
    """

    def flatten_node(value: Any) -> tuple[Sequence[Any], Context, Any]:
        children, context = open_(value)
        return tuple(children), Context(context), _entries(cls, children, context)

    def unflatten_node(context: Any, children: Sequence[Any]) -> Any:
        return make(children, context.value)

    optree.register_pytree_node(
        cls,
        flatten_node,
        unflatten_node,  # type: ignore[arg-type]  # what it makes is no Collection; optree takes it
        namespace=namespace,
    )


def _entries(cls: type[Any], children: Sequence[Any], context: Any) -> Any:
    """What paths to a container's children are made of; None for their numbers."""
    names = context if dataclasses.is_dataclass(cls) else None
    if names is None and is_mapping(cls) and isinstance(context, tuple):
        names = next(iter(context), None)
    return names if isinstance(names, tuple) and len(names) == len(children) else None


def _register(cls: type[Any], open_: Open, make: Make) -> None:
    def opened(value: Any) -> tuple[Sequence[Any], Any]:
        sketch = _sketched.get(id(value))
        return (sketch.children, sketch.context) if sketch else open_(value)

    def made(children: Sequence[Any], context: Any) -> Any:
        return _Sketch(cls, context, children) if _sketches.get() else make(children, context)

    register_in(NAMESPACE, cls, opened, made)
    _registered.add(cls)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for the leaf of this index while a tree is written or read."""

    index: int


# Classes that this process has sent: found again without a look into their module.
_seen_classes: dict[str, type[Any]] = {}


def encode_tree(tree: optree.PyTreeSpec) -> Any:
    """A tree's structure as JSON has it; leaves by number.

    Raises:
        BoundaryError: it holds a container that can't be told in words.
    """
    token = _sketches.set(True)
    try:
        drawn = optree.tree_unflatten(tree, [Leaf(i) for i in range(tree.num_leaves)])
    finally:
        _sketches.reset(token)
    return _encode(drawn)


def _encode(node: Any) -> Any:
    match node:
        case Leaf(index):
            return index
        case None:
            return None
        case _Sketch(cls, context, children):
            told = _encode_context(cls, context)
            items = [_encode(child) for child in children]
            return {"open": _class_name(cls), "context": told, "items": items}
        case tuple() if hasattr(node, "_fields") or optree.is_structseq(node):
            return {"class": _class_name(type(node)), "items": [_encode(x) for x in node]}
        case tuple() | list() if type(node) in (tuple, list):
            return {"kind": type(node).__name__, "items": [_encode(x) for x in node]}
        case dict() if type(node) in (dict, OrderedDict):
            items = [[_encode_key(k), _encode(v)] for k, v in node.items()]
            return {"kind": type(node).__name__, "items": items}
    raise _can_not_cross(type(node))


def _can_not_cross(cls: type[Any]) -> BoundaryError:
    return BoundaryError(
        f"a {cls.__qualname__} can't cross between stages; return a tuple, list, dict, named "
        "tuple or dataclass"
    )


def _encode_key(key: Any) -> Any:
    if type(key) in (str, int):
        return key
    raise BoundaryError(f"dict key {key!r} can't cross between stages; use str or int keys")


def _encode_context(cls: type[Any], context: Any) -> Any:
    if isinstance(context, Whole):
        raise _can_not_cross(cls)
    leaves, tree = flatten(context)
    for leaf in leaves:
        if plain_tag(leaf) is None:
            raise BoundaryError(
                f"a {cls.__qualname__} can't cross between stages: it is registered with a context "
                f"that holds a {type(leaf).__qualname__}, expected numbers, strings, None and "
                "containers of these"
            )
    return [encode_tree(tree), [encode_leaf(leaf) for leaf in leaves]]


def decode_tree(data: Any) -> optree.PyTreeSpec:
    """The structure that ``encode_tree`` wrote.

    Raises:
        BoundaryError: it names a class that this process has not imported.
    """
    try:
        return flatten(_decode(data))[1]
    finally:
        _sketched.clear()


def _decode(node: Any) -> Any:
    if node is None:
        return None
    if isinstance(node, int):
        # A bare object is a leaf to optree, whatever it is.
        return object()
    items = node["items"]
    if "open" in node:
        cls = _find_class(node["open"])
        if cls not in _registered:
            _register(cls, *how_to_open(cls))
        tree, leaves = node["context"]
        children = [_decode(x) for x in items]
        structure = flatten(_decode(tree))[1]
        context: Any = optree.tree_unflatten(structure, [decode_leaf(leaf) for leaf in leaves])
        bare = _bare(cls)
        _sketched[id(bare)] = _Sketch(cls, context, children)
        return bare
    if "class" in node:
        cls = _find_class(node["class"])
        values = [_decode(x) for x in items]
        # Not called: what its own __new__ makes of its items, it can't make of these.
        return cls(values) if optree.is_structseq_class(cls) else tuple.__new__(cls, values)
    match node["kind"]:
        case "tuple":
            return tuple(_decode(x) for x in items)
        case "list":
            return [_decode(x) for x in items]
        case "dict":
            return {key: _decode(value) for key, value in items}
        case "OrderedDict":
            return OrderedDict((key, _decode(value)) for key, value in items)
    raise BoundaryError(f"a boundary's description names an unknown container {node['kind']!r}")


def _bare(cls: type[Any]) -> Any:
    """An instance of ``cls`` to which nothing has happened."""
    for base in cls.__mro__:
        new = base.__dict__.get("__new__")
        if isinstance(new, BuiltinFunctionType):
            return new(cls)
    raise AssertionError("every class derives from object")


def _class_name(cls: type[Any]) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    _seen_classes[name] = cls
    return name


def _find_class(name: str) -> type[Any]:
    """The class of this name among those that this process has; nothing is imported for it."""
    if name in _seen_classes:
        return _seen_classes[name]
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_known = isinstance(found, type) and (
        is_container(found)
        or found in _registered
        or hasattr(found, "_fields")
        or optree.is_structseq_class(found)
    )
    if not is_known:
        raise BoundaryError(
            f"a stage sends a {name}, a class that this rank can't find; define it at the top "
            "level of a module that every rank imports, and register it there, where it is "
            "registered with torch's pytree"
        )
    cls: type[Any] = found
    return cls


def _packed(children: Sequence[Any], _: Any) -> PackedSequence:
    data, sizes, *orders = children
    return PackedSequence(data, sizes.cpu(), *orders)


# A named tuple that is not made of any four values, such as those that stand for its own.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that it is a named tuple, too
    _register(PackedSequence, lambda packed: (tuple(packed), None), _packed)
