"""Where stages live, and what of a batch is brought there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.runtime.group import chosen_device
from penstock.runtime.moving import moved

META = torch.device("meta")


@pytest.mark.parametrize(
    ("asked", "local_rank", "chosen"),
    [
        ("cuda", "3", "cuda:3"),
        (torch.device("cuda"), "0", "cuda:0"),
        ("cuda:1", "3", "cuda:1"),
        ("cpu", "3", "cpu"),
        ("cpu", None, "cpu"),
        ("meta", "1", "meta"),
    ],
)
def test_a_device_without_a_number_is_this_processs_own(
    asked: Any, local_rank: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert chosen_device(asked) == torch.device(chosen)


@pytest.mark.parametrize(
    ("local_rank", "gpus", "chosen"),
    [("2", True, "cuda:2"), (None, True, "cpu"), ("2", False, "cpu")],
)
def test_where_none_is_asked_for_it_is_torchruns(
    local_rank: str | None, gpus: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert chosen_device(None) == torch.device(chosen)


def test_tensors_on_the_cpu_are_moved_and_all_else_stays() -> None:
    there = torch.ones(1, device=META)
    batch = {"a": [torch.ones(2), there], "b": ("x", None, 3)}
    found = moved(batch, META)
    assert found["a"][0].device == META and found["a"][1] is there
    assert found["b"] == ("x", None, 3)
    assert moved(batch, torch.device("cpu")) is batch


def test_a_pipeline_moves_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a device that computes nothing here: what arrives is looked at, and that is all."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = Pipeline(model, loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=2, split=[1, 1])
    given: list[Any] = []
    for way in ("step", "eval"):
        monkeypatch.setattr(pipe._schedule, way, lambda *a, **k: given.append((a, k)))
    monkeypatch.setattr(pipe._schedule, "losses", torch.zeros(2))
    pipe.device = META
    losses: list[torch.Tensor] = []
    for run in (pipe.step, pipe.eval):
        run(torch.ones(4, 2), target=torch.ones(4, 2), mask=torch.ones(4), losses=losses)
    for args, kwargs in given:
        assert args[0].device == kwargs["target"].device == kwargs["mask"].device == META
        assert kwargs["losses"] is losses
