"""Where a model can't be cut at a place, the error names the nearest one that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import PartitionError, SplitPoint, pipeline
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
