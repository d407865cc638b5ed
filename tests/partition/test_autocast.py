"""Cut by module, and run in other dtypes than the trace: under autocast, or cast after the cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import BoundaryError, PartitionError, Pipeline
from penstock.partition.forward.by_module import split_by_module
from tests.compare import Tolerance, assert_same, plain_step, snapshot
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


class Typed(NetBase):
    """Casts what it is given, and computes with the dtype of its embedding on every stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        third = torch.full((DIM,), 1 / 3, dtype=x.dtype)
        for block in self.blocks:
            x = block(x) * third
        return self.head(x)


def cast(modules: list[nn.Module]) -> None:
    for module in modules:
        module.to(torch.bfloat16)


def run_under_autocast(modules: list[nn.Module]) -> None:
    linears = (each for module in modules for each in module.modules())
    for linear in [each for each in linears if isinstance(each, nn.Linear)]:
        linear.forward = torch.autocast("cpu", dtype=torch.bfloat16)(linear.forward)  # type: ignore[method-assign]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("change", [cast, run_under_autocast])
def test_dtypes_that_casts_after_the_cut_bring(change: Any, schedule: str) -> None:
    model, x = Typed(), torch.randn(4, DIM)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, example=(x[:2],), loss_fn=square, schedule=schedule, ranks=2, n_microbatches=2
    )
    if change is cast:  # with shapes that are known by now
        assert torch.equal(pipe.eval(x), plain(x))
        assert pipe.step(x).isfinite()
        pipe.zero_grad()
    change([stage.submod for stage in pipe.stages])
    change([plain])
    for _ in range(2):
        loss = pipe.step(x)
        expected = plain_step(plain, square, x, n_microbatches=2)
        assert torch.equal(loss, expected.loss)
        assert_same(snapshot(pipe), snapshot(plain))
    assert pipe.eval(x).dtype is plain(x).dtype is torch.bfloat16


@pytest.mark.parametrize("has_example", [True, False])
def test_inputs_of_another_dtype_than_the_model_was_cut_in(has_example: bool) -> None:
    model, x = NetBase(), torch.randn(4, DIM)
    plain = copy.deepcopy(model).bfloat16()
    pipe = Pipeline(
        model,
        example=(x[:2],) if has_example else None,
        loss_fn=square,
        ranks=2,
        n_microbatches=2,
    )
    cast([stage.submod for stage in pipe.stages])
    loss = pipe.step(x.bfloat16())
    assert torch.equal(loss, plain_step(plain, square, x.bfloat16(), n_microbatches=2).loss)
    assert_same(snapshot(pipe), snapshot(plain))


class Fickle(NetBase):
    """Its first stage returns what a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.blocks[1].register_forward_hook(lambda _, args, output: output.to(self.dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        return self.head(self.blocks[3](self.blocks[2](x.float())))


def test_another_kind_of_dtype_than_in_the_trace_is_named() -> None:
    model = Fickle()
    first = split_by_module(model, [2, 2], (torch.ones(2, DIM),)).stages[0]
    model.dtype = torch.complex64
    told = r"blocks\.1 returned 'complex64\[2,6\]', in its trace 'float32\[2,6\]'"
    with pytest.raises(PartitionError, match=told):
        first(torch.ones(2, DIM))


def test_a_dtype_that_changes_between_microbatches_needs_dynamic_shapes() -> None:
    for dynamic in (False, True):
        model, x = Fickle(), torch.randn(4, DIM)
        plain = copy.deepcopy(model)
        pipe = Pipeline(
            model, example=(x[:2],), loss_fn=square, ranks=2, n_microbatches=2,
            dynamic_shapes=dynamic,
        )  # fmt: skip
        pipe.step(x)
        model.dtype = torch.float64
        if not dynamic:
            with pytest.raises(BoundaryError, match=r"float64\[2,6\].*pass dynamic_shapes=True"):
                pipe.step(x)
            continue
        plain_step(plain, square, x, n_microbatches=2)
        plain_step(plain, square, x, n_microbatches=2)
        pipe.step(x)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=Tolerance(relative=1e-6))
