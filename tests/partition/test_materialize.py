"""Models without memory become real, tensor by tensor, and stay one where they were one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, Pipeline, SplitPoint, pipeline
from penstock.partition.materialize import materialize
from tests.partition.odd_models import DIM, NetBase
from tests.real_models import REAL_MODELS

CPU = torch.device("cpu")
BEGINNING = SplitPoint.BEGINNING


def on_meta() -> NetBase:
    with torch.device("meta"):
        return NetBase()


def test_modules_initialize_themselves() -> None:
    model = on_meta()
    pipe = Pipeline(model, ranks=2, n_microbatches=1)
    assert all(p.isfinite().all() and p.std() > 0 for p in pipe.parameters())
    assert pipe.eval(torch.ones(2, DIM)).isfinite().all()


def test_by_a_users_function() -> None:
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
    materialize({0: first, 1: last}, CPU, [first, last])
    assert first.weight is last.weight and first.weight.isfinite().all()
    assert int(last.get_buffer("count")) == 0


def test_uninitialized_parameters_are_nan_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    with torch.device("meta"):
        bare = Bare()
    with caplog.at_level(logging.WARNING, "penstock"):
        materialize({0: bare}, CPU, [bare])
    assert bare.weight.isnan().all()
    assert "left uninitialized: weight; set them in init_fn=" in caplog.text


def test_parameters_that_wrap_fn_adds_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """The model's initializers don't know them."""

    def adapt(stage: nn.Module, _: int) -> None:
        stage.register_parameter("scale", nn.Parameter(torch.ones(1, device="meta")))

    pipe = Pipeline(on_meta(), ranks=2, n_microbatches=1, wrap_fn=adapt)
    assert "left uninitialized: scale, scale; " in caplog.text
    assert [name for name, p in pipe.named_parameters() if p.isnan().any()] == ["scale"] * 2


def test_loaded_values_are_kept() -> None:
    linear = nn.Linear(2, 2)
    before = linear.weight.clone()
    materialize({0: linear}, CPU, [linear])
    assert torch.equal(linear.weight, before)


def test_a_captured_model_without_memory() -> None:
    class Again(NetBase):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in (*self.blocks, self.blocks[0]):
                x = block(x)
            return self.head(x)

    with torch.device("meta"):
        model = Again()
    x = torch.randn(4, DIM)
    pipe = Pipeline(
        model, example=(x[:2],), ranks=2, n_microbatches=2, loss_fn=lambda y, _: y.mean()
    )
    assert type(pipe.stages[0].submod).__name__ == "StageModule"  # not by module
    plain = Again()
    pipe.load_state_dict(plain.state_dict())
    assert torch.equal(pipe.state_dict()["blocks.0.0.weight"], plain.blocks[0][0].weight)
    loss = pipe.step(x)
    assert torch.equal(loss, (plain(x[:2]).mean() + plain(x[2:]).mean()) / 2)


def test_a_captured_stage_holds_no_other_stages_memory() -> None:
    with torch.device("meta"):
        cut = pipeline(NetBase(), (torch.ones(2, DIM),), split_spec={"blocks.2": BEGINNING})
    first, last = (cut.get_stage_module(i) for i in range(2))
    materialize({0: first}, CPU, [first])
    assert not any(p.is_meta for p in first.parameters())
    assert all(p.is_meta for p in last.parameters())
    first.load_state_dict({n: torch.ones_like(p) for n, p in first.state_dict().items()})
    assert first(torch.ones(2, DIM))[0].isfinite().all()


def test_fixed_values_of_a_graph_on_the_meta_device_are_refused() -> None:
    class Fixed(NetBase):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.tensor([2.0], device=x.device)

    expected = r"fixed values \(\(1,\), torch.float32\) on the meta"
    with torch.device("meta"), pytest.raises(PartitionError, match=expected):
        pipeline(Fixed(), (torch.ones(2, DIM),), split_spec={"blocks.2": BEGINNING})


def test_the_error_says_why_the_model_was_exported() -> None:
    class Fixed(NetBase):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[3](self.embed(x))  # on the last stage, before the first one's blocks
            for block in self.blocks:
                x = block(x)
            return self.head(x) * torch.tensor([2.0], device=x.device)

    with torch.device("meta"):
        model = Fixed()
    with pytest.raises(PartitionError, match="fixed values") as caught:
        Pipeline(model, example=(torch.ones(2, DIM),), ranks=2, n_microbatches=1)
    assert "blocks.3 is in stage 0, but is called with" in str(caught.value)


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


class Adapted(nn.Module):
    """A linear layer with a low-rank update, which begins with none; what is new, is told as in
    peft."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return y


def test_adapters_are_not_initialized_by_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of random numbers the model that they adapt would begin as another one."""
    case = REAL_MODELS["llama"]
    with torch.device("meta"):
        model: Any = case.model()
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    pipe = Pipeline(model, example=case.example(), ranks=2, n_microbatches=2)
    assert "left uninitialized: " in caplog.text and "lora_B.weight" in caplog.text
    assert "base_layer" not in caplog.text
    for name, param in pipe.named_parameters():
        assert ("lora_" in name) == bool(param.isnan().all()), name


def test_adapters_are_initialized_by_init_fn() -> None:
    def init_fn(module: nn.Module) -> None:
        if isinstance(module, Adapted):
            nn.init.zeros_(module.lora_B.weight)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(*(Adapted(nn.Linear(DIM, DIM)) for _ in range(2)))
    pipe = Pipeline(model, init_fn=init_fn, ranks=2, n_microbatches=2)
    for name, param in pipe.named_parameters():
        assert ("lora_B" in name) != bool(param.any()), name
