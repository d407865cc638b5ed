"""Where a model can't be cut at a place, the error lists the boundaries at which it can."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError
from penstock.partition.forward.by_module import NotByModule, split_by_module
from tests.partition.odd_models import DIM, NetBase, TwiceLate

X = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))


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
    ("model", "cuts", "valid"),
    [
        (Writes(), [3, 1], ["blocks.0", "blocks.1", "blocks.2"]),
        (Draws(), [3, 1], ["blocks.0", "blocks.1", "blocks.2"]),
        (TwiceLate(), [2, 2], ["blocks.0", "head"]),
        (NetBase(), ["embed"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),
    ],
)
def test_the_valid_boundaries_are_listed(model: nn.Module, cuts: Any, valid: list[str]) -> None:
    with pytest.raises(PartitionError, match=re.escape(f"before {', '.join(valid)}")):
        split_by_module(model, cuts, (X,))
    for name in valid:
        split_by_module(model, [name], (X,))


def test_no_boundary_is_listed_where_the_forward_needs_values() -> None:
    with pytest.raises(NotByModule, match=r"needs the value of .* move that code into a module"):
        split_by_module(Looks(), [2, 2], (X,))
    with pytest.raises(NotByModule, match="needs the value of"):
        split_by_module(Inner(), ["encoder.blocks.2"], (X,))
    split_by_module(Inner(), ["middle"], (X,))
