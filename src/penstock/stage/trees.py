"""Trees of values: opened into leaves, and written as JSON without them.

Containers are tuples, lists, dicts, named tuples and dataclasses, in any nesting. This module does
not care what the leaves are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree

from penstock.errors import BoundaryError

__all__ = ["NAMESPACE", "Leaf", "as_args", "decode_tree", "encode_tree", "flatten"]

NAMESPACE = "penstock"


def as_args(output: Any) -> tuple[Any, ...]:
    """A stage's output as the positional arguments of the next stage (see the table above)."""
    # Named tuples, torch.return_types and torch.Size are tuples too, but one value each.
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


def flatten(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of any tree; dataclasses are opened like the other containers."""
    leaves, tree = optree.tree_flatten(value, namespace=NAMESPACE)
    fresh = {type(leaf) for leaf in leaves if is_dataclass_instance(leaf)}
    if not fresh:
        return leaves, tree
    for cls in fresh:
        _register_dataclass(cls)
    return flatten(value)


def is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _register_dataclass(cls: type[Any]) -> None:
    names = tuple(f.name for f in dataclasses.fields(cls))

    def unflatten(_: object, children: Sequence[Any]) -> Any:
        values = dict(zip(names, children, strict=True))
        if issubclass(cls, dict):  # such as Hugging Face's ModelOutput: both views of the fields
            return cls(**values)
        made = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    optree.register_pytree_node(
        cls,
        lambda value: (tuple(getattr(value, name) for name in names), None, names),
        unflatten,  # type: ignore[arg-type]  # a dataclass is no Collection; optree takes it
        namespace=NAMESPACE,
    )


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for the leaf of this index while a tree is written or read."""

    index: int


# Classes that this process has sent: found again without a look into their module.
_seen_classes: dict[str, type[Any]] = {}


def encode_tree(node: Any) -> Any:
    match node:
        case Leaf(index):
            return index
        case None:
            return None
        case tuple() if hasattr(node, "_fields") or optree.is_structseq(node):
            return {"class": _class_name(type(node)), "items": [encode_tree(x) for x in node]}
        case tuple() | list():
            return {"kind": type(node).__name__, "items": [encode_tree(x) for x in node]}
        case _ if is_dataclass_instance(node):
            values = [getattr(node, f.name) for f in dataclasses.fields(node)]
            return {"class": _class_name(type(node)), "items": [encode_tree(x) for x in values]}
        case dict() if type(node) in (dict, OrderedDict):
            items = [[_encode_key(k), encode_tree(v)] for k, v in node.items()]
            return {"kind": type(node).__name__, "items": items}
    raise BoundaryError(
        f"a {type(node).__qualname__} can't cross between stages; return a tuple, list, dict, "
        "named tuple or dataclass"
    )


def _encode_key(key: Any) -> Any:
    if type(key) in (str, int):
        return key
    raise BoundaryError(f"dict key {key!r} can't cross between stages; use str or int keys")


def decode_tree(node: Any) -> Any:
    if node is None:
        return None
    if isinstance(node, int):
        # A bare object is a leaf to optree, whatever it is.
        return object()
    items = node["items"]
    if "class" in node:
        return _make(_find_class(node["class"]), [decode_tree(x) for x in items])
    match node["kind"]:
        case "tuple":
            return tuple(decode_tree(x) for x in items)
        case "list":
            return [decode_tree(x) for x in items]
        case "dict":
            return {key: decode_tree(value) for key, value in items}
        case "OrderedDict":
            return OrderedDict((key, decode_tree(value)) for key, value in items)
    raise BoundaryError(f"a boundary's description names an unknown container {node['kind']!r}")


def _make(cls: type[Any], values: list[Any]) -> Any:
    if optree.is_structseq_class(cls):  # such as torch.return_types.topk
        return cls(values)
    if issubclass(cls, tuple):
        return cls(*values)
    made = object.__new__(cls) if not issubclass(cls, dict) else None
    names = [f.name for f in dataclasses.fields(cls)]
    if made is None:
        return cls(**dict(zip(names, values, strict=True)))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


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
    is_container = isinstance(found, type) and (
        dataclasses.is_dataclass(found)
        or hasattr(found, "_fields")
        or optree.is_structseq_class(found)
    )
    if not is_container:
        raise BoundaryError(
            f"a stage sends a {name}, a class that this rank can't find; define it at the top "
            "level of a module that every rank imports"
        )
    cls: type[Any] = found
    return cls
