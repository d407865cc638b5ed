"""Pytrees: containers flattened into leaves, unflattened, and described as JSON.

    container                                 opened
    tuple, list, dict, named tuple, …         as optree opens them
    classes registered with torch's pytree    as registered
    dataclasses                               by their constructor's arguments
    other mappings (UserDict, BatchEncoding)  by their items, if their class takes a dict of them
    all else                                  not opened: a leaf

A dataclass is rebuilt by its constructor, so that ``self.rows = len(self.x)`` is right for a part
of a batch. A container that its class cannot rebuild is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from penstock._torch_compat import pytree_node
from penstock.errors import BoundaryError
from penstock.stage.tensor_meta import decode_leaf, encode_leaf, plain_tag

__all__ = [
    "NAMESPACE",
    "as_args",
    "decode_tree",
    "encode_tree",
    "flatten",
    "map_tensors",
    "same_value",
    "tensors_of",
    "unflatten",
]

# The optree namespace in which containers are registered when they are first met.
NAMESPACE = "penstock"

# (children, context) of a container, and a container of these.
_Open: TypeAlias = Callable[[Any], tuple[Sequence[Any], Any]]
_Make: TypeAlias = Callable[[Sequence[Any], Any], Any]


def as_args(output: Any) -> tuple[Any, ...]:
    """A stage's output as the positional arguments of the next stage."""
    # Named tuples, torch.return_types and torch.Size are tuples too, but count as one argument.
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


