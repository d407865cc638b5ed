"""Replicated and sharded stages driven by hand: reduced once, however their backward is split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from penstock import PipelineStage
from tests.distributed.replicas import CPU, WRAPS, batch, make_layers, whole
from tests.processes import run_ranks

NUM_MICROBATCHES = 2


def drive(stage: Any, step: int, rank: int, split: bool, asks: str) -> None:
    """A step over both microbatches, the weight gradients of a split backward at its end; before,
    an evaluation of more."""
    x, target = batch(step, rank)
    with torch.no_grad():
        for mb in range(NUM_MICROBATCHES + 1):
            stage.forward_one_chunk(mb, (x,))
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
    stage.release_fwd_send_outputs(0)
    if asks == "perform_reduce_grad":
        stage.start_gradient_reduction()
        stage.wait_for_gradient_reduction(1)
    stage.scale_grads(NUM_MICROBATCHES)


def drive_graph(stage: Any, step: int, rank: int, split: bool, asks: str) -> None:
    """The same by the two functions that run a module and a backward, and know no microbatch."""
    x, target = batch(step, rank)
    for mb in range(NUM_MICROBATCHES):
        part, wanted = (t.chunk(NUM_MICROBATCHES)[mb] for t in (x, target))
        part = part.clone().requires_grad_()
        last = asks == "last_backward" and mb == NUM_MICROBATCHES - 1
        loss = nn.functional.mse_loss(stage.forward_maybe_with_nosync(part), wanted)
        graph = {"stage_output": loss, "output_grads": None, "input_values": [part]}
        kind = "input" if split else "full"
        _, groups = stage.backward_maybe_with_nosync(kind, graph, last_backward=last)
        if split:
            stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
    if asks == "perform_reduce_grad":
        stage.perform_reduce_grad(1)
    stage.scale_grads(NUM_MICROBATCHES)


def train(rank: int, num_ranks: int) -> dict[tuple[str, bool, str, str], list[list[Tensor]]]:
    """Of every wrapper and way to drive a step, the gradients after each of two steps."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    found = {}
    drivers = {each.__name__: each for each in (drive, drive_graph)}
    ends = ("last_backward", "perform_reduce_grad")
    for wrap, split, asks, how in itertools.product(WRAPS, (False, True), ends, drivers):
        module = WRAPS[wrap](make_layers(1)[0], mesh)
        stage = PipelineStage(module, 0, 1, CPU)
        found[wrap, split, asks, how] = steps = []
        for step in range(2):
            module.zero_grad()
            drivers[how](stage, step, rank, split, asks)
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
    assert len(outcomes[0]) == 8 * len(WRAPS)
    for key, steps in outcomes[0].items():
        for ours, theirs, plain_grads in zip(steps, outcomes[1][key], expected, strict=True):
            assert all(map(torch.equal, ours, theirs)), f"{key}: the replicas differ"
            torch.testing.assert_close(ours, plain_grads, rtol=1e-5, atol=1e-6, msg=str(key))
