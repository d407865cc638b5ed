"""Models cut by module or captured, their stages replicated or sharded, beside one process.

mesh (replica, stage) of 2 × 2      ranks 0 1    a pipeline, with the first half of a batch
                                    ranks 2 3    another one, with the second half
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, pipe_split
from tests.distributed.launches import results_of
from tests.distributed.replicas import whole

DIM, ROWS, NUM_MICROBATCHES, NUM_STEPS, LR = 6, 8, 4, 2, 0.1

Batch = dict[str, Tensor]


class Layer(nn.Module):
    """A residual layer under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh()
        return x + y * mask


class Net(nn.Module):
    """Blocks in a list: cut by module. A skip and a mask go to the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Batch:
        first = x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x + first)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Traced(nn.Module):
    """No list of blocks: captured, and cut where it says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM) for _ in range(4))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Batch:
        first = x = self.a(x).tanh()
        pipe_split()
        x = self.b(x).tanh() * mask
        pipe_split()
        x = self.c(x).tanh() + first
        pipe_split()
        logits = self.head(self.d(x).tanh() * mask)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


MODELS: dict[str, type[nn.Module]] = {"by module": Net, "captured": Traced}
# Two stages per rank, so that a model of four stages fits.
SCHEDULES = ("interleaved-1f1b", "zbv")
WRAPS = ("ddp", "fsdp", "replicate")
CASES = tuple(itertools.product(WRAPS, MODELS, SCHEDULES))


def make(way: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[way]()


def batch(step: int, replica: int, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return {
        "x": torch.randn(rows, DIM, generator=generator),
        "mask": torch.randint(2, (rows, DIM), generator=generator).float(),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


def wrap(pipe: Pipeline, kind: str, replicas: DeviceMesh) -> None:
    """As the guide to data parallelism says."""
    for stage in pipe.stages:
        match kind:
            case "ddp":
                stage.submod = DistributedDataParallel(
                    stage.submod, process_group=replicas.get_group()
                )
            case "fsdp":
                for layer in [m for m in stage.submod.modules() if isinstance(m, Layer)]:
                    fully_shard(layer, mesh=replicas)
                fully_shard(stage.submod, mesh=replicas)
            case _:
                replicate(stage.submod, mesh=replicas)


def train(rank: int, num_ranks: int, kind: str, way: str, schedule: str) -> list[dict[str, Any]]:
    """After each step: this rank's gradients and parameters, whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    pipe = Pipeline(
        make(way),
        example=batch(0, 0, ROWS // NUM_MICROBATCHES),
        schedule=schedule,
        n_microbatches=NUM_MICROBATCHES,
        group=mesh["stage"].get_group(),
        timeout_s=60,
    )
    wrap(pipe, kind, mesh["replica"])
    return history(pipe, mesh["replica"].get_local_rank())


def state_of(model: Pipeline | nn.Module) -> dict[str, Any]:
    named = dict(model.named_parameters())
    return {
        "grads": {name: whole(param.grad) for name, param in named.items()},
        "params": {name: whole(param) for name, param in named.items()},
    }


def history(pipe: Pipeline, replica: int) -> list[dict[str, Any]]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=LR)
    told = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        pipe.step(**batch(step, replica))
        optimizer.step()
        told.append(state_of(pipe))
    return told


@functools.cache
def expected(way: str) -> list[dict[str, Any]]:
    """As ``history`` tells it, of the plain model in one process on both replicas' rows."""
    model = make(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    told = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            given = batch(step, replica)
            for i in range(NUM_MICROBATCHES):
                part = {name: value.chunk(NUM_MICROBATCHES)[i] for name, value in given.items()}
                (model(**part)["loss"] / NUM_MICROBATCHES / 2).backward()
        optimizer.step()
        told.append(state_of(model))
    return told


@pytest.mark.parametrize(("kind", "way", "schedule"), CASES)
def test_replicas_of_a_models_stages_train_as_one_process_does(
    kind: str, way: str, schedule: str
) -> None:
    by_rank = results_of(train, 4, CASES, (kind, way, schedule))
    for step, wanted in enumerate(expected(way)):
        for pipeline in (by_rank[:2], by_rank[2:]):
            for what in ("grads", "params"):
                # No name on two ranks, and all of them together.
                first, second = (told[step][what] for told in pipeline)
                assert not first.keys() & second.keys()
                # Sums of the same eight terms, but in another order: by replica.
                torch.testing.assert_close(first | second, wanted[what], rtol=2e-5, atol=1e-6)
