"""Modules wrapped by others, which changes no name: DDP, torch.compile, activation checkpointing.

    the module       blocks.0.attention.weight
    in DDP           module.blocks.0.attention.weight
    block compiled   blocks.0._orig_mod.attention.weight

Names are read along the modules, not cut out of the text: a layer may well be called ``module``.
This module knows neither stages nor what wrappers do. FSDP2 and ``replicate`` leave names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock._torch_compat import WRAPPERS_KEEP_UNDER

__all__ = ["named_plainly", "plain_name", "unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that wrappers around the whole of it hold.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1)
        >>> unwrapped(torch.compile(layer, backend="eager")) is layer
        True
    """
    while (under := _held_under(module)) is not None:
        module = module.get_submodule(under)
    return module


def plain_name(module: nn.Module, name: str) -> str:
    """What a parameter, a buffer or a part of a module is called without wrappers.

    Args:
        module: where it lies, wrapped or not.
        name: its name there.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1)
        >>> compiled = torch.compile(layer, backend="eager")
        >>> plain_name(nn.Sequential(compiled), "0._orig_mod.weight")
        '0.weight'
    """
    parts = []
    here: Any = module
    for part in name.split("."):
        while (under := _held_under(here)) not in (None, part):
            here = here.get_submodule(under)  # a wrapper that leaves its name out by itself
        if under is None:
            parts.append(part)
        here = getattr(here, part, None)
    return ".".join(parts)


def named_plainly(module: nn.Module, *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters or buffers, none twice, by the names that they have without wrappers.

    Args:
        module: the module, wrapped or not.
        buffers: whether buffers are asked for, or parameters.
    """
    for name, tensor in module.named_buffers() if buffers else module.named_parameters():
        yield plain_name(module, name), tensor


def _held_under(module: object) -> str | None:
    """The attribute under which a wrapper holds its module; None for what is no wrapper."""
    if not isinstance(module, nn.Module):
        return None
    if isinstance(module, DistributedDataParallel):
        return "module"
    # Not by getattr: some wrappers answer for the attributes of what they hold.
    return next((name for name in WRAPPERS_KEEP_UNDER if name in module._modules), None)
