"""Names of parameters without the prefixes of wrappers: DDP, torch.compile, checkpointing.

    the module       blocks.0.attention.weight
    in DDP           module.blocks.0.attention.weight
    block compiled   blocks.0._orig_mod.attention.weight

Names are followed along the modules, not cut out of the text: a layer may be called ``module``.
FSDP2 and ``replicate`` add no prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock._torch_compat import WRAPPERS_KEEP_UNDER, children_of

__all__ = ["named_plainly", "plain_name", "unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module without the wrappers around it."""
    while (attribute := _wrapped_under(module)) is not None:
        module = module.get_submodule(attribute)
    return module


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter, buffer or submodule of ``module``, without wrappers.

    Examples:
        >>> import torch
        >>> compiled = torch.compile(nn.Linear(1, 1), backend="eager")
        >>> plain_name(nn.Sequential(compiled), "0._orig_mod.weight")
        '0.weight'
    """
    parts = []
    here: Any = module
    for part in name.split("."):
        while (attribute := _wrapped_under(here)) not in (None, part):
            here = here.get_submodule(attribute)  # a wrapper that leaves its name out by itself
        if attribute is None:
            parts.append(part)
        here = getattr(here, part, None)
    return ".".join(parts)


def named_plainly(module: nn.Module, *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters (or buffers), each once, by their names without wrappers."""
    for name, tensor in module.named_buffers() if buffers else module.named_parameters():
        yield plain_name(module, name), tensor


def _wrapped_under(module: object) -> str | None:
    """The attribute in which a wrapper stores its module; None if ``module`` is no wrapper."""
    if not isinstance(module, nn.Module):
        return None
    if isinstance(module, DistributedDataParallel):
        return "module"
    # Not by getattr: some wrappers forward it to the wrapped module.
    return next((name for name in WRAPPERS_KEEP_UNDER if name in children_of(module)), None)
