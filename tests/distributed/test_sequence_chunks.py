"""Sequences in pieces, over real processes and gloo."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, PipelineStage, build
from tests.models import token_loss
from tests.processes import run_ranks
from tests.sequences import Whole, causal, compare_steps, token_batch

# A rank whose comparison fails leaves the other waiting in the next step.
TIMEOUT_S = 20.0


def train(rank: int, num_ranks: int) -> None:
    """Hold pipelines of pieces against the plain model, of which every rank has a copy."""
    for microbatches, splits in ((1, 2), (3, 3)):
        program = build("seq1f1b", ranks=num_ranks, microbatches=microbatches, splits=splits)
        compare_steps(causal(4), program, length=6, rows=2, timeout_s=TIMEOUT_S)


def test_gradients_equal_those_of_unsplit_sequences() -> None:
    for outcome in run_ranks(train, 2, timeout_s=120):
        outcome.result()


class Part(nn.Module):
    """A stage that was cut by hand: the state is a list, of each layer's own."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, value: Tensor, state: list[Any] | None = None) -> Any:
        states = state or [None] * (len(self.layers) - 1)
        for i, before in enumerate(states):
            value, states[i] = self.layers[i](value, before)
        return self.layers[-1](value), states


def replicate(rank: int, num_ranks: int) -> None:
    """A pipeline per rank, each with its part of the batch; DDP averages their gradients."""
    groups = [dist.new_group([each]) for each in range(num_ranks)]
    model = causal(4)
    plain: Any = Whole(*copy.deepcopy(model))
    stage = PipelineStage(
        DistributedDataParallel(Part(model)), 0, 1, torch.device("cpu"), group=groups[rank]
    )
    pipe = Pipeline(
        [stage],
        loss_fn=token_loss,
        schedule=build("seq1f1b", ranks=1, microbatches=2, splits=2),
        group=groups[rank],
        timeout_s=TIMEOUT_S,
    )
    inputs, target = token_batch(4 * num_ranks, 4, 0)
    mine = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        pipe.step(inputs[mine], target=target[mine])
        token_loss(plain(inputs), target).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    for param, expected in pairs:
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-9, atol=1e-12)


def test_stages_may_be_replicated() -> None:
    for outcome in run_ranks(replicate, 2, timeout_s=120):
        outcome.result()
