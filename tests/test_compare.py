"""The comparison itself: it must see every difference that matters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compare import Tolerance, assert_same, plain_step, snapshot


def snap(**grads: Tensor | None) -> dict[str, Tensor | None]:
    return {f"gradient of {name}": grad for name, grad in grads.items()}


def test_the_plain_loop_is_the_loop_that_it_says() -> None:
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    inputs, target = torch.randn(5, 3), torch.randn(5, 2)
    result = plain_step(model, F.mse_loss, inputs, target=target, n_microbatches=2)
    losses = []
    for x, y in ((inputs[:3], target[:3]), (inputs[3:], target[3:])):
        loss = F.mse_loss(plain(x), y)
        (loss / 2).backward()
        losses.append(loss.detach())
    assert_same(snapshot(model), snapshot(plain))
    assert torch.equal(result.loss, (losses[0] + losses[1]) / 2)
    assert [out.shape[0] for out in result.outputs] == [3, 2]
    assert result.metrics == (None, None)


def test_the_plain_loop_passes_arguments_on() -> None:
    def loss_fn(output: Tensor, target: Tensor, weight: float) -> tuple[Tensor, dict[str, float]]:
        return F.mse_loss(output, target) * weight, {"rows": float(len(output))}

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    model = Scaled(2, 2)
    x, y, scale = torch.randn(4, 2), torch.randn(4, 2), torch.rand(4, 1)
    whole = plain_step(
        model, loss_fn, x, target=y, n_microbatches=2, loss_kwargs={"weight": 3.0}, scale=scale
    )
    first = snapshot(model)
    model.zero_grad()
    ready = plain_step(
        model,
        loss_fn,
        arg_mbs=[(x[:2],), (x[2:],)],
        kwarg_mbs=[{"scale": scale[:2]}, {"scale": scale[2:]}],
        target_mbs=[y[:2], y[2:]],
        loss_kwargs={"weight": 3.0},
    )
    assert_same(snapshot(model), first)
    assert torch.equal(whole.loss, ready.loss)
    assert whole.metrics == ready.metrics == ({"rows": 2.0}, {"rows": 2.0})
    model.zero_grad()
    plain_step(
        model,
        loss_fn,
        x,
        target=y,
        n_microbatches=2,
        loss_kwargs={"weight": 3.0},
        scale_grads=False,
        scale=scale,
    )
    assert_same(
        snapshot(model), {name: grad * 2 for name, grad in first.items() if grad is not None}
    )


def test_the_number_of_microbatches_must_be_known() -> None:
    with pytest.raises(ValueError, match="n_microbatches"):
        plain_step(nn.Linear(1, 1), F.mse_loss, torch.ones(2, 1), target=torch.ones(2, 1))


def test_a_snapshot_is_a_copy() -> None:
    model = nn.BatchNorm1d(2)
    model(torch.randn(3, 2)).sum().backward()
    before = snapshot(model)
    copied = copy.deepcopy(before)
    model(torch.randn(3, 2)).sum().backward()
    torch.testing.assert_close(before, copied, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="buffer running_mean"):
        assert_same(snapshot(model), before)


ONE = torch.ones(2)
NAN = torch.tensor([1.0, float("nan")])
INF = torch.tensor([1.0, float("inf")])


@pytest.mark.parametrize("tolerance", [None, Tolerance(relative=1e-6, absolute=1e-6)])
@pytest.mark.parametrize(
    ("actual", "expected", "told"),
    [
        (None, torch.zeros(2), "is None, expected a tensor of shape"),
        (torch.zeros(2), None, "is a tensor of shape .*, expected None"),
        (ONE, ONE[:1], "has shape"),
        (ONE, ONE.double(), "dtype"),
        (ONE, ONE * 1.001, r"differs: .* 2 / 2 .* difference: 0\.00\d+"),
        (NAN, ONE, "differs"),
        (ONE, NAN, "differs"),
        (INF, ONE, "differs"),
        (ONE, INF, "differs"),
        (-INF, INF, "differs"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 / 2"),
        (torch.tensor([True]), torch.tensor([False]), "differs"),
        (ONE * 1j, ONE * 2j, "differs"),
    ],
)
def test_differences_are_seen(
    actual: Any, expected: Any, told: str, tolerance: Tolerance | None
) -> None:
    with pytest.raises(AssertionError, match=told):
        assert_same(snap(w=actual), snap(w=expected), tolerance=tolerance)


@pytest.mark.parametrize("value", [None, ONE, NAN, INF, ONE * 1j, torch.empty(0), ONE.bool()])
def test_equal_values_pass(value: Tensor | None) -> None:
    same = None if value is None else value.clone()
    assert_same(snap(w=value), snap(w=same))
    assert_same(snap(w=value), snap(w=same), tolerance=Tolerance(relative=1e-9))


def test_the_last_bit_counts_unless_there_is_a_tolerance() -> None:
    near = torch.nextafter(ONE, ONE * 2)
    with pytest.raises(AssertionError, match="Mismatched elements: 2 / 2"):
        assert_same(snap(w=near), snap(w=ONE))
    assert_same(snap(w=near), snap(w=ONE), tolerance=Tolerance(relative=1e-6))
    assert_same(snap(w=NAN + 1e-6), snap(w=NAN), tolerance=Tolerance(relative=1e-5))


def test_names_must_be_the_same() -> None:
    with pytest.raises(AssertionError, match="v: is not expected at all"):
        assert_same(snap(w=ONE, v=ONE), snap(w=ONE))
    with pytest.raises(AssertionError, match="v: is missing"):
        assert_same(snap(w=ONE), snap(w=ONE, v=ONE))
    assert_same(snap(w=ONE), snap(w=ONE, v=ONE), partial=True)
    with pytest.raises(AssertionError, match="not expected"):
        assert_same(snap(w=ONE, v=ONE), snap(w=ONE), partial=True)


def test_all_differences_are_listed() -> None:
    with pytest.raises(AssertionError, match=r"(?s)2 differences.*gradient of w.*gradient of v"):
        assert_same(snap(w=ONE, v=None), snap(w=None, v=ONE))
