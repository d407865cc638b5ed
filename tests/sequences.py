"""Causal models whose layers take sequences piece by piece, and train a pipeline beside the whole.

Layers take ``state``, what they returned for the piece before, and return ``(output, state)``.
Called without one, they take a whole sequence: this is the plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.schedule.program import Program
from penstock.stage.stage import takes_state
from tests.compare import Tolerance, assert_same, plain_step, snapshot
from tests.models import VOCABULARY, token_loss

__all__ = ["SUMS", "Block", "Embed", "Recurrent", "Whole", "causal", "compare_steps", "token_batch"]

DIM = 8
# The model is in double precision: its sums, in another order, agree to this.
SUMS = Tolerance(relative=1e-11, absolute=1e-13)


class Embed(nn.Module):
    """Token and position embeddings; the state is the number of positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Parameter(torch.randn(32, DIM))

    def forward(self, tokens_BT: Tensor, state: int | None = None) -> tuple[Tensor, int]:
        begin = state or 0
        end = begin + tokens_BT.size(1)
        return self.tokens(tokens_BT) + self.positions[begin:end], end


class Block(nn.Module):
    """A transformer block; the state holds the keys and values of all positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())

    def forward(self, x_BTD: Tensor, state: dict[str, Tensor] | None = None) -> Any:
        q, k, v = self.qkv(self.norm(x_BTD)).chunk(3, dim=-1)
        if state is not None:
            k, v = torch.cat([state["k"], k], dim=1), torch.cat([state["v"], v], dim=1)
        num, total = q.size(1), k.size(1)
        seen = torch.ones(num, total, dtype=torch.bool, device=q.device).tril(total - num)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], seen)
        x_BTD = x_BTD + self.out(attended[:, 0])
        return x_BTD + self.mlp(x_BTD), {"k": k, "v": v}


class Recurrent(nn.Module):
    """A GRU; the state is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x_BTD: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y_BTD, last = self.gru(x_BTD, state)
        return x_BTD + y_BTD, last


class Whole(nn.Sequential):
    """The plain model: each layer takes whole sequences, and nobody asks for its state."""

    def forward(self, value: Any) -> Any:
        for layer in self:
            value = layer(value)[0] if takes_state(layer) else layer(value)
        return value


def causal(num_layers: int, *, seed: int = 0) -> nn.Sequential:
    """Embedding, blocks with a recurrent layer among them, head."""
    torch.manual_seed(seed)
    inner: list[nn.Module] = [Block() for _ in range(max(2, num_layers - 2))]
    inner[1] = Recurrent()
    layers = [Embed(), *inner, nn.Linear(DIM, VOCABULARY)]
    return nn.Sequential(*layers).double()


def token_batch(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, length) token numbers, and the next ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def compare_steps(
    layers: nn.Sequential, program: Program, *, length: int, rows: int = 1, **options: Any
) -> None:
    """Train a pipeline over pieces and the plain model over whole sequences, side by side.

    Args:
        layers: the model.
        program: what the pipeline plays.
        length: of the sequences.
        rows: of a microbatch.
        options: of the pipeline.
    """
    plain: Any = Whole(*copy.deepcopy(layers))
    for module in plain.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # which a copy on a device loses, and is warned of
    pipe = Pipeline(layers, loss_fn=token_loss, schedule=program, **options)
    num = program.num_whole_microbatches
    for step in range(2):
        inputs, target = (t.to(pipe.device) for t in token_batch(rows * num, length, step))
        expected = plain_step(plain, token_loss, inputs, target=target, n_microbatches=num)
        loss = pipe.step(inputs, target=target)
        torch.testing.assert_close(loss, expected.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(pipe.losses, list(expected.losses), rtol=1e-12, atol=0)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=SUMS, partial=pipe.is_distributed)
        output = pipe.eval(inputs)
        if output is not None:
            with torch.no_grad():
                torch.testing.assert_close(output, plain(inputs), rtol=1e-11, atol=1e-13)
