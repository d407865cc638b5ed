"""What playing a program is about: training, or evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.loss import needs_target

__all__ = ["LossFn", "Role"]

LossFn = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What the players of one mode (training, or evaluation) have in common.

    Args:
        train: whether gradients are computed.
        loss_fn: ``loss_fn(output, target)`` gives a scalar, or ``(scalar, metrics)``.
        loss_divisor: what each microbatch's loss is divided by in the backward.
        dynamic_shapes: whether shapes may change from microbatch to microbatch.
        overlap: whether forward and backward of a block run side by side, where they can.
    """

    train: bool
    loss_fn: LossFn | None
    loss_divisor: int
    dynamic_shapes: bool
    overlap: bool = False

    @property
    def needs_target(self) -> bool:
        """Whether there is a loss that can't do without a target."""
        return self.loss_fn is not None and needs_target(self.loss_fn)
