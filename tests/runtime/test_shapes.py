"""Ids of shapes: the conditions that they depend on, and that caches do not grow without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import PipelineStage
from penstock.runtime import bound_program
from penstock.runtime import shape_ids as ids
from penstock.runtime.comm.agreement import BatchFacts
from penstock.runtime.shape_ids import condition_id, shape_ids
from penstock.runtime.step import StepState
from tests.agreement import Twins
from tests.models import DIM, features, mlp


@dataclass
class Fields:
    """A container with a value that is no child."""

    x: Any
    number: int


def test_a_device_without_autocast() -> None:
    device = torch.device("meta")
    stage = PipelineStage(nn.Linear(DIM, DIM, device=device), 0, 1, device)
    assert condition_id([stage], device, (), 0) == condition_id([stage], device, (), 1)


def test_autocast_training_and_frozen_parameters_are_conditions() -> None:
    device = torch.device("cpu")
    stage = PipelineStage(nn.Linear(DIM, DIM), 0, 1, device)
    ids = [condition_id([stage], device, (), 0)]
    stage.submod.eval()
    ids.append(condition_id([stage], device, (), 0))
    stage.submod.bias.requires_grad_(False)
    ids.append(condition_id([stage], device, (), 0))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            ids.append(condition_id([stage], device, (), 0))
    assert len(set(ids)) == 5


def test_an_id_is_of_shapes_values_and_conditions() -> None:
    one, x = torch.ones(1), torch.ones(3)

    def number(*args: object, conditions: tuple[int, ...] = (7,), step: int = 0) -> int:
        (found,) = shape_ids([args], [{}], conditions, step)
        return found

    same = number(x, 2)
    assert same == number(x + 1, 2, step=1)
    # Floats may change at every step.
    assert number(x, 2.0) == number(x, 3.0)
    others = [number(x, 3), number(x, 2.0), number(x, True), number(one, 2), number(x.int(), 2)]
    others += [number(x, 2, conditions=(8,)), number(x, None), number(x)]
    others += [number(x.clone().requires_grad_(), 2)]
    assert len({same, *others}) == 1 + len(others)
    assert number(Fields(x, 2)) == number(Fields(x, 2)) != number(Fields(x, 3))
    # An object may have been mutated since the last step.
    what = object()
    assert number(what) == number(what) != number(what, step=1)


def test_remote_keyword_arguments_are_conditions() -> None:
    def number(step: int, *kwargs: dict[str, torch.Tensor]) -> int:
        return condition_id([], torch.device("cpu"), kwargs, step)

    short, long = {"x": torch.ones(3)}, {"x": torch.ones(4)}
    assert number(0, short) == number(1, short)
    assert number(0, short) != number(0, long)
    assert number(0, {}) == number(0)


class Completed(nn.Module):
    """Takes keyword arguments from other ranks."""

    def complete_call(self, args: Any, kwargs: Any, others: Any) -> Any:
        return {**kwargs, **others}


def test_remote_keyword_arguments_are_forgotten_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ids, "MAX_SHAPES", 2)
    first, last = ids.RemoteKwargs(), ids.RemoteKwargs()
    stage = PipelineStage(Completed(), 0, 1, torch.device("cpu"))
    for length in (3, 4, 3, 5, 6, 5, 3):
        told = last.describe(1, length, [{"labels": torch.ones(length)}], [stage])
        facts = [BatchFacts(0), BatchFacts(length, kwargs=told)]
        step = StepState(1)
        step.args = [()]
        for each in (first, last):
            each.note(facts)
        first.complete(step, facts, stage)
        assert step.kwargs[0]["labels"].meta.shape == (length,)


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_training_goes_on_when_shapes_are_forgotten(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_program, "MAX_SHAPES", 2)
    both = Twins(mlp(4), F.mse_loss, schedule=schedule, ranks=2, n_microbatches=2)
    for step, rows in enumerate((4, 6, 8, 4, 10, 6, 4)):
        inputs, target = features(rows, step)
        both.step(inputs, target=target)
