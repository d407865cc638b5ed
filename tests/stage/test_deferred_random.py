"""Random small modules: whatever is composed, a split backward gives autograd's gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.stage.deferral_cases import Block, assert_same, plain, split

DIM = 4
Step = Callable[["Net", Tensor], Tensor]

# Steps on a (2, 3, DIM) tensor, with parameters that several of them share.
STEPS: dict[str, Step] = {
    "linear": lambda n, t: n.a(t),
    "other linear": lambda n, t: n.b(t),
    "tied": lambda n, t: F.linear(t, n.a.weight.T),
    "matmul": lambda n, t: t @ n.w,
    "scaled matmul": lambda n, t: t @ (n.w * n.scale),
    "convolution": lambda n, t: n.conv(t),
    "norm": lambda n, t: n.norm(t),
    "batch norm": lambda n, t: n.batch_norm(t),
    "scale": lambda n, t: t * n.scale,
    "shift": lambda n, t: n.scale + t,
    "shift in place": lambda n, t: (t * 1.5).add_(n.scale),
    "square": lambda n, t: t * t,
    "relu in place": lambda n, t: F.relu(t + 0.1, inplace=True),
    "view in place": lambda n, t: first_row_scaled(n.a(t)),
    "residual": lambda n, t: t + n.b(t).tanh(),
    "swap": lambda n, t: n.c(t.transpose(1, 2)).transpose(1, 2),
    "attention": lambda n, t: n.attention(t, t, t, need_weights=False)[0],
    "block": lambda n, t: n.block(t),
    "checkpoint": lambda n, t: checkpoint(lambda u: n.b(n.norm(u)) @ n.w, t, use_reentrant=False),
    "reentrant checkpoint": lambda n, t: checkpoint(
        lambda u: n.a(u) * n.scale, t, use_reentrant=True
    ),
    "no gradient": lambda n, t: t * n.a(t.detach()).detach(),
    "cut": lambda n, t: n.a(t.detach()),
    "off the path": lambda n, t: t + (n.scale * 2).exp(),
    "einsum": lambda n, t: torch.einsum("bti,oi->bto", t, n.w),
    "double": lambda n, t: n.a(n.a(t)),
}


def first_row_scaled(t: Tensor) -> Tensor:
    t[0].mul_(2)
    return t


class Net(nn.Module):
    """A chain of named steps; the steps in ``branches`` start from the input and are added."""

    def __init__(self, steps: list[str], branches: list[str], frozen: set[str]) -> None:
        super().__init__()
        self.steps, self.branches = steps, branches
        self.a, self.b, self.c = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(3, 3)
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.norm, self.batch_norm = nn.LayerNorm(DIM), nn.BatchNorm1d(3)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.block = Block(DIM, 2)
        self.w = nn.Parameter(torch.randn(DIM, DIM) * 0.4)
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        out = t
        for step in self.steps:
            out = STEPS[step](self, out)
        side = torch.zeros(())
        for branch in self.branches:
            side = side + STEPS[branch](self, t).sin()
        return out, side


names = st.sampled_from(sorted(STEPS))
nets = st.builds(
    Net,
    st.lists(names, min_size=1, max_size=6),
    st.lists(names, max_size=2),
    st.sets(st.sampled_from(["a.weight", "b.bias", "w", "scale", "norm.weight"]), max_size=2),
)


@given(net=nets, needs_grad=st.booleans(), steps=st.integers(1, 2), seed=st.integers(0, 9))
def test_deferred(net: Net, needs_grad: bool, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # A reentrant checkpoint of an input without gradient gives none, and says so, without us too.
    needs_grad |= "reentrant checkpoint" in (*net.steps, *net.branches)
    inputs = (torch.randn(2, 3, DIM, generator=generator).requires_grad_(needs_grad),)
    assert_same(split(net, inputs, steps), plain(net, inputs, steps), exact=False)
