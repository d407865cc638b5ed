"""Where stages live, and what of a batch is brought there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils.rnn import pack_padded_sequence

from penstock import Pipeline, StageError
from penstock.runtime.comm.process_group import chosen_device, make_transport
from penstock.runtime.step import is_placed, moved

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


@pytest.mark.parametrize(("count", "chosen"), [(0, "cuda:5"), (1, "cuda:0"), (8, "cuda:5")])
def test_a_process_may_see_its_own_device_alone(
    count: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert chosen_device("cuda") == torch.device(chosen)


@dataclass
class Held:
    x: torch.Tensor


def test_tensors_are_moved_and_all_else_stays() -> None:
    batch = {"a": [torch.ones(2), Held(torch.ones(3))], "b": ("x", None, 3)}
    found = moved(batch, META)
    assert found["a"][0].device == found["a"][1].x.device == META
    assert found["b"] == ("x", None, 3)
    assert not is_placed(batch) and is_placed(found)


def test_objects_with_a_to_method_are_moved() -> None:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    packed = pack_padded_sequence(torch.ones(3, 2), torch.tensor([3, 1]), enforce_sorted=False)
    mask = create_block_mask(causal, 2, None, 128, 128, device="cpu")
    found = moved({"packed": packed, "mask": mask}, META)
    assert found["packed"].data.device == META
    assert found["packed"].batch_sizes.device.type == "cpu"
    assert found["mask"].kv_num_blocks.device == META


def test_a_pipeline_moves_its_inputs_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # What the loss is given says nothing of the batch.
    weights = {"weight": torch.ones(2, device=META)}
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2), loss_kwargs=weights)
    assert given[-1][0][0].device == given[-1][1]["target"].device == META
    # Lengths stay where they are needed, beside what has been placed.
    lengths = torch.ones(4, dtype=torch.int64)
    pipe.eval(torch.ones(4, 2, device=META), lengths)
    assert given[-1][0][1] is lengths


def test_processes_are_joined_on_the_cpu_and_cuda_alone() -> None:
    with pytest.raises(StageError, match="stages on mps can't be joined over processes"):
        make_transport(dist.ProcessGroup(0, 1), torch.device("mps"), 0, 1.0)
