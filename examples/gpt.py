"""A small GPT in plain PyTorch, over bytes. It knows nothing of pipelines.

    embed ─► block0 ─► block1 ─► ... ─► head        an nn.Sequential with these names

Shapes: B sequences, T positions, D channels, H heads, C channels per head, V byte values.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "Config", "Embedding", "Head", "cross_entropy", "gpt", "load_bytes"]

VOCABULARY = 256
TEXT = Path(__file__).parent / "data" / "paradise_lost.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The size of a GPT.

    Args:
        num_blocks: number of transformer blocks.
        dim: channels of the residual stream; a multiple of ``num_heads``.
        num_heads: attention heads.
        max_length: the longest sequence.
    """

    num_blocks: int = 8
    dim: int = 128
    num_heads: int = 4
    max_length: int = 64


class Embedding(nn.Module):
    """Bytes to vectors: what stands there, plus where."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.dim)
        self.position = nn.Embedding(config.max_length, config.dim)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        hidden_BTD: Tensor = self.token(bytes_BT) + self.position(positions_T)
        return hidden_BTD


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.contract = nn.Linear(4 * dim, dim)

    def attend(self, hidden_BTD: Tensor) -> Tensor:
        """Each position looks at itself and at what came before."""
        qkv = self.query_key_value(hidden_BTD).unflatten(-1, (3, self.num_heads, -1))
        query_BHTC, key_BHTC, value_BHTC = qkv.permute(2, 0, 3, 1, 4)
        seen_BHTC = F.scaled_dot_product_attention(query_BHTC, key_BHTC, value_BHTC, is_causal=True)
        seen_BTD: Tensor = self.project(seen_BHTC.transpose(1, 2).flatten(2))
        return seen_BTD

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + self.attend(self.attention_norm(hidden_BTD))
        expanded = F.gelu(self.expand(self.forward_norm(hidden_BTD)))
        return hidden_BTD + self.contract(expanded)


class Head(nn.Module):
    """Vectors to the scores of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.score = nn.Linear(config.dim, VOCABULARY, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        scores_BTV: Tensor = self.score(self.norm(hidden_BTD))
        return scores_BTV


def gpt(config: Config) -> nn.Sequential:
    """The model, its parameters drawn from torch's generator.

    Args:
        config: its size.

    Example:
        >>> scores = gpt(Config(num_blocks=4, dim=16))(torch.zeros(2, 5, dtype=torch.long))
        >>> scores.shape
        torch.Size([2, 5, 256])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=Embedding(config))
    for index in range(config.num_blocks):
        layers[f"block{index}"] = Block(config)
    layers["head"] = Head(config)
    return nn.Sequential(layers)


def cross_entropy(scores_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """The mean loss per byte, in nats."""
    return F.cross_entropy(scores_BTV.flatten(0, 1), target_BT.flatten())


def load_bytes(path: Path = TEXT) -> Tensor:
    """A text file's bytes, as int64."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return data.to(torch.int64)