def flatten(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a pytree.

    Args:
        value: the pytree.
        is_leaf: whether to leave a container closed.

    Raises:
        BoundaryError: its class does not make a dataclass, or a mapping of tensors, again.
    """
    leaves, tree = optree.tree_flatten(value, is_leaf, namespace=NAMESPACE)
    fresh = [cls for cls in {type(leaf) for leaf in leaves} - _registered if _is_container(cls)]
    if not fresh:
        return leaves, tree
    for cls in fresh:
        _register(cls)
    return flatten(value, is_leaf)


def unflatten(tree: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The pytree of this structure around these leaves."""
    return optree.tree_unflatten(tree, leaves)


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


# --- the classes ---------------------------------------------------------------------------------


class _Context:
    """The part of a container that is no child, compared by value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Context) or type(self.value) is not type(other.value):
            return False
        return same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(slots=True)
class _Outline:
    """A container of a registered class, known by its parts; its class is not called."""

    cls: type[Any]
    context: Any
    children: Sequence[Any]


# True if unflatten makes outlines; and the outlines of bare instances, by the instances' ids.
_outlining: ContextVar[bool] = ContextVar("outlining", default=False)
_outlines: ContextVar[dict[int, _Outline] | None] = ContextVar("outlines", default=None)
_registered: set[type[Any]] = set()


def _is_container(cls: type[Any]) -> bool:
    return dataclasses.is_dataclass(cls) or _is_mapping(cls) or pytree_node(cls) is not None


def _is_mapping(cls: type[Any]) -> bool:
    return issubclass(cls, Mapping) and not issubclass(cls, nn.Module)


def _register(cls: type[Any]) -> None:
    """Let optree open and make containers of a class."""
    open_, make = _parts_of(cls)

    def flatten_node(value: Any) -> tuple[Sequence[Any], _Context, Any]:
        outline = (_outlines.get() or {}).get(id(value))
        children, context = (outline.children, outline.context) if outline else open_(value)
        return tuple(children), _Context(context), _entries(cls, len(children), context)

    def unflatten_node(context: Any, children: Sequence[Any]) -> Any:
        if _outlining.get():
            return _Outline(cls, context.value, children)
        return make(children, context.value)

    optree.register_pytree_node(
        cls,
        flatten_node,
        unflatten_node,  # type: ignore[arg-type]  # what it makes is no Collection; optree takes it
        namespace=NAMESPACE,
    )
    _registered.add(cls)


def _entries(cls: type[Any], num_children: int, context: Any) -> Any:
    """The names in the paths to a container's children; None for their indices."""
    names = context if dataclasses.is_dataclass(cls) else None
    if names is None and _is_mapping(cls) and isinstance(context, tuple):
        names = next(iter(context), None)
    return names if isinstance(names, tuple) and len(names) == num_children else None


def _parts_of(cls: type[Any]) -> tuple[_Open, _Make]:
    if cls is PackedSequence:
        return lambda packed: (tuple(packed), None), _make_packed
    # Hugging Face's ModelOutput is a dict and a dataclass: both views of its fields are kept.
    if dataclasses.is_dataclass(cls) and issubclass(cls, dict):
        names = tuple(f.name for f in dataclasses.fields(cls))
        return (
            lambda value: ([getattr(value, name) for name in names], names),
            lambda children, names: cls(**dict(zip(names, children, strict=True))),
        )
    node = pytree_node(cls)
    if node is not None:
        return node
    return _dataclass_parts(cls) if dataclasses.is_dataclass(cls) else _mapping_parts(cls)


def _make_packed(children: Sequence[Any], _: Any) -> PackedSequence:
    data, sizes, *orders = children
    return PackedSequence(data, sizes.cpu(), *orders)


def _dataclass_parts(cls: type[Any]) -> tuple[_Open, _Make]:
    fields = {field.name for field in dataclasses.fields(cls)}
    taken = tuple(inspect.signature(cls.__init__).parameters)[1:]

    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        other = next((name for name in taken if name not in fields), None)
        if other is not None:
            raise _refused(cls, f"its constructor takes {other}, which is none of its fields")
        children = [getattr(value, name, None) for name in taken]
        again = make(children, taken)
        for name in dict.fromkeys((*fields, *getattr(value, "__dict__", ()))):
            if isinstance(getattr(cls, name, None), cached_property) or not hasattr(value, name):
                continue
            if not hasattr(again, name):
                raise _refused(cls, f"its constructor sets no {name}")
            if not _is_same(getattr(value, name), getattr(again, name), made=name not in taken):
                raise _refused(cls, f"called with its fields, its constructor makes another {name}")
        return children, taken

    def make(children: Sequence[Any], taken: Any) -> Any:
        try:
            return cls(**dict(zip(taken, children, strict=True)))
        except Exception as error:
            raise _refused(
                cls, f"its constructor fails when called with its fields: {error!r}"
            ) from error

    return open_, make


def _mapping_parts(cls: type[Any]) -> tuple[_Open, _Make]:
    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        items, attributes = dict(value), getattr(value, "__dict__", {})
        try:
            made = cls(dict(items))
            theirs = getattr(made, "__dict__", {})
            changed = {n: x for n, x in attributes.items() if not _is_same(x, theirs.get(n))}
            if _is_same(items, dict(made)) and not _holds_tensor(changed):
                beside = {n: x for n, x in changed.items() if plain_tag(x) is not None}
                return list(items.values()), (tuple(items), beside)
        except Exception:  # the constructor takes other arguments
            pass
        if _holds_tensor(items) or _holds_tensor(attributes):
            raise _refused(cls, "called with a dict of its items, its class makes another one")
        return (), value  # for example settings: one value, which can't be sent

    def make(children: Sequence[Any], context: Any) -> Any:
        if not isinstance(context, tuple):
            return context
        keys, beside = context
        made = cls(dict(zip(keys, children, strict=True)))
        for name, mine in beside.items():
            object.__setattr__(made, name, mine)
        return made

    return open_, make


def _is_same(left: Any, right: Any, *, made: bool = False) -> bool:
    """True if two attributes agree: one object, or containers of the same objects.

    Args:
        left: the attribute of a value.
        right: that of the value made again.
        made: whether the constructor makes it: then tensors of one shape agree, and objects of
            which nothing is known.
    """
    if left is right:
        return True
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(
            _is_same(left[key], right[key], made=made) for key in left
        )
    if isinstance(left, (list, tuple)) and type(right) is type(left):
        return len(left) == len(right) and all(
            _is_same(mine, other, made=made) for mine, other in zip(left, right, strict=True)
        )
    if plain_tag(left) is not None or plain_tag(right) is not None:
        return type(left) is type(right) and (left == right or repr(left) == repr(right))
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return made and type(left) is type(right) and left.shape == right.shape
    return made and type(left) is type(right)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def _refused(cls: type[Any], why: str) -> BoundaryError:
    return BoundaryError(
        f"a {cls.__qualname__} can't be split, moved or sent: {why}; use a dict, or register the "
        "class with torch.utils._pytree.register_pytree_node"
    )


# --- descriptions for other ranks ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The place of the leaf of this index."""

    index: int


# Classes that this process has sent, by name: found again without a look into their modules.
_seen_classes: dict[str, type[Any]] = {}


def encode_tree(tree: optree.PyTreeSpec) -> Any:
    """A structure as JSON values; leaves by index.

    Raises:
        BoundaryError: it holds a container that can't be described.
    """
    token = _outlining.set(True)
    try:
        outline = optree.tree_unflatten(tree, [_Leaf(i) for i in range(tree.num_leaves)])
    finally:
        _outlining.reset(token)
    return _encode(outline)


def _encode(node: Any) -> Any:
    match node:
        case _Leaf(index):
            return index
        case None:
            return None
        case _Outline(cls, context, children):
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
    raise _not_sent(type(node))


def _not_sent(cls: type[Any]) -> BoundaryError:
    return BoundaryError(
        f"a {cls.__qualname__} can't cross between stages; return a tuple, list, dict, named "
        "tuple or dataclass"
    )


def _encode_key(key: Any) -> Any:
    if type(key) in (str, int):
        return key
    raise BoundaryError(f"dict key {key!r} can't cross between stages; use str or int keys")


def _encode_context(cls: type[Any], context: Any) -> Any:
    if type(context) is cls:
        raise _not_sent(cls)
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
    token = _outlines.set({})
    try:
        return flatten(_decode(data))[1]
    finally:
        _outlines.reset(token)


def _decode(node: Any) -> Any:
    if node is None:
        return None
    if isinstance(node, int):
        return object()  # optree treats a bare object as a leaf
    items = node["items"]
    if "open" in node:
        return _decode_outline(_find_class(node["open"]), node["context"], items)
    if "class" in node:
        cls = _find_class(node["class"])
        values = [_decode(x) for x in items]
        # tuple.__new__: the class's own __new__ may check its items, which are none yet.
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


def _decode_outline(cls: type[Any], context: Any, items: Sequence[Any]) -> Any:
    if cls not in _registered:
        _register(cls)
    tree, leaves = context
    told: Any = unflatten(decode_tree(tree), [decode_leaf(leaf) for leaf in leaves])
    bare = _bare(cls)
    outlines = _outlines.get()
    assert outlines is not None, "set by decode_tree"
    outlines[id(bare)] = _Outline(cls, told, [_decode(x) for x in items])
    return bare


def _bare(cls: type[Any]) -> Any:
    """An instance of a class whose constructor has not run."""
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
    """The class of this name in the modules that this process has imported."""
    if name in _seen_classes:
        return _seen_classes[name]
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_known = isinstance(found, type) and (
        _is_container(found)
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


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that it is a named tuple, too
    _register(PackedSequence)
