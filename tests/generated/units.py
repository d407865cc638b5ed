"""Layers to make models of, each with a habit: (rows, DIM) in, (rows, DIM) out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models import DIM
from tests.models import Block as Attention

__all__ = ["DIM", "UNITS", "Unit"]

WORDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A kind of layer.

    Args:
        make: a new one.
        keeps: whether forward changes buffers, in an order that counts.
        random: whether forward draws random numbers.
        sums: whether a parameter's or a value's gradients may be summed in another order than in
            one graph.
        sparse: whether a step may leave a parameter without a gradient.
        exports: whether ``torch.export`` takes it.
        empty: whether it has no parameters.
        coarse: whether under autocast a split backward sums its gradients in another precision.
        feature: by which it is switched off.
    """

    make: Callable[[], nn.Module]
    keeps: bool = False
    random: bool = False
    sums: bool = False
    sparse: bool = False
    exports: bool = True
    empty: bool = False
    coarse: bool = False
    feature: str | None = None


class Of(nn.Module):
    """A function of (itself, x), with members of its own."""

    def __init__(
        self, function: Callable[[Any, Tensor], Tensor], **members: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Square(torch.autograd.Function):
    """x² · weight, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * 2 * x * weight, (grad * x * x).sum(0)


class Statistics(nn.Module):
    """Keeps what it has seen: added in place, and in a tensor that takes the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x - self.mean)
        if self.training:
            self.calls += 1
            self.mean = self.mean.lerp(x.detach().mean(0).to(self.mean.dtype), 0.1)
            self.last = x.detach().abs().max()
        return y.tanh()


class Experts(nn.Module):
    """Rows go to one of three experts, to some of which none may go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(best == i)
            if len(rows):
                y = y.index_add(0, rows, (expert(x[rows]) * weights[rows, i, None]).to(y.dtype))
        return x + y


class Words(nn.Module):
    """Looks up what the signs of its input say."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, DIM, sparse=sparse, padding_idx=None if sparse else 0)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table((x > 0).sum(-1))


class Narrow(nn.Module):
    """Computes in bfloat16, by an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.to(x.dtype).tanh()


class Checkpointed(nn.Module):
    """Runs its layers again in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def linear() -> nn.Module:
    return nn.Linear(DIM, DIM)


def compiled() -> nn.Module:
    module = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())
    module.compile(backend="aot_eager")
    return module


def no_grad_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = 1 + m.a(x).abs().mean()
    return torch.tanh(m.b(x) / scale)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.add_(m.w)
    y[:, :2].mul_(2)
    return F.relu_(y) + 0.1


def on_its_input(m: Any, x: Tensor) -> Tensor:
    x.mul_(0.5)
    return torch.tanh(m.a(x))


def hook_within(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return torch.tanh(y)


UNITS: dict[str, Unit] = {
    "linear": Unit(make=lambda: nn.Sequential(linear(), nn.Tanh())),
    "norm": Unit(make=lambda: nn.Sequential(nn.LayerNorm(DIM), linear(), nn.GELU())),
    "activation": Unit(make=nn.Tanh, empty=True),
    "attention": Unit(
        make=lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), Attention(3), nn.Flatten())
    ),
    "encoder": Unit(
        make=lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)),
            nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True),
            nn.Flatten(),
        ),
        exports=False,
        coarse=True,
    ),
    "recurrent": Unit(
        make=lambda: Of(
            lambda m, x: m.gru(x.view(-1, 3, 2))[0].flatten(1),
            gru=nn.GRU(2, 2, batch_first=True),
        ),
        exports=False,
    ),
    "convolution": Unit(
        make=lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.Conv1d(3, 3, 3, padding=1), nn.GELU(), nn.Flatten()
        )
    ),
    "batch norm": Unit(
        make=lambda: nn.Sequential(
            linear(), nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3), nn.Flatten(), nn.Tanh()
        ),
        keeps=True,
        feature="keeping",
    ),
    "statistics": Unit(make=Statistics, keeps=True, exports=False, feature="keeping"),
    "spectral norm": Unit(
        make=lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(DIM, DIM)), nn.Tanh()),
        keeps=True,
        exports=False,
        feature="keeping",
    ),
    "weight norm": Unit(
        make=lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(DIM, DIM)), nn.Tanh()),
        exports=False,
    ),
    "dropout": Unit(
        make=lambda: nn.Sequential(linear(), nn.Dropout(0.4), nn.Tanh()),
        random=True,
        feature="random",
    ),
    "checkpoint": Unit(make=lambda: Checkpointed(reentrant=False), exports=False),
    "reentrant checkpoint": Unit(make=lambda: Checkpointed(reentrant=True), exports=False),
    "checkpointed dropout": Unit(
        make=lambda: Of(
            lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
            inner=nn.Sequential(linear(), nn.Dropout(0.4), nn.Tanh()),
        ),
        random=True,
        exports=False,
        feature="random",
    ),
    "function": Unit(
        make=lambda: Of(lambda m, x: Square.apply(m.a(x).tanh(), m.w), a=linear(), w=weight(DIM)),
        exports=False,
    ),
    "experts": Unit(make=Experts, sparse=True, exports=False),
    "words": Unit(make=lambda: Words(sparse=False)),
    "sparse words": Unit(make=lambda: Words(sparse=True), exports=False),
    "narrow": Unit(make=Narrow),
    "compiled": Unit(make=compiled, exports=False, feature="compiled"),
    "twice": Unit(make=lambda: Of(lambda m, x: m.a(m.a(x).tanh()).tanh(), a=linear()), coarse=True),
    "residual": Unit(make=lambda: Of(lambda m, x: x + m.a(x).tanh(), a=linear())),
    "matrix": Unit(
        make=lambda: Of(lambda m, x: (x @ m.w * m.s).sin(), w=weight(DIM, DIM), s=weight(1))
    ),
    "in place": Unit(make=lambda: Of(in_place, a=linear(), w=weight(DIM))),
    "shift": Unit(make=lambda: Of(lambda m, x: m.a(x) + 0.1, a=linear())),
    "in place on its input": Unit(make=lambda: Of(on_its_input, a=linear())),
    "relu in place": Unit(make=lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear())),
    "no grad inside": Unit(make=lambda: Of(no_grad_inside, a=linear(), b=linear()), sparse=True),
    "unused": Unit(
        make=lambda: Of(lambda m, x: m.a(x).tanh(), a=linear(), b=linear()), sparse=True
    ),
    "detached": Unit(make=lambda: Of(lambda m, x: m.a(x.detach()).tanh() + 0.5 * x, a=linear())),
    "hook within": Unit(make=lambda: Of(hook_within, a=linear()), exports=False),
}
