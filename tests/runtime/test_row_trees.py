"""Containers cut along rows: what a dataclass sets beside its fields follows the part's rows."""

from __future__ import annotations

import copy
from collections import ChainMap, UserDict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
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

    def __post_init__(self) -> None:
        self.rows = len(self.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The same, in fields; one may be passed, and is made anew all the same."""

    batch: Batch
    rows: int | None = None
    later: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.batch.rows)
        object.__setattr__(self, "later", self.batch.x + 1)


class Counts(nn.Linear):
    def forward(self, batch: Batch) -> Batch:
        return Batch(super().forward(batch.x) / batch.rows)


def loss(output: Any, target: Batch) -> Tensor:
    return F.mse_loss(output.x / output.rows, target.x * target.rows)


def test_attributes_beside_the_fields_are_rebuilt() -> None:
    plain = Counts(DIM, DIM)
    module = copy.deepcopy(plain)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, CPU), 2, loss)
    x = torch.randn(4, DIM)
    output = schedule.step(Batch(x), target=Batch(x))
    for part in x.split(2):
        (loss(plain(Batch(part)), Batch(part)) / 2).backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert output.rows == len(output.x) == 4


def test_fields_that_follow_from_others_are_made_anew() -> None:
    x = torch.randn(5, DIM)
    parts = split_tree({"told": Told(batch=Batch(x))}, 2)
    for part, rows in zip(parts, x.tensor_split(2), strict=True):
        told = part["told"]
        assert told.rows == told.batch.rows == len(rows)
        assert torch.equal(told.later, rows + 1)
    assert split_tree(Told(batch=Batch(torch.tensor([1.0, torch.nan]))), 2)[1].batch.rows == 1
    merged = merge_chunks(split_tree({"told": Told(batch=Batch(x[:4]))}, 2))["told"]
    assert (merged.rows, merged.batch.rows) == (4, 4)
    assert torch.equal(merged.later, x[:4] + 1)


@dataclass
class Scaled:
    x: Tensor
    scale: InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.weight = scale * len(self.x)


@dataclass
class Doubled:
    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


@dataclass
class Listed:
    parts: list[Tensor]

    def __post_init__(self) -> None:
        self.parts = list(self.parts)


@dataclass
class Once:
    x: Tensor
    is_ready: bool = False

    def __post_init__(self) -> None:
        if self.is_ready:
            raise RuntimeError("ready already")
        self.is_ready = True


def changed(batch: Batch, **values: Any) -> Batch:
    vars(batch).update(values)
    return batch


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Scaled(torch.ones(4, 1), 2.0), "scale differs, or is none of its fields"),
        (Doubled(torch.ones(4, 1)), "x differs"),
        (Listed([torch.ones(4, 1)]), "parts differs"),
        (Once(torch.ones(4, 1)), r"its constructor fails: RuntimeError\('ready alre"),
        (changed(Batch(torch.ones(4, 1)), rows=7), "rows differs"),
        (
            changed(Batch(torch.ones(4, 1)), extra=[1.0]),
            "extra differs",
        ),
    ],
)
def test_a_dataclass_that_its_constructor_cannot_rebuild_is_refused(value: Any, why: str) -> None:
    said = rf"a {type(value).__name__} can't be split, moved or sent: .*{why}.*; use a dict, or reg"
    with pytest.raises(BoundaryError, match=said):
        split_tree(value, 2)
    with pytest.raises(BoundaryError, match=said):
        merge_chunks([{"out": value}] * 2)
    with pytest.raises(BoundaryError, match=said):
        describe(value)


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
