"""A model that was built on the meta device begins with the values of one that was not.

Parents initialize their children, models what they hold themselves, and some have draws of
another width within them: all that has to come out as in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from tests.real_models import REAL_MODELS, RealModel

FAMILIES = [pytest.param(case, id=name) for name, case in REAL_MODELS.items()]


def on_meta(case: RealModel) -> nn.Module:
    with torch.device("meta"):
        return case.make().train()


def values(module: nn.Module | Pipeline) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


def pooled(named: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Tensors of the same place in different layers together: what is drawn for one is little."""
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in named.items():
        place = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(place, []).append(tensor.double().flatten())
    return groups


def disagreement(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, str]:
    """Which tensors are drawn from another distribution, or have another constant."""
    found = {}
    made = pooled(ours)
    for place, tensors in pooled(plain).items():
        want, got = torch.cat(tensors), torch.cat(made[place])
        if want.numel() == 1:
            same = bool(got.isfinite().all())
        elif want.std() == 0 or place.endswith("inv_freq"):
            same = torch.equal(want, got)
        else:  # ten standard errors of a normal's width, and of its mean
            errors = want.numel() ** -0.5
            same = bool(
                abs(got.std() / want.std() - 1) < 10 * errors / 2**0.5
                and abs(got.mean() - want.mean()) < 10 * errors * want.std()
            )
        if not same:
            found[place] = f"{want.mean()}, {want[:3]}, here {got.mean()}, {got[:3]}"
    return found


@pytest.mark.parametrize("case", FAMILIES)
def test_each_family_begins_as_the_plain_model_does(
    case: RealModel, caplog: pytest.LogCaptureFixture
) -> None:
    plain = case.model(seed=1)
    model = on_meta(case)
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING, "penstock"):
        pipe = Pipeline(
            model,
            split=[case.trunk[len(case.trunk) // 2]],
            example=case.example(),
            ranks=2,
            n_microbatches=2,
        )
    assert type(pipe.stages[0].submod).__name__ == "ModuleStage"
    assert "left uninitialized" not in caplog.text
    ours, wanted = values(pipe), values(plain)
    assert ours.keys() == wanted.keys()
    if case.name == "vit":  # whose constructor draws two tensors by itself
        assert not disagreement(ours, wanted)
    else:
        assert not [name for name in wanted if not torch.equal(ours[name], wanted[name])]
    assert pipe.step(**case.example()).isfinite()


def test_the_comparison_sees_another_width() -> None:
    """So that the test above could fail: GPT-2 draws one weight of a layer narrower than others."""
    plain = values(REAL_MODELS["gpt2"].model())
    wider = {n: 2.8 * t if "c_proj.weight" in n else t for n, t in plain.items()}
    assert set(disagreement(wider, plain)) == {
        "transformer.h.*.attn.c_proj.weight",
        "transformer.h.*.mlp.c_proj.weight",
    }


class Scaled(nn.Module):
    """Draws wide; its parent makes that narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Parent(nn.Module):
    """Initializes its child after that has initialized itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(0.125).abs_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    """Holds tensors of its own: a parameter that it draws itself, and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parent() for _ in range(4))
        self.scale = nn.Parameter(torch.empty(32))
        self.register_buffer("shift", torch.ones(32), persistent=False)
        self.register_buffer("order", torch.arange(32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale + self.shift)[:, self.order]


def net_on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def test_parents_come_after_their_children() -> None:
    pipe = Pipeline(net_on_meta(), ranks=2, n_microbatches=1)
    for name, weight in pipe.named_parameters():
        if name.startswith("layers"):
            assert weight.min() >= 0 and 0.06 < weight.std() < 0.09, name  # of |N(0, 1/8)|: 0.075
    assert (dict(pipe.named_parameters())["scale"] == 0.5).all()


def test_a_function_meets_the_whole_model_and_its_children_first() -> None:
    met: list[str] = []
    model = net_on_meta()
    names = {id(module): name for name, module in model.named_modules()}

    def fill(module: nn.Module) -> None:
        met.append(names[id(module)])
        for param in module.parameters(recurse=False):
            param.fill_(1.0)
        if isinstance(module, Net):
            module.shift.fill_(2.0)
            module.order.copy_(torch.arange(32))

    pipe = Pipeline(model, ranks=2, n_microbatches=1, init_fn=fill)
    whole: list[str] = []
    net_on_meta().apply(lambda module: whole.append(type(module).__name__))
    assert [type(model.get_submodule(name)).__name__ for name in met] == whole
    assert (dict(pipe.named_buffers())["shift"] == 2).all()
    assert torch.equal(dict(pipe.named_buffers())["order"], torch.arange(32))


def test_uninitialized_buffers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Whole numbers as well: zeros would be taken for positions without a word."""
    with caplog.at_level(logging.WARNING, "penstock"):
        Pipeline(net_on_meta(), ranks=2, n_microbatches=1)
    assert "left uninitialized: shift, order; " in caplog.text


def test_values_of_submodules_are_kept() -> None:
    model = net_on_meta()
    model.layers[1] = Parent()
    kept = model.layers[1].inner.weight.detach().clone()
    pipe = Pipeline(model, ranks=2, n_microbatches=1)
    assert torch.equal(dict(pipe.named_parameters())["layers.1.inner.weight"], kept)


class Routed(nn.Module):
    """Sends rows to an expert by their values: how many, shapes don't tell."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, chosen, self.expert(x[chosen]))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_run_on_no_shapes_are_run_on_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Of nobody's, one layer at a time; what is trained is the state's."""
    plain, x, target = Router(), torch.randn(8, 4), torch.randn(8, 4)
    with torch.device("meta"):
        model = Router()
    with caplog.at_level(logging.INFO, "penstock"):
        pipe = Pipeline(model, loss_fn=F.mse_loss, example=(x,), ranks=2, n_microbatches=1)
    assert "traced on values: layers.0 can't run on shapes alone" in caplog.text
    pipe.load_state_dict(plain.state_dict())
    loss = F.mse_loss(plain(x), target)
    loss.backward()
    assert torch.equal(pipe.step(x, target=target), loss.detach())
    for name, param in pipe.named_parameters():
        assert torch.equal(param.grad, plain.get_parameter(name).grad)


def test_experts_are_cut_by_module() -> None:
    """Where they run on no shapes, as with some versions of torch, on numbers of nobody's."""
    case = REAL_MODELS["mixtral"]
    plain, batch = case.model(), case.example()
    pipe = Pipeline(on_meta(case), example=batch, ranks=2, n_microbatches=1)
    pipe.load_state_dict(plain.state_dict())
    loss = plain(**batch).loss
    loss.backward()
    assert torch.allclose(pipe.step(**batch), loss.detach(), rtol=1e-6)
    for name, param in pipe.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)
