"""Failures in the user's code, at a moment that is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tests.generated.moves import Fail

__all__ = ["Bomb", "Boom"]


class Boom(Exception):
    """The failure of the user's code."""


class Bomb:
    """Goes off in one place, at a call that is chosen."""

    def __init__(self) -> None:
        self._armed: tuple[str, int] | None = None
        self._left = 0

    @contextmanager
    def armed(self, move: Fail) -> Iterator[None]:
        """Within, it goes off."""
        self._armed, self._left = (move.place, move.unit), move.microbatch
        try:
            yield
        finally:
            self._armed = None

    def plant(self, model: Any, unit: int) -> None:
        """Into a layer of a model."""
        layers = model.blocks if hasattr(model, "blocks") else model
        layer: nn.Module = layers[unit]
        layer.register_forward_pre_hook(lambda *_: self.tick("forward", unit))
        layer.register_forward_hook(lambda _, __, output: self._in_backward(output, unit))

    def _in_backward(self, output: Any, unit: int) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.tick("backward", unit))

    def tick(self, place: str, unit: int = 0) -> None:
        """It is this place's turn.

        Raises:
            Boom: now.
        """
        if self._armed != (place, unit):
            return
        self._left -= 1
        if self._left < 0:
            self._armed = None
            raise Boom(f"in the {place} of unit {unit}")
