"""Give the modules of stages that were built on the meta device memory and first values.

A model of which no device could hold the whole is built on the meta device, cut there, and each
rank makes its own stages real:

    the model      embed   layers.0   layers.1   head      values are drawn as the whole model does
    rank 0         real     real        meta     meta      it, children first: what is another
    rank 1         meta     meta        real     real      rank's has no memory to be written to

This module does not know which stages those are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch_compat import registries, version_of
from penstock.partition.huggingface import adapters
from penstock.partition.plan import abbreviate

__all__ = ["materialize"]

logger = logging.getLogger(__name__)

InitFn: TypeAlias = Callable[[nn.Module], Any]
Made: TypeAlias = dict[int, Tensor]
"""By the identity of a tensor on the meta device, the real one in its place."""


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init_fn: InitFn | None = None,
    model: nn.Module | None = None,
) -> None:
    """Move modules to a device; what is on the meta device gets memory there, and values.

    Tensors that several modules share stay shared. What nobody initializes is NaN, or zero where
    it is not floating point, until a state is loaded; a warning names it.

    Args:
        modules: the modules of this process's stages.
        device: where to.
        init_fn: called under ``no_grad`` as ``model.apply(init_fn)`` would, with every module in
            which there is something new, children first. If None, the ``_init_weights`` of the
            model is, or of the model within it that a module belongs to; without one, modules
            that have ``reset_parameters`` call it. Neither knows what adapters begin with.
        model: the whole model that the stages were cut from, for parents may initialize their
            children; the modules themselves if None.

    Example:
        >>> with torch.device("meta"):
        ...     linear = nn.Linear(2, 2)
        >>> materialize([linear], torch.device("cpu"))
        >>> bool(linear.weight.isfinite().all())
        True
    """
    made: Made = {}
    for stage in modules:
        for module in stage.modules():
            for registry in registries(module):
                _make_real(registry, device, made)
        stage.to(device)
    if not made:
        return
    blank = {id(real): version_of(real) for real in made.values()}
    roots = modules if model is None else [model]
    with torch.no_grad(), _lent(roots, made):
        done: set[int] = set()
        for root in roots:
            _initialize(root, init_fn, set(blank), done, is_given=init_fn is not None)
    _tell_left(modules, blank)


def _make_real(registry: dict[str, Any], device: torch.device, made: Made) -> None:
    for name, tensor in registry.items():
        if tensor is None or not tensor.is_meta:
            continue
        if id(tensor) not in made:
            real = torch.empty_like(tensor, device=device)
            real.fill_(float("nan") if real.is_floating_point() else 0)
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_param else real
        registry[name] = made[id(tensor)]


@contextmanager
def _lent(roots: Sequence[nn.Module], made: Mapping[int, Tensor]) -> Iterator[None]:
    """Within, the whole model holds what was made, wherever it holds what that was made for."""
    lent = [
        (registry, name, tensor)
        for root in roots
        for module in root.modules()
        for registry in registries(module)
        for name, tensor in registry.items()
        if tensor is not None and tensor.is_meta and id(tensor) in made
    ]
    try:
        for registry, name, tensor in lent:
            registry[name] = made[id(tensor)]
        yield
    finally:
        for registry, name, tensor in lent:
            registry[name] = tensor


def _initialize(
    module: nn.Module,
    init_fn: InitFn | None,
    fresh: set[int],
    done: set[int],
    *,
    is_given: bool,
) -> None:
    """Initialize a module's children, and then itself.

    Args:
        module: the module.
        init_fn: the user's function, or that of the model around the module.
        fresh: which tensors are to be initialized, by identity.
        done: the modules that have been here.
        is_given: whether ``init_fn`` is the user's.
    """
    if id(module) in done:
        return
    done.add(id(module))
    if not is_given:
        init_fn = _own_init(module) or init_fn
    left = () if is_given else adapters(module)
    for name, child in module.named_children():
        if name not in left:
            _initialize(child, init_fn, fresh, done, is_given=is_given)
    own = [t for registry in registries(module) for t in registry.values() if t is not None]
    # One that holds what had its values before would overwrite that, unless it is its own duty.
    held = list(module.parameters())
    is_new = all(p.is_meta or id(p) in fresh for p in held) and any(
        id(t) in fresh for t in (*held, *module.buffers())
    )
    if not is_new and not any(id(t) in fresh for t in own):
        return
    reset = getattr(module, "reset_parameters", None)
    if init_fn is not None:
        init_fn(module)
    elif callable(reset):
        reset()


def _own_init(module: nn.Module) -> InitFn | None:
    """How a model initializes each of its modules, where it says so as many do."""
    found: Any = getattr(module, "_init_weights", None)
    if not callable(found):
        return None
    try:
        inspect.signature(found).bind(module)
    except (TypeError, ValueError):  # some other function of this name
        return None
    return found  # type: ignore[no-any-return]


def _tell_left(modules: Sequence[nn.Module], blank: Mapping[int, int]) -> None:
    """Warn of what nobody has initialized, and say who may."""
    in_state: list[str] = []
    in_none: list[str] = []
    for stage in modules:
        saved = stage.state_dict(keep_vars=True).keys()
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if id(tensor) in blank and _is_blank(tensor, blank[id(tensor)]):
                (in_state if name in saved else in_none).append(name)
    if in_state:
        logger.warning(
            "made on the meta device and initialized by nobody: %s; load a state, or pass init_fn=",
            abbreviate(in_state),
        )
    if in_none:
        logger.warning(
            "made on the meta device and initialized by nobody: the buffers %s, which are in no "
            "state either, so that results will be wrong; set them in init_fn=, or in the "
            "model's _init_weights",
            abbreviate(in_none),
        )


def _is_blank(tensor: Tensor, version: int) -> bool:
    """Whether a tensor is as it was made; writing to ``.data`` leaves no trace in the version."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return version_of(tensor) == version and not bool(tensor.any())
