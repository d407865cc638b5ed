"""What a script does, move by move, with whatever trains: the plain model or a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from tests.generated.plans import Plan

__all__ = ["Evaluate", "Fail", "Found", "Freeze", "Move", "Reload", "Resume", "Step", "Trainer"]

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

    def reload(self, factor: float) -> Found:
        """Go on with the state so many times what it is, and what it was."""
        ...

    def fail(self, move: Fail) -> Found:
        """Begin a step that fails, and where it did."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Train on one batch.

    Args:
        rows: of the batch.
        length: of its sequences.
        seed: of its values, and of what is drawn at random.
        update: whether the optimizer takes a step; else gradients pile up.
        clip: how gradients are clipped before: ``value``, one of ``CLIPS``, or not at all.
        zero: what is left of gradients after an update: ``none`` or ``zeros``, or "" for what
            the optimizer leaves.
        by_model: whether the model forgets them, or the optimizer.
        overflow: whether the loss is infinite.
        narrow: whether the step is taken under autocast.
        beside: whether it is one of the pipeline beside the first.
    """

    rows: int
    length: int
    seed: int
    update: bool
    clip: str = ""
    zero: str
    by_model: bool = True
    overflow: bool = False
    narrow: bool = False
    beside: bool = False

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
        averaged: whether with the average of the parameters.
        beside: whether in the pipeline beside the first.
    """

    rows: int
    seed: int
    training: bool
    target: bool
    narrow: bool
    length: int = 6
    averaged: bool = False
    beside: bool = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Take the whole state, and load it again, each number so many times what it was.

    Args:
        factor: how many times.
    """

    factor: float

    def do(self, trainer: Trainer) -> Found:
        """Make the move."""
        return trainer.reload(self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Begin a step in which the user's code fails, and go on with the same model.

    Args:
        place: in the ``forward`` or the ``backward`` of a unit, or in the ``loss``.
        unit: which one.
        microbatch: at which one.
        rows: of the batch.
        seed: of its values.
        length: of its sequences.
        beside: whether in the pipeline beside the first.
    """

    place: str
    unit: int
    microbatch: int
    rows: int
    seed: int
    length: int = 6
    beside: bool = False

    def do(self, trainer: Trainer) -> Found:
        """Make the move."""
        return trainer.fail(self)


Move: TypeAlias = Step | Evaluate | Freeze | Resume | Reload | Fail
