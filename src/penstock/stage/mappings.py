"""Mappings of other classes than dict's own, opened like dicts where they can be made again.

    Batch({"ids": ids, "mask": mask})    opened: called with the items, its class makes it again
      beside them, plain attributes      carried along as they are; other objects are not
    plain values alone, or not made so   one value, given on as it is

Such are Hugging Face's ``BatchEncoding``, ``collections.UserDict``, and users' subclasses of dict.
This module knows no optree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.stage.tensor_meta import plain_tag

__all__ = ["Whole", "holds_tensor", "is_mapping", "mapping_parts"]


class Whole:
    """A mapping that is not opened.

    Args:
        value: the mapping.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Whole) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_mapping(cls: type[Any]) -> bool:
    """Whether values of a class are mappings, and no modules."""
    return issubclass(cls, Mapping) and not issubclass(cls, nn.Module)


def holds_tensor(value: Any) -> bool:
    """Whether a tensor is in a value, or in lists, tuples and mappings there."""
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_tensor, value))
    return isinstance(value, Tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return plain_tag(value) is not None


def mapping_parts(
    cls: type[Any],
) -> tuple[Callable[[Any], tuple[Sequence[Any], Any]], Callable[[Sequence[Any], Any], Any]]:
    """What opens a mapping of a class, and what makes one of its parts.

    The first gives the values, and as context their keys and what is carried beside them, or no
    values and a ``Whole``; the second takes these.
    """

    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        if _is_plain(value):
            return (), Whole(value)
        items = dict(value)
        beside = _beside(value, items)
        return (
            ((), Whole(value)) if beside is None else (list(items.values()), (tuple(items), beside))
        )

    def make(children: Sequence[Any], context: Any) -> Any:
        if isinstance(context, Whole):
            return context.value
        keys, beside = context
        made = cls(dict(zip(keys, children, strict=True)))
        for name, mine in beside.items():
            object.__setattr__(made, name, mine)
        return made

    return open_, make


def _beside(value: Any, items: dict[Any, Any]) -> dict[str, Any] | None:
    """The plain attributes that its class does not set by itself when called with the items.

    None where it does not make the same mapping of them.
    """
    try:
        made = type(value)(dict(items))
        again = dict(made)
    except Exception:  # whatever its constructor does with what it is not made for
        return None
    if not _is_same(items, again):
        return None
    theirs = getattr(made, "__dict__", {})
    beside = {}
    for name, mine in getattr(value, "__dict__", {}).items():
        other = theirs.get(name)
        if _is_same(mine, other):
            continue
        if holds_tensor(mine):
            return None
        if plain_tag(mine) is not None and (type(other) is not type(mine) or other != mine):
            beside[name] = mine
    return beside


def _is_same(left: Any, right: Any) -> bool:
    """Whether two values are one object, or containers of the same ones."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(right) is type(left):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return left is right
