"""What a script does with gradients once a step has left them: optimizers, rates, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn, optim
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

__all__ = ["CLIPS", "LR", "OPTIMIZERS", "RATES", "Habits"]

LR = 0.01
# Of a gradient that is rounding alone, nothing is to be made.
EPS = 1e-4

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda groups: optim.SGD(groups, lr=LR, momentum=0.9),
    "adamw": lambda groups: optim.AdamW(groups, lr=LR, eps=EPS),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=LR, eps=EPS),
    "amsgrad": lambda groups: optim.Adam(groups, lr=LR, eps=EPS, amsgrad=True),
    "rmsprop": lambda groups: optim.RMSprop(groups, lr=LR, eps=EPS, momentum=0.5),
}

RATES: dict[str, Callable[[Any], Any]] = {
    "falling": lambda optimizer: ExponentialLR(optimizer, 0.8),
    "warm": lambda optimizer: SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 6)],
        milestones=[2],
    ),
    "one cycle": lambda optimizer: OneCycleLR(
        optimizer, 4 * LR, total_steps=100, cycle_momentum=isinstance(optimizer, optim.AdamW)
    ),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.1),
}

# Ways of clipping by a norm: the largest one, and its kind.
CLIPS = {"norm": (0.1, 2.0), "largest": (0.01, math.inf), "measured": (math.inf, 2.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What is done after the backwards.

    Args:
        optimizer: one of ``OPTIMIZERS``.
        scaled: whether losses are scaled, by a ``GradScaler``.
        in_backward: whether each parameter takes a step in its hook on its accumulated gradient,
            by an optimizer of its own.
        groups: whether biases have a group of their own, without decay.
        rates: one of ``RATES``, if learning rates change.
        averaged: whether an average of the parameters is kept.
    """

    optimizer: str = "sgd"
    scaled: bool = False
    in_backward: bool = False
    groups: bool = False
    rates: str = ""
    averaged: bool = False

    def make_optimizer(
        self, named: Iterable[tuple[str, nn.Parameter]], *, sparse: bool
    ) -> optim.Optimizer:
        """The optimizer of these parameters, of which a rank may have none.

        Args:
            named: the parameters.
            sparse: whether some have sparse gradients, which most optimizers refuse.
        """
        biases: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, param in named:
            (biases if self.groups and name.endswith("bias") else others).append(param)
        groups: list[dict[str, Any]] = [{"params": others}]
        if self.groups:
            decay = 0.0 if sparse else 0.1
            groups = [{"params": biases, "lr": 2 * LR}, {"params": others, "weight_decay": decay}]
        if sparse:
            return optim.SGD(groups, lr=LR)
        return OPTIMIZERS[self.optimizer](groups)

    def make_rates(self, optimizer: optim.Optimizer) -> Any:
        """What changes the learning rates; None if nothing does."""
        return RATES[self.rates](optimizer) if self.rates else None
