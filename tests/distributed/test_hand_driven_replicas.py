"""Replicated and sharded stages driven by hand: reduced once, however their backward is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from penstock import PipelineStage
from penstock.testing.processes import run_ranks
from tests.distributed.replicas import CPU, WRAPS, batch, make_layers, whole

NUM_MICROBATCHES = 2


def drive(stage: Any, step: int, rank: int, split: bool, asks: str) -> None:
    """A step over both microbatches, the weight gradients of a split backward at its end."""
    x, target = batch(step, rank)
    parts = list(zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True))
    losses = [
        nn.functional.mse_loss(stage.forward_one_chunk(mb, (part,)), wanted)
        for mb, (part, wanted) in enumerate(parts)
    ]
    for mb, loss in enumerate(losses):
        last = asks == "last_backward" and mb == NUM_MICROBATCHES - 1
        stage.backward_one_chunk(mb, loss=loss, full_backward=not split, last_backward=last)
    if split:
        for mb in range(NUM_MICROBATCHES):
            last = asks == "last_backward" and mb == NUM_MICROBATCHES - 1
            stage.backward_weight_one_chunk(mb, last_backward=last)
    if asks == "perform_reduce_grad":
        stage.perform_reduce_grad(1)
    stage.scale_grads(NUM_MICROBATCHES)


def train(rank: int, num_ranks: int) -> dict[tuple[str, bool, str], list[list[Tensor]]]:
    """Of every wrapper and way to end a step, the gradients after each of two steps."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    found = {}
    for wrap in WRAPS:
        for split in (False, True):
            for asks in ("last_backward", "perform_reduce_grad"):
                module = WRAPS[wrap](make_layers(1)[0], mesh)
                stage = PipelineStage(module, 0, 1, CPU)
                found[wrap, split, asks] = steps = []
                for step in range(2):
                    module.zero_grad()
                    drive(stage, step, rank, split, asks)
                    grads = (p.grad for p in module.parameters() if p.grad is not None)
                    steps.append([whole(grad) for grad in grads])
    return found


@pytest.mark.timeout(300)
def test_gradients_are_the_mean_over_the_replicas() -> None:
    (plain,) = make_layers(1)
    expected = []
    for step in range(2):
        plain.zero_grad()
        for replica in range(2):
            x, target = batch(step, replica)
            (nn.functional.mse_loss(plain(x), target) / 2).backward()
        expected.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])
    outcomes = [outcome.result() for outcome in run_ranks(train, 2)]
    assert len(outcomes[0]) == 4 * len(WRAPS)
    for key, steps in outcomes[0].items():
        for ours, theirs, plain_grads in zip(steps, outcomes[1][key], expected, strict=True):
            assert all(map(torch.equal, ours, theirs)), f"{key}: the replicas differ"
            torch.testing.assert_close(ours, plain_grads, rtol=1e-5, atol=1e-6, msg=str(key))
