"""Where a model can't be cut at a place, the error names the nearest one that works."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, SplitPoint, pipeline
from penstock.partition.forward.by_module import NotByModule, split_by_module
from penstock.partition.forward.nearest import Cut, nearest_place
from tests.partition.odd_models import DIM, NetBase, TwiceLate

X = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))


def cut_before(*positions: int) -> list[Cut]:
    return [Cut(label=f"before {at}", position=at) for at in positions]


def test_the_nearest_of_all_moves_and_between_its_neighbours() -> None:
    tried: list[list[int]] = []

    def works(cuts: Any) -> bool:
        tried.append([cut.position for cut in cuts])
        return tried[-1] == [1, 6]

    move = nearest_place(cut_before(3, 6), cut_before(*range(9)), works)
    assert move is not None
    assert (move.wrong.label, move.right.label) == ("before 3", "before 1")
    # Never past another cut, never to the very beginning.
    assert all(0 < first < second for first, second in tried)
    assert nearest_place(cut_before(3), cut_before(3, 4), lambda cuts: False) is None
    assert nearest_place(cut_before(3, 6), cut_before(2), works, boundaries=[1]) is None


class Writes(NetBase):
    """The second block writes into what the first two stages have, late."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Draws(NetBase):
    """One mask for the last two blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i == 2:
                mask = torch.rand(DIM) < 0.5
            x = block(x) * (mask if i > 1 else 1)
        return self.head(x)


class Inner(nn.Module):
    """An encoder whose forward looks at values, then a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Looks()
        self.middle = nn.Linear(DIM, DIM)
        self.decoder = NetBase()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.middle(self.encoder(x)))
        return y


class Looks(NetBase):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else block(-x)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "cuts", "wrong", "right"),
    [
        (Writes(), [3, 1], "blocks.3", "blocks.2"),
        (Draws(), [3, 1], "blocks.3", "blocks.2"),
        (TwiceLate(), [2, 2], "blocks.2", "blocks.0"),
        (TwiceLate(), ["blocks.1"], "blocks.1", "blocks.0"),
        (NetBase(), ["embed"], "embed", "blocks.0"),
    ],
)
def test_by_module(model: nn.Module, cuts: Any, wrong: str, right: str) -> None:
    told = f"the nearest place that works is 'before {right}', instead of 'before {wrong}'"
    with pytest.raises(PartitionError, match=re.escape(told)):
        split_by_module(model, cuts, (X,))
    split_by_module(model, [right], (X,))


def test_by_module_around_what_looks_at_values() -> None:
    told = "encoder can be left whole: the nearest place that works is 'before middle'"
    with pytest.raises(NotByModule, match=rf"needs the value of .*; {told}"):
        split_by_module(Inner(), ["encoder.blocks.2"], (X,))
    split_by_module(Inner(), ["middle"], (X,))


def test_by_module_nowhere() -> None:
    with pytest.raises(NotByModule, match="no other place between these modules works"):
        split_by_module(Looks(), [2, 2], (X,))


@pytest.mark.parametrize(
    ("model", "spec", "told"),
    [
        (TwiceLate(), "blocks.0", "runs 2 times .*place that works is 'after embed'$"),
        (NetBase(), "embed", "stage 0 of 2 is empty.*works is 'before blocks.0', instead of"),
    ],
)
def test_captured(model: nn.Module, spec: str, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        pipeline(model, (X,), split_spec={spec: SplitPoint.BEGINNING})
    pipeline(model, (X,), split_spec={"embed": SplitPoint.END})
