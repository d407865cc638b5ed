"""The state of the generator that a device draws random numbers from: read it, put it back."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["random_state", "random_state_there", "set_random_state"]


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
