"""One notion of a tree: what is opened, made again, and told to another rank."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from penstock import BoundaryError
from penstock.stage import pytree
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.pytree import decode, encode, flatten


class Tagged:
    """Registered with a context that is compared, and may be anything."""

    def __init__(self, value: Any, tag: Any) -> None:
        self.value = value
        self.tag = tag


_pytree.register_pytree_node(
    Tagged, lambda t: ([t.value], t.tag), lambda values, tag: Tagged(values[0], tag)
)


@dataclass
class Static:
    """A dataclass of which torch's pytree is told that one field is no part of the tree."""

    value: Tensor
    table: Any


_pytree.register_pytree_node(
    Static, lambda s: ([s.value], s.table), lambda values, table: Static(values[0], table)
)


@dataclass
class Lazy:
    value: Tensor

    @cached_property
    def double(self) -> Tensor:
        return self.value * 2


def test_a_class_is_opened_as_registered_with_torch() -> None:
    value = torch.ones(2)
    assert flatten(Static(value, "table"))[0] == [value]
    assert flatten([Tagged((1, 2), "tag"), 3])[0] == [1, 2, 3]


def test_contexts_are_compared() -> None:
    spec = describe(Tagged(torch.ones(2), {"unhashable": [1]}))
    spec.tensors(Tagged(torch.ones(2), {"unhashable": [1]}))
    with pytest.raises(BoundaryError, match="structure"):
        spec.tensors(Tagged(torch.ones(2), {"unhashable": [2]}))


def test_contexts_of_tensors_are_compared() -> None:
    def tagged(*items: float) -> Any:
        return flatten(Tagged(1, torch.tensor(items)))[1]

    assert tagged(1.0, 2.0) == tagged(1.0, 2.0)
    assert tagged(1.0, 2.0) != tagged(1.0, 3.0)
    assert tagged(1.0, 2.0) != tagged(1.0)
    assert flatten(Tagged(1, {"a": torch.ones(2)})) != flatten(Tagged(1, {"a": torch.ones(2)}))


def test_cached_properties_do_not_cross() -> None:
    lazy = Lazy(torch.ones(2))
    assert torch.equal(lazy.double, torch.full((2,), 2.0))
    assert len(flatten(lazy)[0]) == 1


def test_a_context_that_cannot_be_encoded() -> None:
    spec = describe(Tagged(torch.ones(2), test_contexts_are_compared))
    with pytest.raises(
        BoundaryError, match=r"a container can't cross .* context .*holds a function"
    ):
        spec.encode()


def test_a_decoded_spec_is_the_encoded_one() -> None:
    spec = describe([Tagged({"b": torch.ones(2), "a": 1}, ("x", None, 2.5))])
    decoded = BoundarySpec.decode(spec.encode())
    assert (decoded.tree, decoded.leaves) == (spec.tree, spec.leaves)
    (tagged,) = decoded.arguments([torch.ones(2)])
    assert (tagged.value["a"], tagged.tag) == (1, ("x", None, 2.5))


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.float64(2.0), r"a numpy\.float64, which can't cross .*of NumPy's numbers \.item\(\)"),
        (np.int32(2), r"a numpy\.int32, .*of NumPy's numbers \.item\(\)"),
        (Colour.RED, r"a .*Colour, .*of an enum's member its \.value"),
        (Name("x"), r"a .*Name, .* return tensors, numbers, strings"),
        (object(), "a object, .* tensors, numbers, strings, None and containers"),
    ],
)
def test_leaves_that_cannot_cross(value: Any, said: str) -> None:
    with pytest.raises(BoundaryError, match=f"output 1 is {said}"):
        describe((torch.ones(2), value))


def test_a_decoded_structure_is_that_of_the_values() -> None:
    """So that a later rank recognises the values of its own modules."""
    value = [Static(torch.ones(2), "table"), Lazy(torch.ones(2)), {"b": (1, None), "a": 2}]
    leaves, tree = flatten(value)
    decoded = decode(encode(tree))
    assert decoded == tree
    made: Any = optree.tree_unflatten(decoded, leaves)
    assert [type(each) for each in made] == [Static, Lazy, dict]
    assert list(made[2]) == ["b", "a"]


def test_a_default_factory_is_decoded_by_a_rank_that_has_not_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pytree, "_known_classes", {})
    for factory in (list, int):
        _, tree = flatten(defaultdict(factory, x=torch.ones(1)))
        assert decode(encode(tree)) == tree
