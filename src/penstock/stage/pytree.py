"""Pytrees: containers opened into leaves, put together again, and described as JSON.

    container                                 opened
    tuple, list, dict, named tuple, …         as optree opens them
    classes registered with torch's pytree    as registered
    dataclasses                               by their fields, and by attributes set beside the
                                              fields, if made of tensors and plain values
    other mappings (UserDict, BatchEncoding)  by their items, if their class takes a dict of them
    all else                                  not opened: a leaf

``unflatten`` puts leaves back into the same value. Inside ``with resizing():`` leaves may have
other numbers of rows: dataclasses are then made by their constructors, since attributes such as
``self.rows = len(self.x)`` depend on the rows, and a container that can't be resized is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any, NoReturn, TypeAlias

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
    "resizing",
    "same_value",
    "tensors_of",
    "unflatten",
]

# The optree namespace in which containers are registered when they are first met.
NAMESPACE = "penstock"

# (children, context) of a container, and a container of these.
_Open: TypeAlias = Callable[[Any], tuple[Sequence[Any], Any]]
_Make: TypeAlias = Callable[[Sequence[Any], Any], Any]

_resizing: ContextVar[bool] = ContextVar("resizing", default=False)


def as_args(output: Any) -> tuple[Any, ...]:
    """A stage's output as the positional arguments of the next stage."""
    # Named tuples, torch.return_types and torch.Size are tuples too, but one value each.
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


def flatten(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a pytree.

    Raises:
        BoundaryError: a mapping holds tensors and its class does not rebuild it.
        ValueError: (in ``resizing``) a container can't be made of other rows.
    """
    leaves, tree = optree.tree_flatten(value, namespace=NAMESPACE)
    fresh = [cls for cls in {type(leaf) for leaf in leaves} if _is_container(cls)]
    if not fresh:
        return leaves, tree
    for cls in fresh:
        _register(cls)
    return flatten(value)


def unflatten(tree: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The pytree of this structure around these leaves."""
    return optree.tree_unflatten(tree, leaves)


@contextmanager
def resizing() -> Iterator[None]:
    """Flatten and unflatten values whose leaves change in their number of rows."""
    token = _resizing.set(True)
    try:
        yield
    finally:
        _resizing.reset(token)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a pytree."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A pytree like ``value`` with ``change(tensor)`` in place of each tensor."""
    leaves, tree = flatten(value)
    return unflatten(tree, [change(x) if isinstance(x, Tensor) else x for x in leaves])


def same_value(left: Any, right: Any) -> bool:
    """Whether two values are equal; False if they can't be compared."""
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


# Whether unflatten makes outlines; and the outlines of bare instances, by the instances' ids.
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
        return _open_packed, _make_packed
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


def _open_packed(packed: Any) -> tuple[Sequence[Any], Any]:
    if _resizing.get():
        raise ValueError(
            "a PackedSequence can't be split into microbatches or merged: its rows do not lie "
            "together; use padded tensors and lengths, or ready microbatches (arg_mbs=, "
            "target_mbs=) and merge_outputs=False"
        )
    return tuple(packed), None


def _make_packed(children: Sequence[Any], _: Any) -> PackedSequence:
    data, sizes, *orders = children
    return PackedSequence(data, sizes.cpu(), *orders)


# --- dataclasses ---------------------------------------------------------------------------------


def _dataclass_parts(cls: type[Any]) -> tuple[_Open, _Make]:
    fields = {field.name for field in dataclasses.fields(cls)}
    taken = tuple(inspect.signature(cls.__init__).parameters)[1:]

    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        held = _attributes(value)
        if not _resizing.get():
            here = {n: x for n, x in held.items() if n in fields or _is_plain_tree(x)}
            return list(here.values()), tuple(here)
        children = [held.get(name) for name in taken]
        other = next((name for name in taken if name not in fields), None)
        if other is not None:
            _refuse(cls, f"its constructor takes {other}, which is none of its fields")
        again = _attributes(make(children, taken))
        for name, mine in held.items():
            if name not in again:
                _refuse(cls, f"its constructor sets no {name}")
            if (name in taken or _is_plain_tree(mine)) and not _is_same_tree(mine, again[name]):
                _refuse(cls, f"called with its fields, its constructor makes another {name}")
        return children, taken

    def make(children: Sequence[Any], names: Any) -> Any:
        if _resizing.get():
            try:
                return cls(**dict(zip(names, children, strict=True)))
            except Exception as error:
                _refuse(cls, f"its constructor fails when called with its fields: {error!r}", error)
        made = object.__new__(cls)
        for name, value in zip(names, children, strict=True):
            object.__setattr__(made, name, value)
        return made

    return open_, make


def _attributes(value: Any) -> dict[str, Any]:
    """A dataclass's fields and the attributes set beside them; no cached properties."""
    cls = type(value)
    beside = (
        name
        for name in getattr(value, "__dict__", ())
        if not isinstance(getattr(cls, name, None), cached_property)
    )
    names = dict.fromkeys((*(f.name for f in dataclasses.fields(cls)), *beside))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_plain_tree(value: Any) -> bool:
    """Whether a value is a tensor, a plain value, or a list, tuple or dict of these.

    Other attributes of a dataclass may refer back to the dataclass itself.
    """
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain_tree, value))
    if isinstance(value, dict):
        return all(map(_is_plain_tree, value.values()))
    return value is None or isinstance(value, Tensor) or plain_tag(value) is not None


