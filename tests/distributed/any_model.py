"""What each rank's process runs to train a real model, cut by itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, PipelineStage, split_by_module
from penstock.schedule.registry import family
from penstock.stage.dtensor import full_tensor
from tests.agreement import ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.real_models import REAL_MODELS, own_loss

__all__ = ["others", "recurrent", "train", "train_twice", "whole_size", "wrapped"]

TIMEOUT_S = 20.0


def train(rank: int, num_ranks: int, plans: list[tuple[str, str]]) -> list[list[str]]:
    """Train each (model, schedule); returns the names of this rank's parameters for each."""
    return [_train(rank, *plan) for plan in plans]


def _train(rank: int, name: str, schedule: str) -> list[str]:
    """Two lines, and the plain model beside them."""
    case = REAL_MODELS[name]
    model = case.model()
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        example=case.example(),
        schedule=schedule,
        split=case.split(2 * family(schedule).default_virtual),
        n_microbatches=4,
        timeout_s=TIMEOUT_S,
    )
    pipe.train(False)
    with torch.inference_mode():
        assert (pipe.eval(**case.example(rows=6)) is None) == (not pipe._schedule.splitter.has_last)
    pipe.train()
    for step in range(2):
        batch = case.example(rows=6, seed=step)
        # All ranks alike, or the first alone.
        loss = pipe.step(**(batch if step == 0 or rank == 0 else {}))
        expected = plain_step(plain, lambda output, _: own_loss(output), n_microbatches=4, **batch)
        assert loss is not None and torch.equal(loss, expected.loss)
        tied = len(list(plain.named_parameters(remove_duplicate=False))) > len(
            list(plain.parameters())
        )
        tolerance = ROUNDING if tied else None
        assert_same(snapshot(pipe), snapshot(plain), tolerance=tolerance, partial=True)
    return [name for name, _ in pipe.named_parameters()]


class Twice(nn.Module):
    """Two layers, each of which is called twice: by both ranks, under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        pair = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList([*pair, *pair])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def train_twice(rank: int, num_ranks: int, schedule: str) -> list[str]:
    """Cut between the calls; returns the names of this rank's parameters."""
    model = Twice()
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        example=(torch.ones(2, 8),),
        loss_fn=nn.functional.mse_loss,
        split=[2, 2],
        schedule=schedule,
        n_microbatches=4,
        timeout_s=TIMEOUT_S,
    )
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    for seed in range(2):
        x, target = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
        loss = pipe.step(x, target=target)
        expected = plain_step(plain, nn.functional.mse_loss, x, target=target, n_microbatches=4)
        assert loss is not None and torch.equal(loss, expected.loss)
        for name, param in pipe.named_parameters():
            torch.testing.assert_close(param.grad, wanted[name].grad, rtol=1e-6, atol=1e-7)
    return [name for stage in pipe.stages for name, _ in stage.submod.named_parameters()]


def others(rank: int, num_ranks: int) -> dict[str, Any]:
    """The rest, in one go: processes take seconds to import transformers."""
    _gather()
    return {"refused": _refuse(), "balanced": _balance(), "parameters": _from_meta()}


def _gather() -> None:
    """The whole state on every rank, on demand."""
    model = REAL_MODELS["gpt2"].model()
    pipe = Pipeline(model, example=REAL_MODELS["gpt2"].example(), n_microbatches=2)
    plain = model.state_dict()
    mine, whole = pipe.state_dict(), pipe.state_dict(full=True)
    assert 0 < len(mine) < len(whole)
    assert whole.keys() == plain.keys()
    assert all(torch.equal(whole[name], value) for name, value in plain.items())


def _balance() -> list[str]:
    """One rank measures, all cut alike."""
    case = REAL_MODELS["llama"]
    pipe = Pipeline(case.model(), example=case.example(), split="auto", n_microbatches=2)
    assert pipe.step(**case.example(rows=4)) is not None
    return [name for name, _ in pipe.named_parameters()]


