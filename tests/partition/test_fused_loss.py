"""Heads that are never called while the model trains: a fused loss takes their weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.partition.forward.by_module import split_by_module
from tests.agreement import ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.real_models import own_loss

DIM, VOCABULARY = 6, 11
TOKENS = torch.randint(VOCABULARY, (8, 5), generator=torch.Generator().manual_seed(1))
BATCH = {"tokens": TOKENS, "labels": TOKENS.roll(-1, 1)}
MICROBATCH = {name: value[:2] for name, value in BATCH.items()}


class LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of ``x @ weight.T``, whose gradients are computed with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x @ weight.T
        grad = (logits.softmax(-1) - F.one_hot(labels, len(weight))) / len(x)
        ctx.save_for_backward(grad @ weight, grad.T @ x)
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * x, grad * weight, None


class Fused(nn.Module):
    """A model of tokens; without labels it gives logits."""

    def __init__(self, tied: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.norm = nn.LayerNorm(DIM)
        self.early = nn.Tanh()  # registered behind what it runs before, as rotary tables are
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.early(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if labels is None:
            return {"logits": self.head(x)}
        x, labels = x.flatten(0, 1), labels.flatten()
        return {"loss": LinearCrossEntropy.apply(x, self.head.weight, labels)}


def trains_alike(model: nn.Module, tied: bool, **options: Any) -> None:
    """A step, and an evaluation, in which the head is called."""
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, example=MICROBATCH, n_microbatches=4, ranks=2, **options)
    loss = pipe.step(**BATCH)
    expected = plain_step(plain, lambda out, _: own_loss(out), n_microbatches=4, **BATCH)
    assert torch.equal(loss, expected.loss)
    # A shared parameter's gradients are summed by stage.
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING if tied else None)
    with torch.no_grad():
        outputs = [plain(tokens)["logits"] for tokens in TOKENS.chunk(4)]
    assert torch.equal(pipe.eval(tokens=TOKENS)["logits"], torch.cat(outputs))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_head_is_where_its_weight_is_used(schedule: str, tied: bool) -> None:
    split = split_by_module(Fused(tied), [2, 2], MICROBATCH)
    assert split.names[1] == ("layers.2", "layers.3", "norm", "head")
    assert split.plan is not None
    assert not any("weight" in str(source) for source in split.plan.boundary_values[0])
    trains_alike(Fused(tied), tied, schedule=schedule)


@pytest.mark.parametrize("tied", [False, True])
def test_a_measured_split(tied: bool) -> None:
    trains_alike(Fused(tied), tied, split="auto")


def test_a_tied_weight_that_crosses_is_found_under_all_its_names() -> None:
    names = [["embed", "head", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm"]]
    model = Fused(tied=True)
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, split=names, example=MICROBATCH, n_microbatches=4, ranks=2)
    for _ in range(2):
        pipe.step(**BATCH)
        plain_step(plain, lambda out, _: own_loss(out), n_microbatches=4, **BATCH)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)
