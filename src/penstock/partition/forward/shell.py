"""A stage's copy of the model's tree: its own parts shared, those of other stages hollow.

    the model           the shell of stage 1         what stage 1 registers
      embed               hollow, absent weights        layers
      layers              a copy                          1: the model's own module
        0                 hollow
        1                 the model's own, watched
      norm                hollow

The shell runs the model's own forward. Its units, own and hollow alike, report each call to a
``Play``, which runs the unit, or says what stands in for its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from types import MethodType, new_class
from typing import Any, Protocol

import torch
from torch import nn

from penstock._torch_compat import (
    REGISTRIES,
    children,
    copied_shell,
    registries,
    run_uncompiled,
)
from penstock.partition.forward.absent import Absent, Origin, Source, SourceKind, on_meta
from penstock.partition.forward.units import Units
from penstock.partition.huggingface import without_cache
from penstock.partition.ties import names_by_tensor

__all__ = [
    "Play",
    "build_shell",
    "is_hollow",
    "own_tree",
    "put_tensors",
    "skeleton",
    "swap_kept",
    "watched",
]


class Play(Protocol):
    """Decides what happens when a unit is called."""

    def call(self, unit: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a unit.

        Args:
            unit: its name.
            run: the unit itself; of other stages' units (``is_hollow``), it can't be run.
            args: what it is called with.
            kwargs: likewise.
        """
        ...


def build_shell(parts: Units, own: Collection[str], play: Play, device: torch.device) -> nn.Module:
    """Copy the model's tree around the units of one stage.

    Args:
        parts: the units of the plain model; it is left as it is.
        own: the names of the units, and of the parameters by themselves, that the stage runs.
        play: whom the units report to.
        device: where absent parameters claim to be.

    Returns:
        A module of the model's class.
    """
    made: dict[int | str, nn.Module] = {}
    absent = AbsentState(parts.model, device)

    def visit(module: nn.Module, prefix: str) -> nn.Module:
        name = parts.unit_at(prefix[:-1])
        key = id(module) if name is None else name
        if key not in made:
            if name is None:
                opened(module, prefix)
            elif name in own:
                made[key] = watched(module, name, play)
            else:
                made[key] = hollow(module, name, play, absent)
        return made[key]

    def kept(name: str) -> bool:
        steps = name.split(".")
        paths = (".".join(steps[: i + 1]) for i in range(len(steps)))
        return any(path in own or parts.unit_at(path) in own for path in paths)

    def opened(module: nn.Module, prefix: str) -> None:
        shell = made[id(module)] = copied_shell(module)
        for name, child in children(module):
            shell._modules[name] = visit(child, f"{prefix}{name}.")
        rebind(shell, module)
        absent.put(shell, prefix, kept=own)
        swap_kept(shell, lambda tensor: absent.instead_of(tensor, kept))
        without_cache(shell)

    return visit(parts.model, "")


def watched(module: nn.Module, name: str, play: Play) -> nn.Module:
    """A stand-in for ``module`` that shares all it has and reports its calls."""
    made: nn.Module = object.__new__(_reporting(type(module)))
    object.__setattr__(made, "__dict__", vars(module))
    return reports(made, name, module, play)


def hollow(module: nn.Module, name: str, play: Play, absent: AbsentState) -> nn.Module:
    """A copy of ``module`` whose parameters are absent, and which reports its calls."""
    made = copied_shell(module, _reporting(type(module)))
    hollow_out(made, f"{name}.", absent)
    return reports(made, name, made, play)


def is_hollow(run: nn.Module) -> bool:
    """Whether a unit that a ``Play`` is called with is another stage's."""
    return type(run) in _classes.values()


def reports(made: nn.Module, name: str, module: nn.Module, play: Play) -> nn.Module:
    """Set whom ``made`` reports to."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return play.call(name, module, args, kwargs)

    object.__setattr__(made, "_penstock_call", call)
    return made


def hollow_out(module: nn.Module, prefix: str, absent: AbsentState) -> None:
    """Replace all parameters, buffers and children of a copied shell by absent ones."""
    absent.put(module, prefix)
    for name, child in children(module):
        copy = module._modules[name] = copied_shell(child)
        hollow_out(copy, f"{prefix}{name}.", absent)


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of ``module`` on the meta device, that can be run there."""

    def visit(module: nn.Module) -> nn.Module:
        made = copied_shell(module)
        for name, child in children(made):
            made._modules[name] = visit(child)
        rebind(made, module)
        run_uncompiled(made)
        return made

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(on_meta(tensor), requires_grad=False)
        return on_meta(tensor)

    made = visit(module)
    put_tensors(made, bare)
    return made


