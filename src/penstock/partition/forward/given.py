"""What a dry run hands out, inputs and units' outputs: who wrote into it is seen by its version.

It knows neither models nor cuts.
"""

from __future__ import annotations

from torch import Tensor

from penstock.partition.forward.absent import Origin

__all__ = ["Given"]


class Given:
    """The tensors that were handed out, to see who wrote into them."""

    def __init__(self) -> None:
        # By which call (None: inputs), which leaf; the version then; what stands for it.
        self._all: list[tuple[int | None, int, Tensor, int, Origin | None]] = []

    def note(
        self, call: int | None, leaf: int, tensor: Tensor, origin: Origin | None = None
    ) -> None:
        """A tensor is handed out, as an absent one of an origin, or itself."""
        self._all.append((call, leaf, tensor, tensor._version, origin))

    def written(self, call: int | None) -> tuple[int, ...]:
        """Which leaves of a call's output have been written into; of the inputs if None."""
        return tuple(
            leaf
            for at, leaf, tensor, version, origin in self._all
            if at == call
            and (tensor._version != version or (origin is not None and origin.written))
        )
