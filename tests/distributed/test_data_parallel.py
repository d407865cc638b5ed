"""Pipelines of replicated or sharded stages, beside one process on the joined batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import build
from tests.distributed.replicas import (
    NUM_MICROBATCHES,
    WRAPS,
    batch,
    make_layers,
    make_meshes,
    make_schedule,
    run_eval,
    run_step,
    whole,
)
from tests.processes import run_ranks

NUM_STEPS = 3
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zb",
    "zbv",
    "dualpipev",
)


def train(rank: int, num_ranks: int, wrap: str, names: tuple[str, ...]) -> dict[str, Any]:
    """By schedule, step and stage: gradients and parameters, whole, after the step."""
    pipeline, replicas = make_meshes()
    return {name: train_with(name, wrap, pipeline, replicas) for name in names}


def train_with(
    name: str, wrap: str, pipeline: DeviceMesh, replicas: DeviceMesh
) -> list[list[dict[str, Any]]]:
    schedule, modules = make_schedule(name, wrap, pipeline, replicas)
    # Evaluations before and between leave parameters and gradients as they are.
    run_eval(schedule, pipeline, replicas)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    history = []
    for step in range(NUM_STEPS):
        run_eval(schedule, pipeline, replicas)
        optimizer.zero_grad()
        run_step(schedule, step, pipeline, replicas)
        run_eval(schedule, pipeline, replicas)
        optimizer.step()
        told = []
        for module in modules:
            params = list(module.parameters())
            told.append(
                {
                    "grads": [whole(p.grad) for p in params if p.grad is not None],
                    "params": [whole(p.detach()) for p in params],
                }
            )
        history.append(told)
    schedule.engine.close()
    return history


def expected_history(num_stages: int) -> list[list[dict[str, list[Tensor]]]]:
    """As ``train`` tells it, of the plain model in one process on both replicas' rows."""
    layers = make_layers(num_stages)
    optimizer = torch.optim.SGD([p for m in layers for p in m.parameters()], lr=0.1)
    history = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            x, target = batch(step, replica)
            pairs = zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
            for x_mb, target_mb in pairs:
                for layer in layers:
                    x_mb = layer(x_mb)
                loss = nn.functional.mse_loss(x_mb, target_mb)
                (loss / NUM_MICROBATCHES / 2).backward()
        optimizer.step()
        history.append(
            [
                {
                    "grads": [p.grad.clone() for p in m.parameters() if p.grad is not None],
                    "params": [p.detach().clone() for p in m.parameters()],
                }
                for m in layers
            ]
        )
    return history


FEW = ("1f1b", "interleaved-zb", "zbv")
PAIRS = [(wrap, name) for wrap in WRAPS for name in (SCHEDULES if wrap in ("ddp", "fsdp") else FEW)]


@functools.cache
def histories(wrap: str) -> list[dict[str, Any]]:
    names = tuple(name for each, name in PAIRS if each == wrap)
    return [o.result() for o in run_ranks(train, 4, wrap, names, timeout_s=150)]


@pytest.mark.parametrize(("wrap", "name"), PAIRS)
def test_replicas_train_as_one_process_does(wrap: str, name: str) -> None:
    placement = build(name, ranks=2, microbatches=NUM_MICROBATCHES).placement
    expected = expected_history(placement.num_stages)
    by_rank = [told[name] for told in histories(wrap)]
    for pp_rank in range(2):
        # In a mesh of (2, 2) replicas are neighbours.
        one, other = by_rank[2 * pp_rank], by_rank[2 * pp_rank + 1]
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        for told, wanted in zip(one, expected, strict=True):
            mine = [wanted[i] for i in placement.stages_of(pp_rank)]
            # Sums of the same eight terms, but in another order: by replica.
            torch.testing.assert_close(told, mine, rtol=2e-5, atol=1e-6)
