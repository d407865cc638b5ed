"""Models with habits that a cut has to respect, one each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = [
    "DIM",
    "ODD_MODELS",
    "Block",
    "Cached",
    "Checkpointed",
    "Layerwise",
    "NetBase",
    "TwiceLate",
    "own_loss",
]

DIM = 6


class Block(nn.Module):
    """A linear layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def own_loss(output: Any, target: object = None) -> Tensor:
    """The loss function of a model that computes its loss itself."""
    loss: Tensor = output["loss"]
    return loss


def linears(num: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num))


class NetBase(nn.Module):
    """An embedding of features, four blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = linears(4)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(NetBase):
    """Sums between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 0.5
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class InPlace(NetBase):
    """Writes into what crosses, between the blocks and by a block."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x += 1.0
        first = x
        for block in self.blocks:
            x = block(x)
            x.add_(1.5)
        x = x + first
        return self.head(self.act(x))


class Skips(NetBase):
    """Every block's output goes to the end, and the input to the middle."""

    def forward(self, x: Tensor) -> Tensor:
        whole = [self.embed(x)]
        for i, block in enumerate(self.blocks):
            whole.append(block(whole[-1] + (x if i == 2 else 0)))
        return self.head(torch.stack(whole).mean(0))


class Loose(NetBase):
    """Parameters and a buffer that no module of its own holds, used in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 0.7))
        self.shift = nn.Parameter(torch.full((DIM,), 0.1))
        self.register_buffer("offset", torch.linspace(0, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x + self.shift + self.offset)


class Scattered(NetBase):
    """A block's rows are written into a tensor that the top-level forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            rows = torch.zeros(x.shape)
            rows[:] = block(x)
            x = rows
        return self.head(x)


class TiedInGlue(NetBase):
    """Computes with the embedding's weight again at the end, outside of the module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.head(x), self.embed.weight)


class CalledTwice(NetBase):
    """The embedding runs twice, on inputs that are there from the start."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.embed(x), self.embed(-x)
        for i, block in enumerate(self.blocks):
            first = block(first + second if i == 2 else first)
        return self.head(first)


class Uneven(NetBase):
    """Rows are gathered, sliced and padded between the blocks; a mask is made of the input."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        keep = (rows > 0).to(x.dtype)[:, None]
        x = self.embed(x) * keep
        padded = torch.zeros(x.shape[0] + 1, x.shape[1]).to(x.dtype)
        for block in self.blocks:
            padded = torch.cat([block(x), padded[-1:]])
            x = padded[:-1] * keep
        return self.head(x)[:, :DIM]


class Filled(NetBase):
    """Blocks' outputs are written into a tensor that was made between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        sums = torch.zeros_like(x, requires_grad=False).index_add(0, torch.zeros(len(x)).long(), x)
        return self.head(x) + sums


class Structured(NetBase):
    """A block that returns and takes dicts and tuples with plain values in them."""

    class Wrapped(nn.Module):
        """A block in a dict."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, given: dict[str, Any]) -> dict[str, Any]:
            hidden = self.inner(given["hidden"])
            return {"hidden": hidden, "trail": (*given["trail"], hidden[:, :1]), "depth": 3}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrapped(block) for block in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {"hidden": self.embed(x), "trail": (), "depth": 0}
        for block in self.blocks:
            given = block(given)
        return self.head(given["hidden"] * given["depth"]) + sum(given["trail"])


class Checkpointed(NetBase):
    """Blocks whose forward runs again in the backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Unused(NetBase):
    """A layer that the forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(DIM, DIM)


ODD_MODELS = {
    cls.__name__: cls
    for cls in (
        NetBase,
        Residual,
        InPlace,
        Skips,
        Loose,
        Scattered,
        TiedInGlue,
        CalledTwice,
        Uneven,
        Filled,
        Structured,
        Checkpointed,
        Unused,
    )
}


class TwiceLate(NetBase):
    """The first block runs again after the last one: no cut between them keeps it in one stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Cached(NetBase):
    """Blocks that write into an object that is handed from one to the next."""

    class Store:
        """What the blocks write into."""

        def __init__(self) -> None:
            self.kept: list[Tensor] = []

    class Keeps(nn.Module):
        """A block that keeps its output."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, store: Any) -> Tensor:
            store.kept.append(self.inner(x))
            return sum(store.kept)  # type: ignore[return-value]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Keeps(block) for block in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        store = self.Store()
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, store)
        return self.head(x)


class Layerwise(NetBase):
    """Between its blocks it does what it is told to: for what a cut does not allow."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)
