"""Loss scaling over ranks, as the quickstart does it: all pass over the same steps."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

from penstock import Pipeline
from penstock.training.clip import clip_grad_norm_
from tests.compare import plain_step
from tests.processes import run_ranks

SCALE, OVERFLOWING = 2.0**16, 1


def train(rank: int, num_ranks: int) -> tuple[list[float], list[bool]]:
    """The scales after each step, and whether each parameter is the plain loop's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    plain = copy.deepcopy(model)
    scaler, plain_scaler = ShardedGradScaler("cpu", SCALE), GradScaler("cpu", SCALE)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(F.mse_loss(output, target))

    def plain_loss(output: Tensor, target: Tensor) -> Tensor:
        return plain_scaler.scale(F.mse_loss(output, target))

    scaler.scale(torch.zeros(()))
    pipe = Pipeline(model, loss_fn=loss_fn, n_microbatches=2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    scales = []
    for step in range(3):
        inputs, target = torch.randn(4, 4), torch.randn(4, 4)
        pipe.step(inputs, target=target)
        plain_step(plain, plain_loss, inputs, target=target, n_microbatches=2)
        for each in (pipe, plain):
            first = dict(each.named_parameters()).get("0.0.weight")
            if step == OVERFLOWING and first is not None:  # on the first rank alone
                first.grad = torch.full_like(first, torch.inf)
        for each, optimizer in zip((scaler, plain_scaler), optimizers, strict=True):
            each.unscale_(optimizer)
        clip_grad_norm_(pipe.parameters(), 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for each, optimizer in zip((scaler, plain_scaler), optimizers, strict=True):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    expected = dict(plain.named_parameters())
    return scales, [torch.allclose(p, expected[name]) for name, p in pipe.named_parameters()]


def test_an_overflow_on_one_rank_is_passed_over_on_all() -> None:
    for outcome in run_ranks(train, 2, timeout_s=100):
        scales, same = outcome.result()
        assert scales == [SCALE, SCALE / 2, SCALE / 2]
        assert len(same) == 4 and all(same)
