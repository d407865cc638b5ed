"""Allocate and initialize stages that were built on the meta device.

A model too large for any device is built and cut on the meta device. Each rank then materializes
its own stages:

    the model      embed   layers.0   layers.1   head      values are drawn as the whole model
    rank 0         real     real        meta     meta      draws them, children first; writes to
    rank 1         meta     meta        real     real      the meta device go nowhere
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch_compat import registries, version_of
from penstock.partition.huggingface import adapters
from penstock.partition.plan import abbreviate

__all__ = ["materialize"]

logger = logging.getLogger(__name__)

InitFn: TypeAlias = Callable[[nn.Module], Any]


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init_fn: InitFn | None = None,
    model: nn.Module | None = None,
) -> None:
    """Materialize modules on a device: allocate and initialize their meta tensors.

    Tensors shared by several modules stay shared. An uninitialized tensor is NaN, or zero if it is
    not floating point, until a state dict is loaded; a warning names it.

    Args:
        modules: the modules of this process's stages.
        device: the target device.
        init_fn: called under ``no_grad`` as by ``model.apply(init_fn)``, with every module that has
            new tensors, children first. If None, the model's ``_init_weights`` is called, or that
            of the submodel containing the module; without one, each module's ``reset_parameters``.
            Neither initializes adapters.
        model: the whole model before the cut, since parents may initialize their children; None for
            the modules themselves.
    """
    real_of: dict[int, Tensor] = {}
    for stage in modules:
        for registry, name, tensor in _on_meta([stage]):
            if id(tensor) not in real_of:
                real = torch.empty_like(tensor, device=device)
                real.fill_(float("nan") if real.is_floating_point() else 0)
                is_param = isinstance(tensor, nn.Parameter)
                real_of[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_param else real
            registry[name] = real_of[id(tensor)]
        stage.to(device)
    if not real_of:
        return
    blank = {id(real): version_of(real) for real in real_of.values()}
    roots = modules if model is None else [model]
    others = [place for place in _on_meta(roots) if id(place[2]) in real_of]
    try:
        for registry, name, tensor in others:
            registry[name] = real_of[id(tensor)]
        _initialize(roots, init_fn, blank)
    finally:
        for registry, name, tensor in others:
            registry[name] = tensor
    _warn_of_blank(modules, blank)


def _on_meta(roots: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Each meta tensor, with the registry that holds it and its name there."""
    return [
        (registry, name, tensor)
        for root in roots
        for module in root.modules()
        for registry in registries(module)
        for name, tensor in registry.items()
        if tensor is not None and tensor.is_meta
    ]


@torch.no_grad()
def _initialize(
    roots: Sequence[nn.Module], init_fn: InitFn | None, blank: Mapping[int, int]
) -> None:
    """Initialize the new tensors (``blank``) of modules, children first."""
    done: set[int] = set()

    def visit(module: nn.Module, init: InitFn | None) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        if init_fn is None:  # the enclosing model's
            init = _own_init(module) or init
        omitted = adapters(module) if init_fn is None else ()
        for name, child in module.named_children():
            if name not in omitted:
                visit(child, init)
        considered = [t for registry in registries(module) for t in registry.values()]
        params = list(module.parameters())
        # Skips a module whose subtree already has loaded values, since its initializer would
        # overwrite them; tensors that it owns directly are initialized.
        if all(p.is_meta or id(p) in blank for p in params):
            considered += [*params, *module.buffers()]
        if any(id(tensor) in blank for tensor in considered):
            reset = getattr(module, "reset_parameters", None)
            if init is not None:
                init(module)
            elif callable(reset):
                reset()

    for root in roots:
        visit(root, init_fn)


def _own_init(module: nn.Module) -> InitFn | None:
    """A model's ``_init_weights`` as a function of a module; None without this method."""
    found: Any = getattr(module, "_init_weights", None)
    try:
        inspect.signature(found).bind(module)
    except (TypeError, ValueError):  # none, or an unrelated function of this name
        return None
    return found  # type: ignore[no-any-return]


def _warn_of_blank(modules: Sequence[nn.Module], blank: Mapping[int, int]) -> None:
    named = [pair for m in modules for pair in (*m.named_parameters(), *m.named_buffers())]
    unset = [name for name, t in named if id(t) in blank and _is_blank(t, blank[id(t)])]
    if unset:
        logger.warning(
            "made on the meta device and initialized by nobody: %s; set them in init_fn= or in the "
            "model's _init_weights, or load a state that has them (buffers that are not persistent "
            "are in none)",
            abbreviate(unset),
        )


def _is_blank(tensor: Tensor, version: int) -> bool:
    """True if a tensor is unwritten since its creation; writes to ``.data`` keep the version."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return version_of(tensor) == version and not bool(tensor.any())
