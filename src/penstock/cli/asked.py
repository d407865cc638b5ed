"""How a model is asked for on the command line, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Asked", "Loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a model is asked for.

    Args:
        name: ``module:factory``, or the name of a configuration or model class.
        settings: ``key=value`` for the configuration.
        batch: rows of the example.
        length: tokens per row, where the model takes tokens.
        device: where it is to live.
        dtype: its dtype, by torch's name.
        max_bytes: the most that its parameters may take.
        sample: how many layers to make of each trunk; None for all.
    """

    name: str
    settings: tuple[str, ...] = ()
    batch: int = 1
    length: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    max_bytes: float = 4e9
    sample: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A model to measure.

    Args:
        model: the model.
        example: one microbatch for it.
        trunks: of each trunk, the names of its layers in the whole model, where only some of
            them were made; else empty.
    """

    model: nn.Module
    example: Any
    trunks: Mapping[str, Sequence[str]]
