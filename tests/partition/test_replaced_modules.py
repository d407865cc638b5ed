"""Modules that a user puts in the places of others, in a stage that is there already."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.nn import functional as F

from penstock import PartitionError, Pipeline
from tests.compare import plain_step


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


class Penalized(Net):
    """Uses the weights of its layers between them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(layer.weight.square().sum() for layer in self.layers)


class Tied(Net):
    """Its last layer has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.embed.weight


class Doubled(nn.Module):
    """Twice what another gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def doubled_list(module: nn.Module) -> None:
    if hasattr(module, "layers"):
        layers = nn.ModuleList()
        for name, layer in module.layers.named_children():
            layers.add_module(name, Doubled(layer))
        module.layers = layers


def made(model: nn.Module, schedule: str = "1f1b") -> Pipeline:
    return Pipeline(
        model,
        loss_fn=F.mse_loss,
        schedule=schedule,
        n_microbatches=2,
        ranks=2,
        example=(torch.randn(2, 4),),
    )


BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    ("kind", "replace"),
    [
        (Net, new_head),
        (Net, checkpointed),
        (Net, doubled_list),
        (Penalized, new_head),
        (Penalized, checkpointed),
        (Tied, new_head),
        (Tied, checkpointed),
    ],
)
def test_replaced_modules_run(
    schedule: str, replace: Callable[[nn.Module], None], kind: type[Net]
) -> None:
    torch.manual_seed(0)
    model, ran = kind(), []
    plain = copy.deepcopy(model)
    pipe = made(model, schedule)
    pipe.eval(BATCH)
    for module in (*(stage.submod for stage in pipe.stages), plain):
        replace(module)
    for stage in pipe.stages:
        for each in stage.submod.modules():
            if isinstance(each, CheckpointWrapper):
                each.register_forward_hook(lambda each, *_: ran.append(id(each)))
    loss = pipe.step(BATCH, target=TARGET)
    expected = plain_step(plain, F.mse_loss, BATCH, target=TARGET, n_microbatches=2)
    assert torch.equal(loss, expected.loss)
    grads = [param.grad for param in plain.parameters()]
    for param, grad in zip(pipe.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad, grad)
    assert len(set(ran)) == (6 if replace is checkpointed else 0)


@pytest.mark.parametrize(
    ("kind", "replace", "told"),
    [
        (Net, lambda module: delattr(module, "head"), "head is gone from this stage's module"),
        (Net, lambda module: setattr(module, "head", None), "head is gone from this stage's"),
        (Tied, doubled_list, "has neither a parameter nor a module 'layers.3.weight'"),
        (
            Net,
            lambda module: setattr(module, "layers", nn.Sequential(*module.layers)),
            "layers of this stage's module was replaced, but it is cut",
        ),
    ],
)
def test_replacements_that_cannot_run_are_refused(
    kind: type[Net], replace: Callable[[nn.Module], None], told: str
) -> None:
    pipe = made(kind())
    replace(pipe.stages[1].submod)
    with pytest.raises(PartitionError, match=told):
        pipe.step(BATCH, target=TARGET)


def test_replaced_modules_are_released() -> None:
    pipe = made(Net())
    heads = []
    for _ in range(3):
        pipe.step(BATCH, target=TARGET)
        heads.append(weakref.ref(pipe.stages[1].submod.head))
        pipe.stages[1].submod.head = nn.Linear(4, 2)
    pipe.step(BATCH, target=TARGET)
    gc.collect()
    assert [head() for head in heads] == [None] * 3
