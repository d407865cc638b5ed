"""Trees opened to be cut along rows, or joined: parts of a value are made, not the same one again.

    opened                                   how, and how a part is made
    dataclasses                              by what their constructor takes; it is called again
    mappings that their class can't make     refused
    a PackedSequence                         refused: its rows do not lie together
    all other containers                     as in ``stage/trees.py``

What a dataclass sets beside its fields may follow from its rows (``self.rows = len(self.x)``), so
that only its constructor knows what a part of it has there. Whether it does is tried out on the
whole. This module cuts nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import optree
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock._torch_compat import pytree_node
from penstock.stage.mappings import Whole, holds_tensor
from penstock.stage.pytree import (
    Make,
    Open,
    attributes,
    flatten_in,
    how_to_open,
    is_carried,
    register_in,
    same_value,
)

__all__ = ["ROWS", "flatten_rows"]

# The optree namespace in which containers are opened so.
ROWS = "penstock.rows"


def flatten_rows(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of a tree, to be made again of other rows.

    Raises:
        ValueError: it holds a container that can't be made of other rows.
    """
    return flatten_in(ROWS, value, lambda cls: register_in(ROWS, cls, *_how_to_open(cls)))


def _how_to_open(cls: type[Any]) -> tuple[Open, Make]:
    if not dataclasses.is_dataclass(cls) and pytree_node(cls) is None:
        return _how_to_open_mapping(cls)
    if pytree_node(cls) is not None or issubclass(cls, dict):
        return how_to_open(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    taken = tuple(inspect.signature(cls.__init__).parameters)[1:]
    other = next((name for name in taken if name not in fields), None)

    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        if other is not None:
            _refuse(cls, f"its constructor takes {other}, which is none of its fields")
        held = attributes(value)
        children = [held.get(name) for name in taken]
        again = attributes(make(children, taken))
        for name, mine in held.items():
            if name not in again:
                _refuse(cls, f"its constructor sets no {name}")
            is_told = name in taken or is_carried(mine)
            if is_told and not _is_same(mine, again[name]):
                _refuse(cls, f"called with its fields, its constructor makes another {name}")
        return children, taken

    def make(children: Sequence[Any], taken: Any) -> Any:
        try:
            return cls(**dict(zip(taken, children, strict=True)))
        except Exception as error:
            _refuse(cls, f"its constructor fails when called with its fields: {error!r}", error)

    return open_, make


def _how_to_open_mapping(cls: type[Any]) -> tuple[Open, Make]:
    open_parts, make = how_to_open(cls)

    def open_(value: Any) -> tuple[Sequence[Any], Any]:
        children, context = open_parts(value)
        if isinstance(context, Whole) and holds_tensor(value):
            _refuse(cls, "called with its items, its constructor does not make it again")
        return children, context

    return open_, make


def _is_same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    mine, tree = flatten_rows(left)
    others, other_tree = flatten_rows(right)
    return tree == other_tree and all(map(_is_same_leaf, mine, others))


def _is_same_leaf(left: Any, right: Any) -> bool:
    if same_value(left, right):
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        left_nan, right_nan = left.isnan(), right.isnan()
        return same_value(left_nan, right_nan) and same_value(left[~left_nan], right[~right_nan])
    if isinstance(left, float) and isinstance(right, float):
        return math.isnan(left) and math.isnan(right)
    # Of objects of which nothing is known the constructor may make its own.
    return not (is_carried(left) or is_carried(right))


def _refuse(cls: type[Any], why: str, error: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"a {cls.__qualname__} can't be split into microbatches or merged: {why}; register it with "
        "torch.utils._pytree.register_pytree_node, or use ready microbatches and "
        "merge_outputs=False"
    ) from error


def _refuse_packed(_: Any) -> NoReturn:
    raise ValueError(
        "a PackedSequence can't be split into microbatches or merged: its rows do not lie "
        "together; use padded tensors and lengths, or ready microbatches (arg_mbs=, target_mbs=) "
        "and merge_outputs=False"
    )


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that it is a named tuple, too
    register_in(ROWS, PackedSequence, _refuse_packed, lambda _, packed: _refuse_packed(packed))
