"""A whole script: a model, how it is laid on ranks, and what is done with it in turn."""

from __future__ import annotations

from dataclasses import dataclass

from tests.compare import Tolerance
from tests.generated.habits import Habits
from tests.generated.models import Recipe
from tests.generated.moves import Move
from tests.generated.plans import Plan

__all__ = ["Case"]

# Where sums are taken in another order, they are of double precision, and agree to this.
SUMS = Tolerance(relative=1e-9, absolute=1e-13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script.

    Args:
        seed: what it was drawn by.
        recipe: the model.
        plan: how it is laid on ranks at first.
        habits: what is done with gradients.
        hooks: kinds of hooks, and the units that have them.
        metrics: whether the loss function returns more than the loss.
        scale_grads, dynamic_shapes, microbatch_rng: of the pipeline.
        all_inputs: whether every rank passes inputs and targets, or just those that need them.
        replicas: how stages are replicated, if they are.
        moves: what is done, in turn.
    """

    seed: int
    recipe: Recipe
    plan: Plan
    habits: Habits
    hooks: tuple[tuple[str, int], ...]
    metrics: bool
    scale_grads: bool
    dynamic_shapes: bool
    microbatch_rng: bool
    all_inputs: bool
    replicas: str
    moves: tuple[Move, ...]

    @property
    def tolerance(self) -> Tolerance | None:
        """How far values may lie apart; None demands equality."""
        return SUMS if self.recipe.double else None
