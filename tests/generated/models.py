"""Models of units: layers in a row, or a module that computes between them; batches and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.crossings import Give, Take
from tests.generated.units import DIM, UNITS
from tests.models import token_loss
from tests.sequences import Whole, causal, token_batch

__all__ = ["Batch", "Net", "Recipe", "loss_of", "make_batch", "make_model", "own_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a model is made of.

    Args:
        seed: of its parameters.
        way: how it is cut: a list of ``layers``; ``by module`` or ``captured``, a model with a
            forward of its own; ``pieces``, layers that take sequences piece by piece.
        units: the names of its layers; ``give NAME`` and ``take NAME`` stand for what crosses in
            ``tests.crossings``. Of ``pieces`` their number counts alone.
        frozen: the units whose parameters are frozen from the start.
        tied: whether the last layer has the first one's weight.
        between: what a model with a forward of its own does between units.
        double: whether parameters are in double precision.
    """

    seed: int
    way: str
    units: tuple[str, ...]
    frozen: tuple[int, ...] = ()
    tied: bool = False
    between: frozenset[str] = frozenset()
    double: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step is given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None


class Net(nn.Module):
    """Units in a list, and what models do between them.

    Args:
        units: the blocks.
        between: any of ``skip`` (the first block's input is added behind the last),
            ``residual``, ``scale`` (a keyword argument), ``shift`` (a parameter of its own),
            ``offset`` (a buffer of its own), ``in place``, and ``loss`` (from labels).
        tied: whether the head is the embedding's weight.
    """

    def __init__(self, units: Sequence[nn.Module], between: frozenset[str], tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(units)
        self.head = nn.Linear(DIM, DIM)
        if tied:
            self.head.weight = self.embed.weight
        self.between = between
        self.shift = nn.Parameter(torch.full((DIM,), 0.1)) if "shift" in between else None
        self.register_buffer("offset", torch.linspace(0, 1, DIM) if "offset" in between else None)

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = first = self.embed(x) + 0.1
        for block in self.blocks:
            y = block(x)
            if "in place" in self.between:
                y = y + 0.0
                y += 0.5
            if scale is not None:
                y = y * scale
            x = x + y if "residual" in self.between else y
        if self.shift is not None:
            x = x * self.shift
        if self.offset is not None:
            x = x + self.offset
        output = self.head(x + first if "skip" in self.between else x)
        if "loss" in self.between:
            return {"loss": F.mse_loss(output, labels), "output": output}
        return output


def make_model(recipe: Recipe) -> Any:
    """The model in one piece; the same values for the same recipe."""
    if recipe.way == "pieces":
        return Whole(*causal(len(recipe.units), seed=recipe.seed))
    torch.manual_seed(recipe.seed)
    units = [_unit(name) for name in recipe.units]
    for i in recipe.frozen:
        units[i].requires_grad_(False)
    if recipe.way == "layers":
        model: nn.Module = nn.Sequential(*units)
        if recipe.tied:
            model[-1].weight = model[0].weight  # type: ignore[index]
    else:
        model = Net(units, recipe.between, recipe.tied)
    return model.double() if recipe.double else model


def _unit(name: str) -> nn.Module:
    kind, _, crossing = name.partition(" ")
    match kind:
        case "give":
            return Give(crossing)
        case "take":
            return Take(crossing)
        case "pass":
            return nn.Identity()
        case "plain":
            return nn.Linear(DIM, DIM)
        case _:
            return UNITS[name].make()


def make_batch(recipe: Recipe, rows: int, seed: int, *, length: int = 4) -> Batch:
    """A batch of so many rows, the same for the same numbers.

    Args:
        recipe: of the model that it is for.
        rows: their number.
        seed: of its values.
        length: of sequences, for ``pieces``.
    """
    if recipe.way == "pieces":
        inputs, target = token_batch(rows, length, seed)
        return Batch(args=(inputs,), kwargs={}, target=target)
    generator = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        drawn = torch.randn(rows, DIM, generator=generator)
        return drawn.double() if recipe.double else drawn

    inputs, target, scale = values(), values(), values()
    named = {"scale": scale} if "scale" in recipe.between else {}
    if "loss" in recipe.between:
        return Batch(args=(inputs,), kwargs={**named, "labels": target}, target=None)
    return Batch(args=(inputs,), kwargs=named, target=target)


def loss_of(recipe: Recipe) -> Any:
    """The loss function of the plain loop."""
    if recipe.way == "pieces":
        return token_loss
    return own_loss if "loss" in recipe.between else F.mse_loss


def own_loss(output: Any, _: object = None) -> Tensor:
    """That of a model that computes it itself."""
    loss: Tensor = output["loss"]
    return loss
