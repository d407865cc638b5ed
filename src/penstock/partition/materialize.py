"""Give the modules of stages that were built on the meta device memory and first values.

A model of which no device could hold the whole is built on the meta device, cut there, and each
rank makes its own stages real. This module does not know which those are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.plan import shortened

__all__ = ["materialize"]

logger = logging.getLogger(__name__)


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Move modules to a device; what is on the meta device gets memory there, and values.

    Tensors that several modules share stay shared. What nobody initializes is NaN, or zero where
    it is not floating point, until a state is loaded.

    Args:
        modules: the modules of this process's stages.
        device: where to.
        init_fn: called with every module below those that were on the meta device, children
            first, under ``no_grad``; if None, those that have ``reset_parameters`` call it.

    Example:
        >>> with torch.device("meta"):
        ...     linear = nn.Linear(2, 2)
        >>> materialize([linear], torch.device("cpu"))
        >>> bool(linear.weight.isfinite().all())
        True
    """
    made: dict[int, Tensor] = {}
    fresh: dict[int, nn.Module] = {}
    for stage in modules:
        for module in stage.modules():
            if sum(_make_real(registry, device, made) for registry in _registries(module)):
                fresh[id(module)] = module
        stage.to(device)
    if not made:
        return
    with torch.no_grad():
        for module in reversed(fresh.values()):
            if init_fn is not None:
                init_fn(module)
            elif callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()  # type: ignore[operator]
    left = [
        name
        for stage in modules
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
        if tensor.is_floating_point() and bool(tensor.isnan().any())
    ]
    if left:
        logger.warning(
            "made on the meta device and initialized by nobody: %s; load a state, or pass init_fn=",
            shortened(left),
        )


def _registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _make_real(registry: dict[str, Any], device: torch.device, made: dict[int, Tensor]) -> bool:
    found = False
    for name, tensor in registry.items():
        if tensor is None or not tensor.is_meta:
            found |= tensor is not None and any(tensor is real for real in made.values())
            continue
        found = True
        if id(tensor) not in made:
            real = torch.empty_like(tensor, device=device)
            real.fill_(float("nan") if real.is_floating_point() else 0)
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_param else real
        registry[name] = made[id(tensor)]
    return found
