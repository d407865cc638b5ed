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
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from penstock._torch_compat import pytree_node
from penstock.errors import BoundaryError

__all__ = ["NAMESPACE", "Plain", "as_args", "decode_plain", "decode_tree", "encode_plain"]
__all__ += ["encode_tree", "flatten", "is_plain", "map_tensors", "same_value", "tensors_of"]
__all__ += ["unflatten"]

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
    new = [cls for cls in {type(leaf) for leaf in leaves} - _registered if _is_container(cls)]
    if not new:
        return leaves, tree
    for cls in new:
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
_DECODERS = {cls.__name__: decode for cls, (_, decode) in _CODECS.items()}


def is_plain(value: object) -> bool:
    """True if a leaf that is no tensor can be sent; subclasses, such as NumPy's floats, can't."""
    return type(value) in _IN_JSON or type(value) in _CODECS


def encode_plain(value: Plain) -> Any:
    """A plain value as JSON: itself, or ``[class name, value]``."""
    cls = type(value)
    return value if cls in _IN_JSON else [cls.__name__, _CODECS[cls][0](value)]


def decode_plain(data: Any) -> Plain:
    """Read a value that ``encode_plain`` wrote."""
    return _DECODERS[data[0]](data[1]) if isinstance(data, list) else data


# --- containers ----------------------------------------------------------------------------------

# Opens a container: children, context, and the children's names in paths (None: their indices).
_Open: TypeAlias = Callable[[Any], tuple[Sequence[Any], Any, Any]]
# Makes a container of children and context.
_Make: TypeAlias = Callable[[Sequence[Any], Any], Any]

_registered: set[type[Any]] = set()
# By id, a container without contents that ``decode_tree`` opens once, and its described parts.
_stand_ins: dict[int, tuple[Any, Sequence[Any], Any]] = {}
# Its type wants a Collection; optree takes any class.
_register_node: Any = optree.register_pytree_node


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


def _is_container(cls: type[Any]) -> bool:
    is_mapping = issubclass(cls, Mapping) and not issubclass(cls, nn.Module)
    return is_mapping or dataclasses.is_dataclass(cls) or pytree_node(cls) is not None


def _register(cls: type[Any]) -> None:
    """Let optree open and make containers of a class."""
    open_, make = _functions_of(cls)

    def flatten_node(value: Any) -> tuple[Sequence[Any], _Context, Any]:
        stand_in = _stand_ins.pop(id(value), None)
        children, context, names = open_(value) if stand_in is None else (*stand_in[1:], None)
        return tuple(children), _Context(context), names

    def unflatten_node(context: Any, children: Sequence[Any]) -> Any:
        return make(children, context.value)

    _register_node(cls, flatten_node, unflatten_node, namespace=NAMESPACE)
    _registered.add(cls)


def _functions_of(cls: type[Any]) -> tuple[_Open, _Make]:
    if cls is PackedSequence:  # whose numbers of rows lie on the CPU
        return (
            lambda packed: (tuple(packed), None, None),
            lambda parts, _: PackedSequence(parts[0], parts[1].cpu(), *parts[2:]),
        )
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
    return _of_dataclass(cls) if dataclasses.is_dataclass(cls) else _of_mapping(cls)


def _of_dataclass(cls: type[Any]) -> tuple[_Open, _Make]:
    fields = {field.name for field in dataclasses.fields(cls)}
    names = tuple(inspect.signature(cls.__init__).parameters)[1:]

    def make(children: Sequence[Any], _: Any = None) -> Any:
        return cls(**dict(zip(names, children, strict=True)))

    def differing(value: Any, again: Any) -> list[str]:
        """The attributes in which the rebuilt dataclass differs; cached properties may."""
        found = (n for n in {*fields, *getattr(value, "__dict__", ())} if hasattr(value, n))
        kept = [n for n in found if not isinstance(getattr(cls, n, None), cached_property)]
        pairs = [(n, getattr(value, n), getattr(again, n, _MISSING)) for n in kept]
        return [n for n, left, right in pairs if not _is_same(left, right, made=n not in names)]

    def open_(value: Any) -> tuple[Sequence[Any], Any, Any]:
        children = [getattr(value, name, None) for name in names]
        try:
            wrong = sorted({*names} - fields) or differing(value, make(children))
        except Exception as error:
            raise _refused(cls, f"its constructor fails: {error!r}") from error
        if wrong:
            raise _refused(cls, f"{wrong[0]} differs, or is none of its fields")
        return children, None, names

    return open_, make


def _of_mapping(cls: type[Any]) -> tuple[_Open, _Make]:
    def open_(value: Any) -> tuple[Sequence[Any], Any, Any]:
        items, attributes = dict(value), getattr(value, "__dict__", {})
        try:
            again = cls(dict(items))
        except Exception:  # its constructor takes other arguments
            again = {}
        made = getattr(again, "__dict__", {})
        changed = {n: x for n, x in attributes.items() if not _is_same(x, made.get(n, _MISSING))}
        if _is_same(items, dict(again)) and not _holds_tensor(changed):
            beside = {n: x for n, x in changed.items() if x is None or is_plain(x)}
            return list(items.values()), (tuple(items), beside), tuple(items)
        if _holds_tensor([items, attributes]):
            raise _refused(cls, "a dict of its items does not hold all of its tensors")
        return (), value, None  # for example settings: one value, which can't be sent

    def make(children: Sequence[Any], context: Any) -> Any:
        if not isinstance(context, tuple):
            return context
        keys, beside = context
        made = cls(dict(zip(keys, children, strict=True)))
        for name, value in beside.items():
            object.__setattr__(made, name, value)
        return made

    return open_, make


