"""What a script does, move by move, with whatever trains: the plain model or a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from tests.generated.plans import Plan

__all__ = ["Evaluate", "Found", "Freeze", "Move", "Resume", "Step", "Trainer"]

Found: TypeAlias = Mapping[str, Tensor]


class Trainer(Protocol):
    """What moves are made with."""

    def step(self, move: Step) -> Found:
        """Train on a batch, and what it came to."""
        ...

    def evaluate(self, move: Evaluate) -> Found:
        """Evaluate a batch, and what it came to."""
        ...

    def freeze(self, units: tuple[int, ...]) -> None:
        """Freeze these layers, and train all others."""
        ...

    def resume(self, plan: Plan) -> None:
        """Save, and go on with a new model that has loaded what was saved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Train on one batch.

    Args:
        rows: of the batch.
        length: of its sequences.
        seed: of its values, and of what is drawn at random.
        update: whether the optimizer takes a step; else gradients pile up.
        clip: whether gradients are clipped before.
        zero: what is left of gradients after an update: ``none`` or ``zeros``, or "" for what
            the optimizer leaves.
        overflow: whether the loss is infinite.
        narrow: whether the step is taken under autocast.
    """

    rows: int
    length: int
    seed: int
    update: bool
    clip: bool
    zero: str
    overflow: bool
    narrow: bool

    def do(self, trainer: Trainer) -> Found:
        """Make the move."""
        return trainer.step(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate a batch.

    Args:
        rows: of the batch.
        seed: of its values.
        training: whether modules stay in training mode.
        target: whether losses are computed.
        narrow: whether it is done under autocast.
        length: of its sequences.
    """

    rows: int
    seed: int
    training: bool
    target: bool
    narrow: bool
    length: int = 6

    def do(self, trainer: Trainer) -> Found:
        """Make the move."""
        return trainer.evaluate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Freeze some layers, and train all others.

    Args:
        units: their numbers.
    """

    units: tuple[int, ...]

    def do(self, trainer: Trainer) -> Found:
        """Make the move."""
        trainer.freeze(self.units)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Save a checkpoint, and go on from it in a new model.

    Args:
        plan: how that is laid on ranks.
    """

    plan: Plan

    def do(self, trainer: Trainer) -> Found:
        """Make the move."""
        trainer.resume(self.plan)
        return {}


Move: TypeAlias = Step | Evaluate | Freeze | Resume
