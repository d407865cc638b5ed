"""Cut by module under autocast: the plain model's results under autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, Pipeline
from penstock.partition.forward.by_module import split_by_module
from penstock.testing.compare import Tolerance, assert_same, plain_step, snapshot
from tests.partition.odd_models import DIM, NetBase
from tests.real_models import REAL_MODELS, own_loss

# Gradients are summed in bfloat16 here and there in another order.
ROUNDED = Tolerance(relative=1e-2)


def square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_llama_in_mixed_precision(schedule: str) -> None:
    case = REAL_MODELS["llama"]
    model, batch = case.model(), case.example(rows=4, seed=1)
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, example=case.example(), schedule=schedule, ranks=2, n_microbatches=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe.step(**batch)
        expected = plain_step(plain, lambda out, _: own_loss(out), n_microbatches=2, **batch)
    assert loss is not None
    assert torch.equal(loss, expected.loss)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDED)


class Within(NetBase):
    """Turns autocast on by itself, around some of its modules."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.embed(x)
            for block in self.blocks:
                x = x + block(x)
        return self.head(x.float())


def test_autocast_within_the_forward() -> None:
    model = Within()
    plain = copy.deepcopy(model)
    x = torch.randn(4, DIM)
    pipe = Pipeline(model, example=(x[:2],), loss_fn=square, ranks=2, n_microbatches=2)
    loss = pipe.step(x)
    expected = plain_step(plain, square, x, n_microbatches=2)
    assert loss is not None
    assert torch.equal(loss, expected.loss)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDED)


def test_boundary_values_are_traced_again_under_autocast() -> None:
    model, x = NetBase(), torch.ones(2, DIM)
    first, second = split_by_module(model, [2, 2], (x,)).stages
    assert torch.equal(second(*first(x)), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(second(*first(x)), model(x))
        assert second(*first(x)).dtype is torch.bfloat16
    assert torch.equal(second(*first(x)), model(x))


def test_another_dtype_than_in_the_trace_is_named() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.double() if Fickle.casts else x

    class Fickle(NetBase):
        casts = False

        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].append(Casts())

    first = split_by_module(Fickle(), [2, 2], (torch.ones(2, DIM),)).stages[0]
    Fickle.casts = True
    told = r"blocks\.1 returned 'float64 \(2, 6\)', in its trace 'float32 \(2, 6\)'"
    with pytest.raises(PartitionError, match=told):
        first(torch.ones(2, DIM))
