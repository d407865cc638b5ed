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

from penstock import BoundaryError, Pipeline, PipelineStage, ScheduleGPipe
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


class Encoded(UserDict[str, Any]):
    """As those of tokenizers: what stands beside the items is not theirs."""

    def __init__(self, items: Mapping[str, Any], lengths: Any = None) -> None:
        super().__init__(items)
        self.num_sequences: int | None = None
        self.lengths = lengths


class Unmakeable(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)


def told(encoded: Encoded) -> Encoded:
    encoded.num_sequences, encoded.lengths = 1, [object()]
    return encoded


X = torch.randn(5, DIM)


@pytest.mark.parametrize(
    "batch", [Inputs({"x": X}), told(Encoded({"x": X})), UserDict(x=X), ChainMap({"x": X})]
)
def test_a_mapping_is_split_and_merged_like_a_dict(batch: Any) -> None:
    first, second = split_tree([batch], 2)
    assert type(first[0]) is type(second[0]) is type(batch)
    assert [len(part[0]["x"]) for part in (first, second)] == [3, 2]
    (merged,) = merge_chunks([first, second])
    assert torch.equal(merged["x"], X)
    if isinstance(batch, Inputs):
        assert second[0].x is second[0]["x"]
    if isinstance(batch, Encoded):
        assert (second[0].num_sequences, second[0].lengths) == (1, None)


@pytest.mark.parametrize("cls", [Inputs, Unmakeable])
def test_a_mapping_of_plain_values_goes_to_every_microbatch(cls: type[Any]) -> None:
    config = Inputs({"scale": 2.0, "sizes": [1, 2]}) if cls is Inputs else Unmakeable(scale=2.0)
    for part in split_tree((X, config), 2):
        assert type(part[1]) is cls
        assert part[1] == config


@pytest.mark.parametrize("batch", [Unmakeable(x=X), Encoded({"x": X}, lengths=torch.ones(5))])
def test_a_mapping_that_can_not_be_made_of_its_items_is_refused(batch: Any) -> None:
    said = rf"a {type(batch).__name__} can't be split, moved or sent: .*its items"
    with pytest.raises(BoundaryError, match=said):
        split_tree(batch, 2)
    with pytest.raises(BoundaryError, match=said):
        describe(batch)


def test_mappings_enter_and_cross() -> None:
    class Block(nn.Linear):
        def forward(self, batch: Any) -> Any:
            return Encoded({"x": super().forward(batch["x"]).relu()})

    blocks = [Block(DIM, DIM), Block(DIM, DIM)]
    plain = copy.deepcopy(nn.Sequential(*blocks))
    stages = [PipelineStage(block, i, 2, CPU) for i, block in enumerate(blocks)]
    pipe = Pipeline(stages, loss_fn=lambda out: out["x"].square().mean(), n_microbatches=2, ranks=2)
    batch = told(Encoded({"x": torch.randn(4, DIM)}))
    pipe.step(batch)
    for part in split_tree(batch, 2):
        (plain(part)["x"].square().mean() / 2).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
