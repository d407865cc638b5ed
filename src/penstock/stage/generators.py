"""The states of generators of random numbers, a device's and the host's: read them, set them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "host_random_states",
    "random_state",
    "random_state_there",
    "seed_random_state",
    "set_host_random_states",
    "set_random_state",
    "undrawn",
]

# The kinds of devices that have no generator of their own.
_DRAWN_ON_HOST = ("cpu", "meta")


def random_state(device: torch.device) -> Tensor:
    """The state of a device's generator, on the CPU.

    Example:
        >>> cpu = torch.device("cpu")
        >>> before = random_state(cpu)
        >>> one = torch.rand(())
        >>> set_random_state(cpu, before)
        >>> torch.equal(one, torch.rand(()))
        True
    """
    if device.type in _DRAWN_ON_HOST:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def random_state_there(device: torch.device) -> Tensor:
    """The same on the device; the host does not wait for it."""
    state = random_state(device)
    return state.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put a device's generator into a state that ``random_state`` gave, wherever that lies now."""
    if device.type in _DRAWN_ON_HOST:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state.cpu(), device)


def seed_random_state(device: torch.device, seed: int) -> None:
    """Let a device's generator begin anew, from ``seed``."""
    if device.type in _DRAWN_ON_HOST:
        torch.default_generator.manual_seed(seed)
        return
    module: Any = torch.get_device_module(device)
    # Of several devices of a kind the current one is seeded; some kinds have one alone.
    with module.device(device) if hasattr(module, "device") else nullcontext():
        module.manual_seed(seed)


def host_random_states() -> dict[str, Any]:
    """The states of Python's ``random`` and, where it is in use, of NumPy's generator, by name.

    Example:
        >>> before = host_random_states()
        >>> one = random.random()
        >>> set_host_random_states(before)
        >>> one == random.random()
        True
    """
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def set_host_random_states(states: Mapping[str, Any]) -> None:
    """Put the host's generators into states that ``host_random_states`` gave."""
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """Whatever is drawn within, the generators of the device and the host are as before after it.

    Example:
        >>> with undrawn(torch.device("cpu")):
        ...     one = torch.rand(())
        >>> torch.equal(one, torch.rand(()))
        True
    """
    states = host_random_states()
    before = {place: random_state(place) for place in {torch.device("cpu"), device}}
    try:
        yield
    finally:
        for place, state in before.items():
            set_random_state(place, state)
        set_host_random_states(states)
