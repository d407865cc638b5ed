"""Numbers of shapes: what they are held under, and that they do not grow without end."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import PipelineStage
from penstock.runtime import step_sync as shapes
from penstock.runtime.step_sync import ShapeCache, run_conditions
from tests.agreement import Twins
from tests.models import DIM, features, mlp


def test_a_device_without_autocast() -> None:
    device = torch.device("meta")
    stage = PipelineStage(nn.Linear(DIM, DIM, device=device), 0, 1, device)
    assert run_conditions([stage], device) == (None, True, True, True)


def test_autocast_training_and_what_is_frozen_are_conditions() -> None:
    device = torch.device("cpu")
    stage = PipelineStage(nn.Linear(DIM, DIM).eval(), 0, 1, device)
    stage.submod.bias.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert run_conditions([stage], device) == (torch.bfloat16, False, True, False)


def learned(book: ShapeCache, rows: int) -> tuple[list[int], bool, bool]:
    ids = book.ids([(torch.ones(rows),)], [{}])
    return ids, book.learn(ids), book.was_cleared


def test_after_many_shapes_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MAX_SHAPES", 2)
    book = ShapeCache()
    assert [learned(book, rows) for rows in (1, 2, 1, 3, 3, 1)] == [
        ([0], True, False),
        ([1], True, False),
        ([0], False, False),
        ([2], True, True),
        ([2], False, False),
        ([3], True, False),
    ]


def test_conditions_are_forgotten_with_the_shapes_met_under_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shapes, "MAX_SHAPES", 2)
    book, met = ShapeCache(), []
    for condition in (0, 1, 0, 2, 3, 0, 2):
        (number,) = book.ids([(torch.ones(1),)], [{}], (condition,))
        book.learn([number])
        met.append(number)
    # All but the last are forgotten with the third and the fifth; no number comes again.
    assert met == [0, 1, 0, 2, 3, 4, 5]


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_training_goes_on_when_shapes_are_forgotten(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "MAX_SHAPES", 2)
    both = Twins(mlp(4), F.mse_loss, schedule=schedule, ranks=2, n_microbatches=2)
    for step, rows in enumerate((4, 6, 8, 4, 10, 6, 4)):
        inputs, target = features(rows, step)
        both.step(inputs, target=target)
