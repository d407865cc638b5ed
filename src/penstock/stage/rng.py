"""Random numbers as one device draws them: a stream per microbatch, going on from stage to stage.

    microbatch 0    seed(step, 0) ─► stage 0 draws ── state ──► stage 1 draws ── state ──► ...
    microbatch 1    seed(step, 1) ─► stage 0 draws ── state ──► stage 1 draws ── state ──► ...

In whatever order a schedule runs microbatches, and wherever stages lie, each draws what it would
draw in the plain loop, where ``microbatch_rng`` stands around each microbatch's forward. The state
of the generator crosses a boundary as one more tensor (5056 bytes on the CPU, 16 on CUDA). The
generator that the user sees is as it was after each forward. Schedules and messages are not known
here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.stage.generators import (
    random_state,
    random_state_there,
    seed_random_state,
    set_random_state,
)
from penstock.stage.pytree import as_args

__all__ = ["RandomStream", "draw_step_seed", "microbatch_rng"]


def draw_step_seed() -> int:
    """A seed for one step's microbatches, drawn from torch's generator on the CPU.

    A pipeline with ``microbatch_rng=True`` draws one so at the beginning of each training step,
    and takes that of the first stage's rank.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> one = draw_step_seed()
        >>> _ = torch.manual_seed(0)
        >>> one == draw_step_seed(), one == draw_step_seed()
        (True, False)
    """
    return int(torch.randint(1 << 62, (), device="cpu"))


@contextmanager
def microbatch_rng(
    step_seed: int, microbatch: int, *, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Draw one microbatch's random numbers, in the plain loop, as a pipeline draws them.

    Args:
        step_seed: of ``draw_step_seed``.
        microbatch: its number in the step, from 0.
        device: where the model is; it is this device's generator that is seeded, and put back.

    Example:
        >>> dropout = torch.nn.Dropout()
        >>> def masked():
        ...     with microbatch_rng(7, 0):
        ...         return dropout(torch.ones(8))
        >>> torch.equal(masked(), masked())
        True
    """
    device = torch.device(device)
    before = random_state(device)
    _seed(device, step_seed, microbatch)
    try:
        yield
    finally:
        set_random_state(device, before)


class RandomStream:
    """One stage's part of the microbatches' streams.

    Args:
        device: whose generator the stage draws from.
        first: whether streams begin here.
        last: whether they end here.
    """

    def __init__(self, device: torch.device, *, first: bool, last: bool) -> None:
        self._device = device
        self._first = first
        self._last = last
        self._before: Tensor | None = None
        self.step_seed = 0

    def begin(self, microbatch: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a forward: go on with the microbatch's stream, which came with its arguments.

        Returns:
            The module's own arguments.
        """
        self._before = random_state(self._device)
        if self._first:
            _seed(self._device, self.step_seed, microbatch)
            return args
        *own, state = args
        set_random_state(self._device, state)
        return tuple(own)

    def end(self, output: Any) -> Any:
        """After a forward: the output, with how far the stream has come."""
        return output if self._last else (*as_args(output), random_state_there(self._device))

    def leave(self) -> None:
        """Put the generator back as the user had it."""
        assert self._before is not None
        set_random_state(self._device, self._before)
        self._before = None


def _seed(device: torch.device, step_seed: int, microbatch: int) -> None:
    # Hashed: sums of both would give one microbatch the stream of another one, steps later.
    digest = hashlib.blake2b(f"{step_seed}/{microbatch}".encode(), digest_size=8).digest()
    seed_random_state(device, int.from_bytes(digest) >> 1)
