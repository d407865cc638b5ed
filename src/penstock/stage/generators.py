"""The states of generators of random numbers, a device's and the host's: read them, set them."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "host_random_states",
    "random_state",
    "random_state_there",
    "set_host_random_states",
    "set_random_state",
]


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
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def random_state_there(device: torch.device) -> Tensor:
    """The same on the device; the host does not wait for it."""
    state = random_state(device)
    return state.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put a device's generator into a state that ``random_state`` gave, wherever that lies now."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)


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
