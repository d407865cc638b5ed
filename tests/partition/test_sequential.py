"""Cutting a sequence of layers: every layer once and in order, or a clear error."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock import PartitionError
from penstock.partition.sequential import cut, even_split, layers_of


def layers(num: int) -> dict[str, nn.Module]:
    return {f"layer{i}": nn.Linear(2, 2) for i in range(num)}


@given(st.integers(1, 40), st.integers(1, 40))
def test_even_splits_are_even(num_stages: int, more: int) -> None:
    split = even_split(num_stages + more - 1, num_stages)
    assert len(split) == num_stages
    assert sum(split) == num_stages + more - 1
    assert max(split) - min(split) <= 1
    assert split == sorted(split, reverse=True)


def test_more_stages_than_layers() -> None:
    with pytest.raises(PartitionError, match="2 layers can't make 3 stages"):
        even_split(2, 3)


@pytest.mark.parametrize(
    "split",
    [
        [2, 1, 3],
        [["layer0", "layer1"], ["layer2"], ["layer3", "layer4", "layer5"]],
        (("layer0", "layer1"), ("layer2",), ("layer3", "layer4", "layer5")),
    ],
)
def test_counts_and_names_say_the_same(split: Any) -> None:
    every = layers(6)
    chains = cut(every, split)
    names = [[name for name, _ in chain.named_children()] for chain in chains]
    assert names == [["layer0", "layer1"], ["layer2"], ["layer3", "layer4", "layer5"]]
    for chain in chains:
        for name, layer in chain.named_children():
            assert layer is every[name]


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ([2, 1], "counts 3 layers, but there are 4"),
        ([2, 3], "counts 5 layers, but there are 4"),
        ([4, 0], "at least one"),
        ([5, -1], "at least one"),
        ([["layer0", "layer1"], [], ["layer2", "layer3"]], "leave no stage empty"),
        ([["layer0"], ["layer1", "layer2"]], r"left over \['layer3'\]"),
        ([["layer0", "layer1"], ["layer2", "layer3", "head"]], r"unknown \['head'\]"),
        ([["layer1", "layer0"], ["layer2", "layer3"]], r"in order.*named \[\['layer1'"),
        ([["layer0", "layer1"], ["layer1", "layer2", "layer3"]], "once"),
    ],
)
def test_wrong_splits(split: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        cut(layers(4), split)


def test_a_chain_passes_one_value_on() -> None:
    """All but the last wrap their output, so that a tuple is not taken for several arguments."""
    first, last = cut({"a": nn.Identity(), "b": nn.Identity()}, [1, 1])
    value = (torch.ones(1), 2)
    assert first(value) == (value,)
    assert last(value) is value


# --- which layers a model has ----------------------------------------------------------------


def test_a_layer_in_several_places_is_a_layer_in_each() -> None:
    """An activation that a user made once, say: leaving it out would be another model."""
    act, linear = nn.ReLU(), nn.Linear(2, 2)
    model = nn.Sequential(linear, act, nn.Linear(2, 2), act, linear)
    found = layers_of(model)
    assert list(found) == ["0", "1", "2", "3", "4"]
    assert all(layer is model[i] for i, layer in enumerate(found.values()))
    assert list(layers_of([linear, act, linear]).values()) == [linear, act, linear]


def test_layers_keep_their_names() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), head=nn.Sequential(nn.ReLU())))
    assert list(layers_of(model)) == ["embed", "head"]
    assert list(layers_of(nn.Sequential())) == []


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class OwnCall(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x)
        return out + x


class NameOnly(nn.Sequential):
    pass


def hooked(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    getattr(model, f"register_{kind}")(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (OwnForward(nn.Linear(2, 2)), "the OwnForward does more"),
        (OwnCall(nn.Linear(2, 2)), "the OwnCall does more"),
        ([nn.Linear(2, 2), torch.relu], "item 1 of the list is a builtin_function"),
        ([None], "item 0 of the list is a NoneType"),
        (hooked("forward_hook"), "hooks on the whole"),
        (hooked("forward_pre_hook"), "hooks on the whole"),
        (hooked("full_backward_hook"), "hooks on the whole"),
        (hooked("full_backward_pre_hook"), "hooks on the whole"),
    ],
)
def test_models_that_are_no_sequence_are_refused(model: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        layers_of(model)


def test_a_subclass_that_is_only_a_name_is_a_sequence() -> None:
    assert list(layers_of(NameOnly(nn.Linear(2, 2)))) == ["0"]
