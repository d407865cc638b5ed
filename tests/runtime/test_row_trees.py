"""Containers cut along rows: dataclasses by their fields, and mappings of other classes."""

from __future__ import annotations

import copy
from collections import ChainMap, UserDict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from penstock import BoundaryError, PipelineStage, ScheduleGPipe
from penstock.runtime.microbatch import merge_chunks, split_tree
from penstock.stage.boundary import describe

DIM = 4
CPU = torch.device("cpu")


@dataclass
class Batch:
    x: Tensor

    @cached_property
    def rows(self) -> int:
        return len(self.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    batch: Batch
    later: Tensor | None = None


class Counts(nn.Linear):
    def forward(self, batch: Batch) -> Batch:
        return Batch(super().forward(batch.x) / batch.rows)


def loss(output: Any, target: Batch) -> Tensor:
    return F.mse_loss(output.x / output.rows, target.x * target.rows)


def test_cached_properties_are_computed_anew() -> None:
    plain = Counts(DIM, DIM)
    module = copy.deepcopy(plain)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, CPU), 2, loss)
    x = torch.randn(4, DIM)
    batch = Batch(x)
    assert batch.rows == 4
    output = schedule.step(batch, target=Batch(x))
    for part in x.split(2):
        (loss(plain(Batch(part)), Batch(part)) / 2).backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert output.rows == len(output.x) == 4


def test_a_dataclass_is_cut_by_its_fields() -> None:
    x = torch.randn(5, DIM)
    parts = split_tree({"told": Told(batch=Batch(x), later=x + 1)}, 2)
    for part, rows in zip(parts, x.tensor_split(2), strict=True):
        told = part["told"]
        assert type(told) is Told and told.batch.rows == len(rows)
        assert torch.equal(told.later, rows + 1)
    merged = merge_chunks(parts)["told"]
    assert merged.batch.rows == 5 and torch.equal(merged.later, x + 1)


@dataclass
class Scaled:
    x: Tensor
    scale: InitVar[float]


@dataclass
class Doubled:
    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


@dataclass
class Sized:
    x: Tensor
    rows: int

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.rows = len(x)


@dataclass
class Holding:
    parts: list[Batch]

    def __post_init__(self) -> None:
        self.parts = list(self.parts)


def changed(batch: Batch) -> Batch:
    vars(batch).update(extra=[1.0])
    return batch


@pytest.mark.parametrize(
    "value",
    [
        Scaled(torch.ones(4, 1), 2.0),
        Doubled(torch.ones(4, 1)),
        Sized(torch.ones(4, 1)),
        Holding([Batch(torch.ones(4, 1))]),
        changed(Batch(torch.ones(4, 1))),
    ],
)
def test_a_dataclass_that_holds_more_than_its_fields_is_refused(value: Any) -> None:
    said = rf"a {type(value).__name__} can't be split, moved or sent: .*; use a dict, or register"
    with pytest.raises(BoundaryError, match=said):
        split_tree(value, 2)
    with pytest.raises(BoundaryError, match=said):
        merge_chunks([{"out": value}] * 2)
    with pytest.raises(BoundaryError, match=said):
        describe(value)


@dataclass
class Settings:
    scale: float
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.sizes = (1, 2)


def test_a_dataclass_of_plain_values_goes_to_every_microbatch() -> None:
    settings = Settings(2.0)
    for part in split_tree({"x": torch.ones(4, 1), "settings": settings}, 2):
        assert part["settings"] is settings


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("is_bare", [True, False])
def test_a_packed_sequence_is_refused(enforce_sorted: bool, is_bare: bool) -> None:
    packed = pack_sequence([torch.ones(2, DIM)] * 4, enforce_sorted=enforce_sorted)
    value = packed if is_bare else ([packed], torch.ones(4))
    with pytest.raises(ValueError, match=r"a PackedSequence can't be split .* padded tensors"):
        split_tree(value, 2)
    with pytest.raises(ValueError, match="or merged: its rows do not lie together"):
        merge_chunks([value, value])


# --- mappings of other classes than dict ---------------------------------------------------------


class Inputs(dict[str, Any]):
    """Items as attributes too."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        vars(self).update(items)


class Beside(UserDict[str, Any]):
    """A tensor beside the items."""

    lengths: Tensor


def beside() -> Beside:
    value = Beside(scale=2.0)
    value.lengths = torch.ones(5)
    return value


X = torch.randn(5, DIM)


@pytest.mark.parametrize(
    "batch",
    [Inputs({"x": X}), UserDict(x=X), ChainMap({"x": X}), UserDict(held=[{"x": X}]), beside()],
)
def test_a_mapping_of_tensors_in_no_registry_is_refused(batch: Any) -> None:
    said = rf"a {type(batch).__name__} can't be split, moved or sent: pass dict\(\.\.\.\) of it"
    with pytest.raises(BoundaryError, match=said):
        split_tree([batch], 2)
    with pytest.raises(BoundaryError, match=said):
        merge_chunks([batch, batch])
    with pytest.raises(BoundaryError, match=said):
        describe(batch)


def test_a_mapping_of_plain_values_goes_to_every_microbatch() -> None:
    config = Inputs({"scale": 2.0, "sizes": [1, 2]})
    for part in split_tree((X, config), 2):
        assert part[1] is config
