"""Allocate and initialize stages that were built on the meta device.

A model too large for any device is built and cut on the meta device. Each rank then materializes
its own stages. All ranks run all initializers, so that every rank draws the same random numbers:

    the model      embed   layers.0   layers.1   head      children first, as constructors do
    rank 0         kept    kept       dropped    dropped   values are drawn one module at a time,
    rank 1         dropped dropped    kept       kept      and kept where the module is
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch_compat import TorchDispatchMode, registries, reset_parameters, version_of
from penstock.errors import PartitionError
from penstock.partition.forward.placeholder import PlaceholderTensor, on_meta
from penstock.partition.huggingface import adapters, reset_conv1d, ties_after_init
from penstock.partition.plan import abbreviate
from penstock.stage.dtensor import full_tensor, is_dtensor, local_part, sharded_like
from penstock.stage.pytree import map_tensors
from penstock.stage.wrappers import named_plainly

__all__ = ["InitFn", "WrapFn", "materialize"]

logger = logging.getLogger(__name__)

InitFn: TypeAlias = Callable[[nn.Module], Any]
WrapFn: TypeAlias = Callable[[nn.Module, int], nn.Module | None]
# A registry that holds a tensor, its name there, and the tensor.
Place: TypeAlias = tuple[dict[str, Any], str, Tensor]


@torch.no_grad()
def materialize(
    modules: Mapping[int, nn.Module],
    device: torch.device,
    roots: Sequence[nn.Module],
    init_fn: InitFn | None = None,
    wrap_fn: WrapFn | None = None,
) -> dict[int, nn.Module]:
    """Wrap modules, and allocate and initialize their meta tensors on a device.

    Values are those of the whole model, initialized in one process with the same seed. Tensors
    shared by several modules stay shared. Other stages' tensors are allocated one at a time, while
    their values are drawn. An uninitialized tensor is NaN, or zero if it is not floating point,
    until a state dict is loaded; a warning names it.

    Args:
        modules: the modules of this process's stages, by the index of the stage in the model.
        device: the target device.
        roots: the whole model before the cut, or its layers in order.
        init_fn: called under ``no_grad`` as by ``model.apply(init_fn)``, with every module of the
            model that has new tensors, children first. If None, modules are initialized as by their
            constructors: by ``reset_parameters``, and then by the ``_init_weights`` of the model or
            submodel that contains them. Neither initializes adapters.
        wrap_fn: called with each module and its index, before it is allocated; returns the wrapped
            module, or None for the module itself, changed in place.

    Returns:
        The modules by index, wrapped.
    """
    places = _on_meta(roots)
    before = {index: _named(module) for index, module in modules.items()}
    if wrap_fn is not None:
        modules = {i: _wrapped(module, wrap_fn(module, i)) for i, module in modules.items()}
    real_of: dict[int, Tensor] = {}
    for registry, name, tensor in _on_meta(modules.values()):
        if id(tensor) not in real_of:
            real = _blank(torch.empty_like(tensor, device=device))
            is_param = isinstance(tensor, nn.Parameter)
            real_of[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_param else real
        registry[name] = real_of[id(tensor)]
    # By id of the model's tensor: several, if stages share it and wrap_fn has sharded each.
    own: dict[int, list[Tensor]] = {}
    for index, module in modules.items():
        module.to(device)
        after = _named(module)
        for name, tensor in before[index].items():
            if tensor.is_meta and name in after:
                own.setdefault(id(tensor), []).append(after[name])
    if places:
        blank = {id(real): version_of(local_part(real)) for real in real_of.values()}
        with _substituted(places, own, device, keeps_first=_keeps_first(roots, init_fn)) as new:
            _initialize(roots, init_fn, new)
        for first, *others in own.values():
            for other in others:
                local_part(other).copy_(local_part(first))
        _warn_of_blank(modules.values(), blank)
    return dict(modules)


def _blank(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def _wrapped(module: nn.Module, made: object) -> nn.Module:
    if made is not None and not isinstance(made, nn.Module):
        raise PartitionError(
            f"wrap_fn returned a {type(made).__name__}, expected the wrapped module, or None"
        )
    return module if made is None else made


def _named(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by their names without wrappers."""
    return dict(chain.from_iterable(named_plainly(module, buffers=b) for b in (False, True)))