def put_tensors(copy: nn.Module, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put other tensors in the places of a copied tree's parameters and buffers.

    Also in the containers of them that modules keep as attributes, as ``nn.LSTM`` does.

    Args:
        copy: the tree, whose modules' registries are its own.
        made: what is to stand in the place of a tensor; called once for each place.
    """
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # held, so that ids stay their own
    for module in copy.modules():
        for registry in registries(module):
            for name, tensor in registry.items():
                if tensor is not None:
                    new: Any = made(tensor)
                    registry[name] = new
                    known[id(tensor)] = tensor, new
    for module in copy.modules():
        swap_kept(module, lambda tensor: known[id(tensor)][1] if id(tensor) in known else tensor)


def swap_kept(
    copy: nn.Module, instead: Callable[[torch.Tensor], torch.Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Put other tensors into the lists, tuples and dicts that a copied shell has as attributes.

    Args:
        copy: the shell; the containers are left as they are, others take their places.
        instead: what is to stand in the place of a tensor, perhaps itself.

    Returns:
        What has been replaced: where, under which name, and what was there.
    """

    def swapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return instead(value)
        if type(value) is list or type(value) is tuple:
            items = type(value)(map(swapped, value))
            return value if all(map(operator.is_, items, value)) else items
        if type(value) is dict:
            named = {key: swapped(item) for key, item in value.items()}
            return value if all(named[key] is value[key] for key in value) else named
        return value

    attributes = vars(copy)
    before = []
    for name, value in attributes.items():
        if name not in REGISTRIES and isinstance(value, (list, tuple, dict)):
            attributes[name] = swapped(value)
            if attributes[name] is not value:
                before.append((attributes, name, value))
    return before


class AbsentState:
    """Absent tensors in the places of a model's parameters and buffers, one for each of them.

    Args:
        model: the model.
        device: where they claim to be.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._names = names_by_tensor(model)
        self._made: dict[str, Any] = {}

    def put(self, module: nn.Module, prefix: str, *, kept: Collection[str] = ()) -> None:
        """Replace what a copied shell itself holds, but for the names to be kept."""
        for registry in registries(module):
            for name, tensor in registry.items():
                if tensor is not None and f"{prefix}{name}" not in kept:
                    registry[name] = self._for(tensor)

    def instead_of(self, tensor: torch.Tensor, kept: Callable[[str], bool]) -> torch.Tensor:
        """What stands for a tensor: itself where it is none of the model's, or is to be kept."""
        names = self._names.get(id(tensor), ())
        made: torch.Tensor = tensor if not names or any(map(kept, names)) else self._for(tensor)
        return made

    def _for(self, tensor: torch.Tensor) -> Any:
        known = self._names[id(tensor)][0]
        if known not in self._made:
            source = Source(SourceKind.PARAMETER, 0, 0, known)
            self._made[known] = Absent(on_meta(tensor), self._device, Origin({source}))
        return self._made[known]


def rebind(copy: nn.Module, module: nn.Module) -> None:
    """Have the methods that a module holds as attributes act on its copy."""
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(copy)[name] = MethodType(value.__func__, copy)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _reporting(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` whose calls are reported; messages show the name of ``cls``."""

    def body(namespace: dict[str, Any]) -> None:
        # A slot: a watched module shares its __dict__ with the model's own.
        namespace["__slots__"] = ("_penstock_call",)
        namespace["__module__"] = cls.__module__
        namespace["__qualname__"] = cls.__qualname__
        namespace["__call__"] = lambda self, *args, **kwargs: self._penstock_call(*args, **kwargs)

    if cls not in _classes:
        _classes[cls] = new_class(cls.__name__, (cls,), exec_body=body)
    return _classes[cls]


def own_tree(parts: Units, own: Collection[str]) -> nn.Module:
    """The part of the model's tree that a stage registers, under the names of the plain model.

    Args:
        parts: the model's units.
        own: the names of the units, and of the parameters by themselves, that the stage holds.

    Returns:
        Copies of the opened modules that hold something of the stage; the units are the model's.
    """
    made: dict[int, nn.Module | None] = {}

    def visit(module: nn.Module, prefix: str) -> nn.Module | None:
        unit = parts.unit_at(prefix[:-1])
        if unit is not None:
            return module if unit in own else None
        if id(module) in made:
            return made[id(module)]
        copy = copied_shell(module)
        made[id(module)] = copy
        for name, child in list(module._modules.items()):
            kept = None if child is None else visit(child, f"{prefix}{name}.")
            if kept is None:
                del copy._modules[name]
            else:
                copy._modules[name] = kept
        for registry in registries(copy):
            for name in list(registry):
                if f"{prefix}{name}" not in own:
                    del registry[name]
        if not (copy._modules or copy._parameters or copy._buffers):
            made[id(module)] = None
        return made[id(module)]

    return visit(parts.model, "") or nn.Module()
