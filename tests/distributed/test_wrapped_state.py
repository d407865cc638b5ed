"""The state of stages that are wrapped: the plain model's names, whole, in and out of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline, PipelineStage
from penstock.errors import PartitionError
from penstock.training.checkpoint import load, save
from tests.distributed.replicas import CPU, WRAPS, batch, make_meshes, whole
from tests.processes import run_ranks


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 4)
    )


def make_pipe(wrap: str, seed: int) -> tuple[Pipeline, torch.optim.AdamW]:
    """Two pipeline ranks times two replicas, each stage wrapped once the pipeline is there."""
    pipeline, replicas = make_meshes()
    pipe = Pipeline(
        make_model(seed),
        loss_fn=F.mse_loss,
        split=[1, 2],
        n_microbatches=2,
        group=pipeline.get_group(),
        timeout_s=20,
    )
    for stage in pipe.stages:
        module = WRAPS[wrap](stage.submod, replicas)
        compiled: Any = torch.compile(module, backend="eager") if wrap == "ddp" else module
        stage.submod = compiled
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.1)


def plain(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in state.items()}


def train_save_load(rank: int, num_ranks: int, wrap: str, path: str) -> list[dict[str, Tensor]]:
    """This rank's names and tensors, then those of all ranks; then both as a fresh pipeline
    reads them from a file."""
    pipe, optimizer = make_pipe(wrap, seed=0)
    inputs, target = batch(0, 0)
    pipe.step(inputs, target=target)
    optimizer.step()
    save(path, pipe, optimizer)
    fresh, its_optimizer = make_pipe(wrap, seed=1)
    load(path, fresh, its_optimizer)
    told = [plain(each.state_dict()) for each in (pipe, fresh)] + [
        each.state_dict(full=True) for each in (pipe, fresh)
    ]
    for each, its in ((pipe, optimizer), (fresh, its_optimizer)):
        each.zero_grad()
        each.step(inputs, target=target)
        its.step()
        told.append({name: whole(p.detach()) for name, p in each.named_parameters()})
    return told


@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "replicate"])
def test_wrapped_stages_are_saved_as_the_plain_model(wrap: str, tmp_path: Path) -> None:
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        inputs, target = batch(0, 0)
        parts = zip(inputs.tensor_split(2), target.tensor_split(2), strict=True)
        optimizer.zero_grad()
        for x, y in parts:
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()

    step()
    saved = plain(model.state_dict())
    step()
    twice = plain(model.state_dict())
    outcomes = run_ranks(train_save_load, 4, wrap, str(tmp_path / "it"))
    for rank, outcome in enumerate(outcomes):
        names = [n for n in saved if n.startswith("0.") == (rank < 2)]
        mine, read, full, all_read, after, read_after = outcome.result()
        for state, expected in (
            (mine, {n: saved[n] for n in names}),
            (read, {n: saved[n] for n in names}),
            (full, saved),
            (all_read, saved),
            (after, {n: twice[n] for n in names}),
            (read_after, {n: twice[n] for n in names}),
        ):
            assert [*state] == [*expected]
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, expected[name], msg=f"rank {rank}, {name}")
    # One process reads it with torch alone.
    state = {"model": make_model(1).state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=str(tmp_path / "it"), no_dist=True)
    for name, tensor in saved.items():
        torch.testing.assert_close(state["model"][name], tensor)


def load_whole(rank: int, num_ranks: int, wrap: str) -> list[dict[str, Tensor]]:
    """The whole state of one pipeline, and what another one has that has loaded it."""
    full = make_pipe(wrap, seed=0)[0].state_dict(full=True)
    fresh, _ = make_pipe(wrap, seed=1)
    fresh.load_state_dict(full)
    return [full, fresh.state_dict(full=True)]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_wrapped_stages_take_a_whole_state(wrap: str) -> None:
    expected = make_model(0).state_dict()
    for outcome in run_ranks(load_whole, 4, wrap):
        for state in outcome.result():
            assert [*state] == [*expected]
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def save_common(rank: int, num_ranks: int, path: str) -> list[str]:
    """Both ranks cut their stage by hand, and call its layer alike."""
    stage = PipelineStage(nn.Sequential(nn.Linear(4, 4)), rank, num_ranks, CPU)
    pipe = Pipeline([stage], loss_fn=F.mse_loss, n_microbatches=2)
    told = []
    for act in (lambda: save(path, pipe), lambda: pipe.state_dict(full=True)):
        with pytest.raises(PartitionError) as caught:
            act()
        told.append(str(caught.value))
    return told


def test_stages_of_several_ranks_with_names_in_common_have_no_common_state(tmp_path: Path) -> None:
    for outcome in run_ranks(save_common, 2, str(tmp_path / "it")):
        for told in outcome.result():
            assert "several stages have the names ['0.bias', '0.weight']" in told
    assert not (tmp_path / "it").exists()
