"""Modules replicated or sharded in place once their pipeline is there, or between its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import penstock
from tests.distributed.launches import results_of
from tests.distributed.replicas import (
    CPU,
    NUM_MICROBATCHES,
    WRAPS,
    batch,
    make_layers,
    make_meshes,
    run_step,
    whole,
)

STEPS = 2
SCHEDULES = ("1f1b", "zbv")


def ddp_within(module: nn.Module, mesh: DeviceMesh) -> None:
    """A part that is exchanged for its wrapper; the stage's module stays what it is."""
    assert isinstance(module, nn.Sequential)
    for i, part in enumerate(module):
        if [*part.parameters()]:
            module[i] = DistributedDataParallel(part, process_group=mesh.get_group())


def wrap(kind: str, modules: list[nn.Module], mesh: DeviceMesh) -> None:
    for module in modules:
        if kind == "ddp within":
            ddp_within(module, mesh)
        else:
            assert WRAPS[kind](module, mesh) is module, "not in place"


Found = dict[str, list[list[Tensor]]]


def train(rank: int, num_ranks: int, kind: str) -> dict[str, Found]:
    """Whole gradients by schedule, by when the wrapping was, and by step."""
    meshes = make_meshes()
    return {schedule: train_with(schedule, kind, *meshes) for schedule in SCHEDULES}


def train_with(schedule: str, kind: str, pipeline: DeviceMesh, replicas: DeviceMesh) -> Found:
    found: Found = {}
    for when in ("before", "between", "between, on one rank"):
        placement = penstock.build(schedule, ranks=2, microbatches=NUM_MICROBATCHES).placement
        layers = make_layers(placement.num_stages)
        mine = placement.stages_of(pipeline.get_local_rank())
        modules = [layers[i] for i in mine]
        stages = [
            penstock.PipelineStage(m, i, placement.num_stages, CPU, group=pipeline.get_group())
            for i, m in zip(mine, modules, strict=True)
        ]
        made: Any = penstock.get_schedule_class(schedule)
        running = made(
            stages[0] if len(stages) == 1 else stages,
            NUM_MICROBATCHES,
            nn.functional.mse_loss,
            timeout_s=60,
        )
        if when != "before":
            run_step(running, 7, pipeline, replicas)
            for module in modules:
                module.zero_grad()
        if when != "between, on one rank" or pipeline.get_local_rank() == 0:
            wrap(kind, modules, replicas)
        steps = found[when] = []
        for step in range(STEPS):
            for module in modules:
                module.zero_grad()
            run_step(running, step, pipeline, replicas)
            steps.append([whole(p.grad) for m in modules for p in m.parameters()])  # type: ignore[arg-type]
    return found


def expected(schedule: str, replicas: tuple[int, ...], step: int, rank: int) -> list[Tensor]:
    """Of one process: the mean over these replicas' batches."""
    placement = penstock.build(schedule, ranks=2, microbatches=NUM_MICROBATCHES).placement
    layers = make_layers(placement.num_stages)
    plain = nn.Sequential(*layers)
    for replica in replicas:
        x, target = batch(step, replica)
        for inputs, wanted in zip(
            x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True
        ):
            loss = nn.functional.mse_loss(plain(inputs), wanted)
            (loss / NUM_MICROBATCHES / len(replicas)).backward()
    mine = placement.stages_of(rank)
    return [p.grad for i in mine for p in layers[i].parameters() if p.grad is not None]


KINDS = ("fsdp", "fsdp whole", "replicate", "ddp within")


@pytest.mark.parametrize("kind", KINDS)
def test_wrapping_in_place_is_seen(kind: str) -> None:
    """A stage that is not wrapped yet has the gradients of its own replica's batch."""
    results = results_of(train, 4, tuple((each,) for each in KINDS), (kind,))
    for process, by_schedule in enumerate(results):
        rank, replica = divmod(process, 2)
        for schedule, found in by_schedule.items():
            expect(found, schedule, rank, replica)


def expect(found: Found, schedule: str, rank: int, replica: int) -> None:
    for when, steps in found.items():
        apart = when == "between, on one rank" and rank == 1
        for step, grads in enumerate(steps):
            wanted = expected(schedule, (replica,) if apart else (0, 1), step, rank)
            for got, want in zip(grads, wanted, strict=True):
                torch.testing.assert_close(got, want)
