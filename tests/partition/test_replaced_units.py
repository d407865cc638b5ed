"""Modules that a user puts in the places of others, in a stage that is there already."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn import functional as F

from penstock import Pipeline
from penstock.testing.compare import plain_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def new_head(module: nn.Module) -> None:
    if hasattr(module, "head"):
        torch.manual_seed(2)
        module.head = nn.Linear(4, 2)


def checkpointed(module: nn.Module) -> None:
    apply_activation_checkpointing(module, check_fn=lambda each: isinstance(each, nn.Linear))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("replace", [new_head, checkpointed])
def test_a_module_put_in_anothers_place_is_what_runs(
    schedule: str, replace: Callable[[nn.Module], None]
) -> None:
    torch.manual_seed(0)
    model, ran = Net(), []
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn=F.mse_loss, schedule=schedule, n_microbatches=2, ranks=2)
    inputs, target = torch.randn(4, 4), torch.randn(4, 2)
    pipe.eval(inputs)
    for module in (*(stage.submod for stage in pipe.stages), plain):
        replace(module)
    for stage in pipe.stages:
        for each in stage.submod.modules():
            if isinstance(each, CheckpointWrapper):
                each.register_forward_hook(lambda each, *_: ran.append(id(each)))
    loss = pipe.step(inputs, target=target)
    expected = plain_step(plain, F.mse_loss, inputs, target=target, n_microbatches=2)
    assert torch.equal(loss, expected.loss)
    grads = [param.grad for param in plain.parameters()]
    for param, grad in zip(pipe.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad, grad)
    assert len(set(ran)) == (6 if replace is checkpointed else 0)
