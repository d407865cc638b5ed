"""Captured stages defer the operations that modules defer: the same formulas and numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.partition.export.pipe import pipeline
from penstock.stage.weight_grad import DeferredGrads
from penstock.stage.weight_grad.accumulate import proxy_grads


class Own(nn.Module):
    """A forward of one line over parameters of given shapes."""

    def __init__(self, compute: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.compute = compute
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, *self.weights)


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    return nn.functional.embedding((x[..., 0].abs() * 3).long() % 5, table)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "linear of a stack": (lambda: nn.Linear(6, 4, bias=False), (3, 5, 6)),
    "linear with bias of a stack": (lambda: nn.Linear(6, 4), (3, 5, 6)),
    "matmul": (lambda: Own(lambda x, w: x @ w, (6, 4)), (3, 6)),
    "matmul from the left": (lambda: Own(lambda x, w: w @ x, (4, 3)), (3, 6)),
    "matmul with a transposed weight": (lambda: Own(lambda x, w: x @ w.t(), (4, 6)), (3, 6)),
    "bmm": (lambda: Own(lambda x, w: torch.bmm(x, w), (3, 6, 4)), (3, 5, 6)),
    "addmm": (lambda: Own(lambda x, b, w: torch.addmm(b, x, w), (4,), (6, 4)), (3, 6)),
    "einsum": (lambda: Own(lambda x, w: torch.einsum("btk,nk->btn", x, w), (4, 6)), (3, 5, 6)),
    "embedding": (lambda: Own(looked_up, (5, 4)), (3, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, stride=2, groups=2), (2, 4, 8, 8)),
    "conv2d, same padding": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (2, 2, 4, 4, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 2, stride=2), (2, 3, 8)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 4, 4)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "scaled weight": (lambda: Own(lambda x, w: nn.functional.linear(x, w * 0.5), (4, 6)), (3, 6)),
    "weight written into": (lambda: Own(lambda x, w: x * w.clone().add_(x.sum(0)), (6,)), (3, 6)),
}


def first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


@pytest.mark.parametrize("name", CASES)
def test_a_captured_stage_defers_as_its_module_does(name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    plain = make()
    captured = pipeline(copy.deepcopy(plain), (torch.randn(shape),)).get_stage_module(0)
    rules, grads = {}, {}
    x = torch.randn(shape)
    for kind, module in {"module": plain, "captured": captured}.items():
        leaf = x.clone().requires_grad_()
        work = DeferredGrads()
        with work:
            output = first(module(leaf))
        rules[kind] = [record[0] for record in work.records if record]
        with work:
            torch.autograd.backward([output], [torch.ones_like(output)])
        assert all(p.grad is None for p in module.parameters() if rules[kind] != [])
        work.accumulate()
        grads[kind] = [leaf.grad, *(p.grad for p in module.parameters())]
    assert rules["captured"] == rules["module"]
    for left, right in zip(grads["captured"], grads["module"], strict=True):
        assert (left is None) is (right is None)
        assert left is None or torch.equal(left, right)
    again = copy.deepcopy(plain)
    again.zero_grad()
    first(again(x)).sum().backward()
    for param, grad in zip(again.parameters(), grads["captured"][1:], strict=True):
        torch.testing.assert_close(grad, param.grad)


def test_most_of_them_have_formulas() -> None:
    """Or the test above would compare one general way with the other."""
    layer = pipeline(nn.Linear(3, 3), (torch.ones(2, 3),)).get_stage_module(0)
    work = DeferredGrads()
    with work:
        layer(torch.ones(2, 3, requires_grad=True))
    assert [record[0] for record in work.records if record] != [proxy_grads]