def _is_same_tree(left: Any, right: Any) -> bool:
    if left is right:
        return True
    mine, tree = flatten(left)
    others, other_tree = flatten(right)
    return tree == other_tree and all(map(_is_same_leaf, mine, others))


def _is_same_leaf(left: Any, right: Any) -> bool:
    if same_value(left, right):
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return same_value(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, float) and isinstance(right, float):
        return left != left and right != right
    # Objects that nothing is known of may be made anew by the constructor.
    return not (_is_plain_tree(left) or _is_plain_tree(right))


def _refuse(cls: type[Any], why: str, error: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"a {cls.__qualname__} can't be split into microbatches or merged: {why}; register it with "
        "torch.utils._pytree.register_pytree_node, or use ready microbatches and "
        "merge_outputs=False"
    ) from error


# --- mappings ------------------------------------------------------------------------------------


def _mapping_parts(cls: type[Any]) -> tuple[_Open, _Make]:
    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        items = dict(value)
        beside = _plain_attributes(value, items)
        if beside is not None:
            return list(items.values()), (tuple(items), beside)
        if _holds_tensor(items) or _holds_tensor(getattr(value, "__dict__", {})):
            raise BoundaryError(
                f"a {cls.__qualname__} can't be split, moved or sent: called with a dict of its "
                "items, its constructor does not make it again; use a dict, or register the class "
                "with torch.utils._pytree.register_pytree_node"
            )
        return (), value  # settings, say: one value, which can't cross

    def make(children: Sequence[Any], context: Any) -> Any:
        if not isinstance(context, tuple):
            return context
        keys, beside = context
        made = cls(dict(zip(keys, children, strict=True)))
        for name, mine in beside.items():
            object.__setattr__(made, name, mine)
        return made

    return open_, make


def _plain_attributes(value: Any, items: dict[Any, Any]) -> dict[str, Any] | None:
    """The plain attributes that a mapping's class does not set when called with the items.

    None if called with its items the class makes another mapping, or loses a tensor.
    """
    try:
        made = type(value)(dict(items))
        again = dict(made)
    except Exception:  # the constructor takes other arguments
        return None
    if not _is_same_object(items, again):
        return None
    theirs = getattr(made, "__dict__", {})
    beside = {}
    for name, mine in getattr(value, "__dict__", {}).items():
        if _is_same_object(mine, theirs.get(name)):
            continue
        if _holds_tensor(mine):
            return None
        if plain_tag(mine) is not None:
            beside[name] = mine
    return beside


def _is_same_object(left: Any, right: Any) -> bool:
    """Whether two values are one object, or containers of the same objects."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(
            _is_same_object(left[key], right[key]) for key in left
        )
    if isinstance(left, (list, tuple)) and type(right) is type(left):
        return len(left) == len(right) and all(map(_is_same_object, left, right))
    return left is right


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


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
        return object()  # a leaf to optree
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
