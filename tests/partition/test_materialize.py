"""Models without memory become real, tensor by tensor, and stay one where they were one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.partition.materialize import materialize
from tests.partition.odd_models import DIM, NetBase
from tests.real_models import REAL_MODELS

CPU = torch.device("cpu")


def on_meta() -> NetBase:
    with torch.device("meta"):
        return NetBase()


def test_modules_initialize_themselves() -> None:
    model = on_meta()
    pipe = Pipeline(model, ranks=2, n_microbatches=1)
    assert all(p.isfinite().all() and p.std() > 0 for p in pipe.parameters())
    assert pipe.eval(torch.ones(2, DIM)).isfinite().all()


def test_by_a_function_of_ones_own() -> None:
    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.fill_(0.25)

    pipe = Pipeline(on_meta(), ranks=2, n_microbatches=1, init_fn=fill)
    assert all((p == 0.25).all() and p.requires_grad for p in pipe.parameters())


def test_shared_tensors_stay_shared() -> None:
    with torch.device("meta"):
        first, last = nn.Linear(2, 2), nn.Linear(2, 2)
        last.weight = first.weight
        last.register_buffer("count", torch.zeros((), dtype=torch.int64))
    materialize([first, last], CPU)
    assert first.weight is last.weight and first.weight.isfinite().all()
    assert int(last.get_buffer("count")) == 0


def test_what_nobody_initializes_is_told_and_is_nan(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    with torch.device("meta"):
        bare = Bare()
    with caplog.at_level(logging.WARNING, "penstock"):
        materialize([bare], CPU)
    assert bare.weight.isnan().all()
    assert "initialized by nobody: weight; load a state" in caplog.text


def test_what_has_values_keeps_them() -> None:
    linear = nn.Linear(2, 2)
    before = linear.weight.clone()
    materialize([linear], CPU)
    assert torch.equal(linear.weight, before)


def test_a_hugging_face_model_initializes_itself() -> None:
    """Also what no state holds: the frequencies of its rotary tables."""
    case = REAL_MODELS["llama"]
    plain = case.model()
    with torch.device("meta"):
        model = case.model()
    pipe = Pipeline(model, example=case.example(), ranks=2, n_microbatches=2)
    buffers = dict(pipe.named_buffers())
    wanted = dict(plain.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in wanted.items())
    assert all(p.isfinite().all() for p in pipe.parameters())
    pipe.load_state_dict(plain.state_dict())
    assert torch.equal(
        pipe.eval(**case.example())["logits"],
        torch.cat([plain(**{k: v[i : i + 2] for k, v in case.example().items()}).logits
                   for i in (0, 2)]).detach(),
    )  # fmt: skip