def _refuse() -> str:
    """What can't be measured is told on every rank."""
    try:
        Pipeline(REAL_MODELS["llama"].model(), split="auto", n_microbatches=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _from_meta() -> int:
    """Built without memory; each rank materializes its own stages and loads its own state."""
    case = REAL_MODELS["llama"]
    plain = case.model()
    with torch.device("meta"):
        model = case.model()
    pipe = Pipeline(model, example=case.example(), n_microbatches=2, timeout_s=TIMEOUT_S)
    held = {id(p) for p in pipe.parameters()}
    assert not any(p.is_meta for p in pipe.parameters())
    # What others hold has no memory here.
    others = [p for p in model.parameters() if id(p) not in held]
    assert others and all(p.is_meta for p in others)
    pipe.load_state_dict(plain.state_dict())
    batch = case.example(rows=4, seed=1)
    loss = pipe.step(**batch)
    expected = plain_step(plain, lambda output, _: own_loss(output), n_microbatches=2, **batch)
    assert loss is not None and torch.equal(loss, expected.loss)
    assert_same(snapshot(pipe), snapshot(plain), partial=True)
    return sum(p.numel() for p in pipe.parameters())


def wrapped(rank: int, num_ranks: int, kind: str) -> None:
    """Stages cut by module within DDP, or sharded: parameters are exchanged for others there."""
    case = REAL_MODELS["llama"]
    model = case.model()
    plain = copy.deepcopy(model)
    modules: list[Any] = list(split_by_module(model, [2, 2], case.example()).stages)
    mesh = init_device_mesh("cpu", (num_ranks,))
    if kind == "ddp":
        modules = [DistributedDataParallel(module) for module in modules]
    policy = MixedPrecisionPolicy()
    if kind == "fsdp in bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        modules.append(plain)
    for module in modules if kind != "ddp" else ():
        for layer in module.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    stages = [
        PipelineStage(module, i, 2, torch.device("cpu")) for i, module in enumerate(modules[:2])
    ]
    pipe = Pipeline(stages, loss_fn=lambda out, _: own_loss(out), schedule="zbv", n_microbatches=2)
    batch = case.example(rows=4, seed=1)
    loss = pipe.step(**batch, target_mbs=[None, None])
    expected = plain_step(plain, lambda out, _: own_loss(out), n_microbatches=2, **batch)
    assert loss is not None and torch.equal(loss, expected.loss)
    wanted = dict(plain.named_parameters())
    for name, param in pipe.named_parameters():
        theirs: Any = wanted.pop(name.removeprefix("module.")).grad
        assert torch.equal(full_tensor(param.grad), full_tensor(theirs))
    assert not wanted


class Recurrent(nn.Module):
    """Layers that keep a list of their parameters, and make it anew when these change places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.GRU(4, 4, batch_first=True) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        out: Tensor = self.head(x)
        return out


def recurrent(rank: int, num_ranks: int) -> None:
    """Sharded stages of a model that is cut by module, which has recurrent layers."""
    plain, model = Recurrent(), Recurrent()
    x, target = torch.randn(2, 4, 3, 4, generator=torch.Generator().manual_seed(0))
    split = split_by_module(model, ["layers.1"], (x[:2],))
    mesh = init_device_mesh("cpu", (num_ranks,))
    modules = [fully_shard(module, mesh=mesh) for module in split.stages]
    stages = [PipelineStage(module, i, 2, torch.device("cpu")) for i, module in enumerate(modules)]
    pipe = Pipeline(stages, loss_fn=nn.functional.mse_loss, schedule="zbv", n_microbatches=2)
    for _ in range(2):
        loss = pipe.step(x, target=target)
        expected = plain_step(plain, nn.functional.mse_loss, x, target=target, n_microbatches=2)
        torch.testing.assert_close(loss, expected.loss)
    wanted = dict(plain.named_parameters())
    for name, param in pipe.named_parameters():
        grad: Any = param.grad
        torch.testing.assert_close(grad.full_tensor(), wanted.pop(name).grad)
    assert not wanted


def whole_size(model: nn.Module) -> int:
    """How many numbers a model's parameters hold."""
    return sum(p.numel() for p in model.parameters())