def _on_meta(roots: Iterable[nn.Module]) -> list[Place]:
    """Each meta tensor, with the registry that holds it and its name there."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    return [
        (registry, name, tensor)
        for module in modules
        for registry in registries(module)
        for name, tensor in registry.items()
        if tensor is not None and tensor.is_meta
    ]


def _keeps_first(roots: Sequence[nn.Module], init_fn: InitFn | None) -> bool:
    """True if a tied tensor has the value of its first place: constructors tie what they drew.

    An ``_init_weights``, or ``init_fn``, usually runs after modules were tied.
    """
    modules = [module for root in roots for module in root.modules()]
    return init_fn is None and (ties_after_init(modules) or not any(map(_own_init, modules)))


@contextmanager
def _substituted(
    places: Sequence[Place],
    own: Mapping[int, Sequence[Tensor]],
    device: torch.device,
    *,
    keeps_first: bool,
) -> Iterator[set[int]]:
    """Put this process's tensors in all their places in the model, and placeholders in others.

    Yields the ids of all these tensors.
    """
    values = {key: tensors[0] for key, tensors in own.items()}
    seen: set[int] = set()
    before = []
    try:
        for registry, name, tensor in places:
            if name not in registry:  # removed by wrap_fn
                continue
            before.append((registry, name, registry[name]))
            registry[name] = values.setdefault(id(tensor), _placeholder(tensor, device))
            if keeps_first and id(tensor) in seen:
                registry[name] = _placeholder(tensor, device)
            seen.add(id(tensor))
        yield {id(registry[name]) for registry, name, _ in before}
    finally:
        for registry, name, tensor in before:
            registry[name] = tensor


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    made = PlaceholderTensor.of(on_meta(tensor), device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _WholeTensors(TorchDispatchMode):
    """Run operations on whole tensors in place of placeholders and sharded tensors.

    The whole value of a placeholder is dropped at the next one, that of a sharded tensor is kept
    until ``write_shards``, and gathered when another initializer takes it up.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sharded: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: set[int] = set()
        self._last: tuple[Tensor, Tensor] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        replaced: dict[int, Tensor] = {}

        def whole(tensor: Tensor) -> Tensor:
            found = self._whole(tensor)
            replaced[id(found)] = tensor
            return found

        args, kwargs = map_tensors(whole, (args, kwargs or {}))
        result = func(*args, **kwargs)
        # An in-place operation returns its argument.
        return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), result)

    def _whole(self, tensor: Tensor) -> Tensor:
        if type(tensor) is PlaceholderTensor:
            if self._last is None or self._last[0] is not tensor:
                self._last = None  # freed first
                self._last = tensor, _whole_blank(tensor)
            return self._last[1]
        if is_dtensor(tensor):
            if id(tensor) not in self._sharded:
                make = full_tensor if id(tensor) in self._written else _whole_blank
                self._sharded[id(tensor)] = tensor, make(tensor)
            return self._sharded[id(tensor)][1]
        return tensor

    def write_shards(self) -> None:
        """Write this rank's part of whole values into sharded tensors."""
        for tensor, whole in self._sharded.values():
            local_part(tensor).copy_(local_part(sharded_like(tensor, whole)))
        self._written |= self._sharded.keys()
        self._sharded.clear()
        self._last = None


def _whole_blank(tensor: Tensor) -> Tensor:
    shape, stride = tensor.shape, tensor.stride()
    return _blank(torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device))


def _initialize(roots: Sequence[nn.Module], init_fn: InitFn | None, new: set[int]) -> None:
    """Initialize the tensors ``new``, by id, as the model's constructors do."""
    tensors = _WholeTensors()

    def run(init: InitFn, module: nn.Module) -> None:
        considered = [t for registry in registries(module) for t in registry.values()]
        params = list(module.parameters())
        # Skips a module whose subtree already has loaded values, since its initializer would
        # overwrite them; tensors that it owns directly are initialized.
        if all(id(param) in new for param in params):
            considered += [*params, *module.buffers()]
        if any(id(tensor) in new for tensor in considered):
            with tensors:
                init(module)
            tensors.write_shards()

    built: set[int] = set()
    initialized: set[int] = set()
    for root in roots:
        for module in _children_first(root, built, with_adapters=init_fn is not None):
            if init_fn is not None:
                run(init_fn, module)
                continue
            run(reset_parameters, module)
            run(reset_conv1d, module)
            own = _own_init(module)
            if own is not None:
                for each in _children_first(module, initialized):
                    run(own, each)


def _children_first(
    module: nn.Module, seen: set[int], *, with_adapters: bool = False
) -> Iterator[nn.Module]:
    """The modules of a tree, without those in ``seen``, which they join."""
    if id(module) in seen:
        return
    seen.add(id(module))
    omitted = () if with_adapters else adapters(module)
    for name, child in module.named_children():
        if name not in omitted:
            yield from _children_first(child, seen, with_adapters=with_adapters)
    yield module


def _own_init(module: nn.Module) -> InitFn | None:
    """A model's ``_init_weights`` as a function of a module; None without this method."""
    found: Any = getattr(module, "_init_weights", None)
    try:
        inspect.signature(found).bind(module)
    except (TypeError, ValueError):  # none, or an unrelated function of this name
        return None
    return found  # type: ignore[no-any-return]


def _warn_of_blank(modules: Iterable[nn.Module], blank: Mapping[int, int]) -> None:
    named = [pair for module in modules for pair in _named(module).items()]
    unset = [name for name, t in named if id(t) in blank and _is_blank(t, blank[id(t)])]
    if unset:
        logger.warning(
            "made on the meta device and left uninitialized: %s; set them in init_fn= or in the "
            "model's _init_weights, or load a state that has them (buffers that are not persistent "
            "are in none)",
            abbreviate(unset),
        )


def _is_blank(tensor: Tensor, version: int) -> bool:
    """True if a tensor is unwritten since its creation; writes to ``.data`` keep the version."""
    tensor = local_part(tensor.detach())
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return version_of(tensor) == version and not bool(tensor.any())
