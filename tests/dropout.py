"""Train a model with dropout in a pipeline, and in the plain loop with the same random numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline, draw_step_seed, microbatch_rng
from tests.compare import Tolerance, assert_same, snapshot
from tests.models import DIM, features

__all__ = ["MICROBATCHES", "compare_dropout", "dropping", "plain_steps"]

MICROBATCHES = 4


def dropping(num_layers: int) -> nn.Sequential:
    """Layers with dropout in each."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.4), nn.Tanh()) for _ in range(num_layers))
    )


def plain_steps(model: nn.Module, num: int) -> tuple[list[Tensor], Tensor]:
    """Train in the plain loop: the losses, and the state of the generator after each step."""
    losses = []
    torch.manual_seed(5)
    for step in range(num):
        inputs, target = features(2 * MICROBATCHES, step)
        seed = draw_step_seed()
        pairs = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for microbatch, (x, wanted) in enumerate(pairs):
            with microbatch_rng(seed, microbatch):
                output = model(x)
            loss = F.mse_loss(output, wanted)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
    return losses, torch.get_rng_state()


def compare_dropout(num_layers: int, *, tolerance: Tolerance | None = None, **options: Any) -> None:
    """Two steps of a pipeline beside two of the plain loop: losses, gradients, generator."""
    model = dropping(num_layers)
    plain: Any = copy.deepcopy(model)
    expected, state = plain_steps(plain, 2)
    pipe = Pipeline(
        model,
        loss_fn=F.mse_loss,
        n_microbatches=MICROBATCHES,
        microbatch_rng=True,
        **options,
    )
    torch.manual_seed(5)
    losses = []
    for step in range(2):
        inputs, target = features(2 * MICROBATCHES, step)
        pipe.step(inputs, target=target)
        losses += pipe.losses
    assert all(map(torch.equal, losses, expected))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=tolerance, partial=pipe.is_distributed)
