"""Small models to train in pipelines: each a list of layers, and a batch that they take.

Every model is an ``nn.Sequential`` of at least ``num_layers`` layers, so that it can be cut into
that many stages; tests over one process and over several share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CASES", "Case", "Block", "mlp", "token_loss"]

DIM = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, how to make a batch for it, and its loss."""

    model: Callable[[int], nn.Sequential]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss_fn: Callable[..., Any]

    def make(self, num_layers: int, seed: int = 0) -> nn.Sequential:
        """The model, its parameters drawn from ``seed``."""
        torch.manual_seed(seed)
        return self.model(num_layers)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def features(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, DIM) features, and targets alike."""
    generator = _seeded(seed)
    inputs = torch.randn(rows, DIM, generator=generator)
    return inputs, torch.randn(rows, DIM, generator=generator)


def mlp(num_layers: int) -> nn.Sequential:
    """Linear layers with a nonlinearity after each."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num_layers))
    )


class Block(nn.Module):
    """A transformer block: causal attention of one head and an MLP, with pre-norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.qkv(self.norm(x_BTD)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        x_BTD = x_BTD + self.out(attended)
        return x_BTD + self.mlp(x_BTD)


VOCABULARY = 11


class Embed(nn.Module):
    """Token and position embeddings."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(32, dim))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.tokens(tokens_BT) + self.positions[: tokens_BT.size(1)]


def gpt(num_layers: int) -> nn.Sequential:
    """Embedding, blocks, head."""
    blocks = [Block(DIM) for _ in range(max(1, num_layers - 2))]
    return nn.Sequential(Embed(DIM), *blocks, nn.Linear(DIM, VOCABULARY, bias=False))


def tokens(rows: int, seed: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """(rows, length) token numbers, and the next ones."""
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=_seeded(seed))
    return drawn[:, :-1], drawn[:, 1:]


def token_loss(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


class ConvNorm(nn.Module):
    """Convolution and batch norm, around which the input is added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + F.relu(self.norm(self.conv(x_BCHW)))


def convnet(num_layers: int) -> nn.Sequential:
    """Residual convolutions with batch norm."""
    return nn.Sequential(*(ConvNorm(3) for _ in range(num_layers)))


def images(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, 3, 4, 4) images, and targets alike."""
    generator = _seeded(seed)
    inputs = torch.randn(rows, 3, 4, 4, generator=generator)
    return inputs, torch.randn(rows, 3, 4, 4, generator=generator)


class Recurrent(nn.Module):
    """An LSTM over the sequence; its state is not passed on."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.lstm(x_BTD)[0]


def lstm(num_layers: int) -> nn.Sequential:
    """LSTMs, one after the other."""
    return nn.Sequential(*(Recurrent(DIM) for _ in range(num_layers)))


def sequences(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, 4, DIM) sequences, and targets alike."""
    generator = _seeded(seed)
    inputs = torch.randn(rows, 4, DIM, generator=generator)
    return inputs, torch.randn(rows, 4, DIM, generator=generator)


CASES = {
    "mlp": Case(model=mlp, batch=features, loss_fn=F.mse_loss),
    "gpt": Case(model=gpt, batch=tokens, loss_fn=token_loss),
    "convnet": Case(model=convnet, batch=images, loss_fn=F.mse_loss),
    "lstm": Case(model=lstm, batch=sequences, loss_fn=F.mse_loss),
}
