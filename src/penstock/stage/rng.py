"""Random numbers: generators' states, and one stream per microbatch as one device draws them.

    microbatch 0    seed(step, 0) ─► stage 0 draws ── state ──► stage 1 draws ── state ──► ...
    microbatch 1    seed(step, 1) ─► stage 0 draws ── state ──► stage 1 draws ── state ──► ...

Independent of schedule and placement, each microbatch draws the numbers of the plain loop with
``microbatch_rng`` around each microbatch's forward. The generator's state crosses a boundary as an
additional tensor (5056 bytes on the CPU, 16 on CUDA).
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.stage.pytree import as_args

__all__ = [
    "RandomStream", "draw_step_seed", "host_random_states", "microbatch_rng", "preserve_rng_state",
    "random_state", "random_states", "seed_random_state", "set_random_state", "set_random_states",
]  # fmt: skip

# The kinds of devices that draw from the CPU's generator.
_DRAWN_ON_HOST = ("cpu", "meta")


def draw_step_seed() -> int:
    """Draw a seed for one step's microbatches from torch's generator on the CPU.

    A pipeline with ``microbatch_rng=True`` draws one at the beginning of each training step, on
    the first stage's rank.

    Examples:
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
        device: the model's device, whose generator is seeded and restored.

    Examples:
        >>> dropout = torch.nn.Dropout()
        >>> def masked():
        ...     with microbatch_rng(7, 0):
        ...         return dropout(torch.ones(8))
        >>> torch.equal(masked(), masked())
        True
    """
    stream = RandomStream(torch.device(device), first=True, last=True)
    stream.step_seed = step_seed
    stream.begin(microbatch, ())
    try:
        yield
    finally:
        stream.leave()


class RandomStream:
    """One stage's part of the microbatches' streams, which begin and end at its first and last."""

    def __init__(self, device: torch.device, *, first: bool, last: bool) -> None:
        self._device = device  # from whose generator the stage draws
        self._first = first
        self._last = last
        self._before: Tensor | None = None
        self.step_seed = 0

    def begin(self, microbatch: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Set the generator to the state that comes last in ``args``; return the other ones."""
        self._before = random_state(self._device)
        if self._first:
            # Hashed: a sum would repeat the stream of another microbatch in a later step.
            text = f"{self.step_seed}/{microbatch}".encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            seed_random_state(self._device, int.from_bytes(digest) >> 1)
            return args
        set_random_state(self._device, args[-1])
        return args[:-1]

    def end(self, output: Any) -> Any:
        """The output of a forward, with the state of the stream appended."""
        if self._last:
            return output
        state = random_state(self._device)
        if self._device.type == "cuda":  # without the host waiting
            state = state.pin_memory().to(self._device, non_blocking=True)
        return (*as_args(output), state)

    def leave(self) -> None:
        """Restore the user's generator."""
        assert self._before is not None
        set_random_state(self._device, self._before)
        self._before = None


# --- generators ----------------------------------------------------------------------------------


def random_state(device: torch.device) -> Tensor:
    """The state of a device's generator, on the CPU."""
    if device.type in _DRAWN_ON_HOST:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore a state of ``random_state``, which may lie on any device by now."""
    if device.type in _DRAWN_ON_HOST:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state.cpu(), device)


def seed_random_state(device: torch.device, seed: int) -> None:
    """Seed a device's generator."""
    if device.type in _DRAWN_ON_HOST:
        torch.default_generator.manual_seed(seed)
        return
    module: Any = torch.get_device_module(device)
    # manual_seed seeds the current device; some kinds of devices have one alone.
    with module.device(device) if hasattr(module, "device") else nullcontext():
        module.manual_seed(seed)


def host_random_states() -> dict[Any, Any]:
    """The states of Python's ``random`` and, if imported, of NumPy's generator, by name."""
    states: dict[Any, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *others = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tolist(), *others)  # a list, as arrays compare by element
    return states


def random_states(device: torch.device) -> dict[Any, Any]:
    """The states of all generators of the device and the host."""
    devices = {torch.device("cpu"), device}
    return host_random_states() | {each: random_state(each) for each in devices}


def set_random_states(states: dict[Any, Any]) -> None:
    """Restore the states of ``random_states``."""
    for source, state in states.items():
        if source == "random":
            random.setstate(state)
        elif source == "numpy":
            sys.modules["numpy"].random.set_state(state)
        else:
            set_random_state(source, state)


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the generators of the device and the host at exit."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states)