_MISSING = object()


def _is_same(left: Any, right: Any, *, made: bool = False) -> bool:
    """True if two attributes agree: one object, or containers of the same objects.

    If the constructor has ``made`` them: tensors of one shape, and unknown objects of one class.
    """
    lefts, tree = optree.tree_flatten(left)
    rights, other = optree.tree_flatten(right)
    return tree == other and all(_same_leaf(a, b, made) for a, b in zip(lefts, rights, strict=True))


def _same_leaf(left: Any, right: Any, made: bool) -> bool:
    if left is right or type(left) is not type(right):
        return left is right
    if is_plain(left):
        return bool(left == right) or repr(left) == repr(right)  # NaN equals NaN
    return made and (not isinstance(left, Tensor) or left.shape == right.shape)


def _holds_tensor(value: Any) -> bool:
    leaves = optree.tree_leaves(value)
    return any(
        _holds_tensor(dict(x)) if isinstance(x, Mapping) else isinstance(x, Tensor) for x in leaves
    )


def _refused(cls: type[Any], why: str) -> BoundaryError:
    return BoundaryError(
        f"a {cls.__qualname__} can't be split, moved or sent: its class, called with its fields or "
        f"a dict of its items, does not make the same again ({why}); use a dict, or register the "
        "class with torch.utils._pytree.register_pytree_node"
    )


# --- descriptions for other ranks ----------------------------------------------------------------

# Builtin classes, and those that this process has sent, found without a look into their modules.
_seen_classes: dict[str, type[Any]] = {
    f"{cls.__module__}:{cls.__qualname__}": cls for cls in (tuple, list, dict, OrderedDict)
}


def encode_tree(tree: optree.PyTreeSpec) -> Any:
    """A structure as JSON values; a leaf is 0."""
    cls: Any = tree.type
    level: Any = tree.one_level()
    if tree.is_leaf() or cls is type(None):
        return 0 if tree.is_leaf() else None
    items = [encode_tree(child) for child in tree.children()]
    node = {"class": _class_name(cls), "items": items}
    if cls in _registered:
        context = level.walk(items, lambda _, context, items: context)
        return node | {"context": _encode_context(cls, context.value)}
    if cls in (dict, OrderedDict):
        made: Any = level.unflatten(items)  # optree itself sorts the keys of a dict
        if wrong := [key for key in made if type(key) not in (str, int)]:
            raise BoundaryError(
                f"dict key {wrong[0]!r} can't cross between stages; use str or int keys"
            )
        return node | {"keys": list(made), "items": list(made.values())}
    if cls in (tuple, list) or _is_named_tuple(cls):
        return node
    raise _not_sent(cls)


def _is_named_tuple(cls: Any) -> bool:
    return hasattr(cls, "_fields") or optree.is_structseq_class(cls)


def _not_sent(cls: type[Any]) -> BoundaryError:
    return BoundaryError(
        f"a {cls.__qualname__} can't cross between stages; return a tuple, list, dict, named "
        "tuple or dataclass"
    )


def _encode_context(cls: type[Any], context: Any) -> Any:
    if type(context) is cls:
        raise _not_sent(cls)
    leaves, tree = flatten(context)
    for leaf in leaves:
        if not is_plain(leaf):
            raise BoundaryError(
                f"a {cls.__qualname__} can't cross between stages: it is registered with a context "
                f"that holds a {type(leaf).__qualname__}, expected numbers, strings, None and "
                "containers of these"
            )
    return [encode_tree(tree), [encode_plain(leaf) for leaf in leaves]]


def decode_tree(data: Any) -> optree.PyTreeSpec:
    """The structure that ``encode_tree`` wrote, of classes that this process has imported."""
    return optree.tree_structure(_decode(data), namespace=NAMESPACE)


def _decode(node: Any) -> Any:
    if not isinstance(node, dict):
        return node  # a leaf, or None
    cls, items = _find_class(node["class"]), [_decode(item) for item in node["items"]]
    if "keys" in node:
        return cls(zip(node["keys"], items, strict=True))
    if cls in (tuple, list) or optree.is_structseq_class(cls):
        return cls(items)
    # Constructors may check their arguments, which are none yet: that of a builtin base does not.
    new = next(
        vars(base)["__new__"]
        for base in cls.__mro__
        if isinstance(vars(base).get("__new__"), BuiltinFunctionType)
    )
    if "context" not in node:
        return new(cls, items)
    if cls not in _registered:
        _register(cls)
    tree, leaves = node["context"]
    context = unflatten(decode_tree(tree), [decode_plain(leaf) for leaf in leaves])
    stand_in = new(cls)
    _stand_ins[id(stand_in)] = stand_in, items, context
    return stand_in


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
    if isinstance(found, type) and (
        _is_named_tuple(found) or _is_container(found) or found in _registered
    ):
        return found
    raise BoundaryError(
        f"a stage sends a {name}, a class that this rank can't find; define it at the top level of "
        "a module that every rank imports, and register it there, where it is registered with "
        "torch's pytree"
    )


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that it is a named tuple, too
    _register(PackedSequence)
