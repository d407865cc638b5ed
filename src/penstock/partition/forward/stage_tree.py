"""The module tree of one stage: its own leaf modules shared with the model, stubs for the others.

    the model           the tree of stage 1           what stage 1 registers
      embed               stub, with placeholders       layers
      layers              a copy                          1: the model's own module
        0                 stub
        1                 stand-in of the model's own
      norm                stub

The tree runs the model's own forward. Its leaf modules, stand-ins and stubs alike, pass each call
to a handler, which runs the module or supplies its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import EllipsisType, MethodType, new_class
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from penstock._torch_compat import (
    REGISTRIES,
    children,
    children_of,
    registries,
    run_uncompiled,
    shallow_copy_module,
)
from penstock.errors import PartitionError
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.module_state import are_same
from penstock.partition.forward.placeholder import PlaceholderTensor, ValueKind, ValueRef, on_meta
from penstock.partition.huggingface import without_cache
from penstock.partition.plan import prefixes
from penstock.partition.ties import names_by_tensor
from penstock.stage.wrappers import unwrapped

__all__ = ["CallHandler", "StageTree", "copy_with_tensors", "refuse_reads"]

CallHandler: TypeAlias = Callable[[str, nn.Module | None, tuple[Any, ...], dict[str, Any]], Any]
"""From a leaf module's name, the module (None on other stages) and its arguments to its result."""

Place: TypeAlias = Callable[[nn.Module, str], "nn.Module | EllipsisType"]
"""From a module and its path to the module to put there; ``...`` for a copy."""


class StageTree:
    """A copy of a model's module tree, whose leaf modules report their calls.

    Args:
        leaves: the model's leaf modules.
        own: the names of those, and of direct parameters, that the stage has.
        handler: the handler of the calls.
        device: the device that placeholders report.

    Attributes:
        root: the tree, a module of the model's class.
        containers: its containers by name.
        stubs: the stubs of other stages' leaf modules by name.
    """

    def __init__(
        self,
        leaves: LeafModules,
        own: Collection[str],
        handler: CallHandler,
        device: torch.device,
    ) -> None:
        self._own, self._handler = own, handler
        self._placeholders: dict[str, PlaceholderTensor] = {}
        self._copies: list[nn.Module] = []
        self.stubs: dict[str, nn.Module] = {}
        stand_ins: dict[str, nn.Module] = {}

        def place(module: nn.Module, path: str) -> nn.Module | EllipsisType:
            leaf = leaves.leaf_at(path)
            if leaf is None:
                return ...
            if leaf in own:
                if leaf not in stand_ins:
                    stand_ins[leaf] = _reporting(module, leaf, module, handler)
                return stand_ins[leaf]
            if leaf not in self.stubs:
                copy = _copy_tree(module, None, self._copies)
                self.stubs[leaf] = _reporting(copy, leaf, None, handler)
            return self.stubs[leaf]

        def is_own(name: str) -> bool:
            paths = (name, *prefixes(name))
            return any(path in own or leaves.leaf_at(path) in own for path in paths)

        self.root = _copy_tree(leaves.model, place, self._copies)
        self.containers = {name: self.root.get_submodule(name) for name in leaves.containers}
        for container in self.containers.values():
            without_cache(container)
        # An own name for the first name of each own tensor.
        self._own_names: dict[str, str] = {}
        foreign: dict[int, str] = {}
        # Registries elsewhere in the tree that hold an own tensor, with its name.
        self._tied_places: list[tuple[dict[str, Any], str, str]] = []
        for key, names in names_by_tensor(leaves.model).items():
            ours = [name for name in names if is_own(name)]
            if not ours:
                foreign[key] = names[0]
                continue
            self._own_names[names[0]] = ours[0]
            others = (name for name in names if name not in ours)
            self._tied_places += [(*_registry_of(self.root, name), ours[0]) for name in others]

        def own_or_placeholder(tensor: Tensor) -> Tensor:
            if id(tensor) not in foreign:
                return tensor
            name = foreign[id(tensor)]
            if name not in self._placeholders:
                ref = ValueRef(ValueKind.PARAMETER, 0, 0, name)
                self._placeholders[name] = PlaceholderTensor.of(ref, on_meta(tensor), device)
            return self._placeholders[name]

        _replace_tensors(self._copies, own_or_placeholder)

    # --- what a stage registers --------------------------------------------------------------

    def register(self, stage: nn.Module, leaves: LeafModules) -> None:
        """Register this stage's modules and parameters on ``stage``, under the model's names.

        Containers on the paths to them are copies; leaf modules are the model's own.
        """
        made: dict[int, nn.Module | None] = {}

        def registered(module: nn.Module, path: str) -> nn.Module | None:
            leaf = leaves.leaf_at(path)
            if leaf is not None:
                return module if leaf in self._own else None
            if id(module) not in made:
                dot = f"{path}." if path else ""
                below = {name: registered(child, dot + name) for name, child in children(module)}
                copy = made[id(module)] = shallow_copy_module(module)
                children_of(copy).clear()
                children_of(copy).update({n: m for n, m in below.items() if m is not None})
                for registry in registries(copy):
                    for name in [name for name in registry if dot + name not in self._own]:
                        del registry[name]
                if path and not any((children_of(copy), *registries(copy))):
                    made[id(module)] = None
            return made[id(module)]

        tree = registered(leaves.model, "")
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(stage, name, vars(tree)[name])
        made[id(leaves.model)] = stage
        self._stage = stage
        # Per container its registered copy, and the current own leaf modules in it.
        self._registered = {
            path: (
                made[id(module)],
                {
                    name: (leaf, child)
                    for name, child in children(module)
                    if (leaf := leaves.leaf_at(f"{path}.{name}".removeprefix(".")) or "")
                    in self._own
                },
            )
            for path, module in leaves.containers.items()
        }

    def sync_modules(self) -> None:
        """Adopt the modules, parameters and training modes that the stage registers now.

        Users may replace or wrap leaf modules at any time; leaf modules must not be missing, and
        containers keep their classes.
        """
        for path, (before, own) in self._registered.items():
            container = self.containers[path]
            container.training = self._stage.training
            if before is None:
                continue
            now = self._stage.get_submodule(path)
            if type(now) is not type(before):
                raise PartitionError(
                    f"{path} of this stage's module was replaced, but it is cut: the code of the "
                    f"model's own {type(before).__name__} runs; put other modules in the places of "
                    "its parts, or cut the model after the change"
                )
            container.training = now.training
            for registry, registered in zip(registries(container), registries(now), strict=True):
                registry.update(registered)
            for name, (leaf, known) in own.items():
                child = children_of(now).get(name)
                if child is None:
                    raise PartitionError(
                        f"{leaf} is gone from this stage's module, and the model calls it; put a "
                        "module in its place, such as torch.nn.Identity()"
                    )
                if child is not known:
                    made = _reporting(child, leaf, child, self._handler)
                    children_of(container)[name] = made
                    own[name] = leaf, child
        for registry, key, name in self._tied_places:
            registry[key] = self.own_tensor(name)

    def own_tensor(self, name: str) -> Tensor:
        """The stage's current tensor of an own parameter or buffer, by any of its names."""
        registry, last = _registry_of(self._stage, self._own_names.get(name, name))
        return registry[last]  # type: ignore[no-any-return]

    @contextmanager
    def substituted(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other stages' parameters in all their places, within this block."""
        known = self._placeholders
        instead = {id(known[name]): value for name, value in values.items() if name in known}
        before: list[tuple[dict[str, Any], str, Any]] = []
        if instead:
            before = _replace_tensors(self._copies, lambda t: instead.get(id(t), t))
        try:
            yield
        finally:
            for mapping, key, was in before:
                mapping[key] = was


def copy_with_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """An uncompiled copy of a module with new parameters and buffers, each made by ``make``."""
    copies: list[nn.Module] = []
    copy = _copy_tree(module, None, copies)
    for each in copies:
        run_uncompiled(each)
    tensors = {id(t): t for m in copies for r in registries(m) for t in r.values() if t is not None}
    made = {key: make(tensor) for key, tensor in tensors.items()}
    _replace_tensors(copies, lambda tensor: made.get(id(tensor), tensor))
    return copy


def _copy_tree(module: nn.Module, place: Place | None, copies: list[nn.Module]) -> nn.Module:
    """Copy a tree of modules, and append the copies to ``copies``.

    Copies share the original's parameters, buffers and attributes. ``place`` replaces modules.
    """
    made: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module:
        found = ... if place is None else place(module, path)
        if not isinstance(found, EllipsisType):
            return found
        if id(module) in made:
            return made[id(module)]
        copy = made[id(module)] = shallow_copy_module(module)
        copies.append(copy)
        for name, value in vars(module).items():
            if isinstance(value, MethodType) and value.__self__ is module:
                vars(copy)[name] = MethodType(value.__func__, copy)
        for name, child in children(module):
            children_of(copy)[name] = visit(child, f"{path}.{name}" if path else name)
        return copy

    return visit(module, "")


def _replace_tensors(
    modules: Iterable[nn.Module], instead: Callable[[Tensor], Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Replace tensors in registries, and in attributes that are lists, tuples or dicts.

    Containers are replaced, not mutated, since the original module shares them: ``nn.LSTM`` keeps a
    list of its weights. Returns the changed places: the mapping, the key, and the old value.
    """

    def swapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return instead(value)
        if type(value) is list or type(value) is tuple:
            items = type(value)(map(swapped, value))
            return value if are_same(items, value) else items
        if type(value) is dict:
            named = {key: swapped(item) for key, item in value.items()}
            return value if are_same([*named.values()], [*value.values()]) else named
        return value

    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in modules:
        places = [(vars(module), name) for name, value in vars(module).items()
                  if name not in REGISTRIES and isinstance(value, (list, tuple, dict))]  # fmt: skip
        places += [(registry, name) for registry in registries(module) for name in registry]
        for mapping, name in places:
            was = mapping[name]
            new = swapped(was)
            if new is not was:
                before.append((mapping, name, was))
                mapping[name] = new
    return before


def _registry_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The registry of a parameter or buffer, found through wrappers, and its key there."""
    *path, last = name.split(".")
    holder: nn.Module | None = unwrapped(module)
    for part in path:
        below = None if holder is None else children_of(holder).get(part)
        holder = None if below is None else unwrapped(below)
    for registry in () if holder is None else registries(holder):
        if last in registry:
            return registry, last
    raise PartitionError(
        f"{name} is gone from its module, and the top-level forward or another module uses it; "
        "put modules in its place that hold it under that name"
    )


# --- stand-ins and stubs -----------------------------------------------------------------------


def _reporting(
    module: nn.Module, leaf: str, run: nn.Module | None, handler: CallHandler
) -> nn.Module:
    """An object that shares all attributes of ``module`` and reports calls to a handler."""
    made: nn.Module = object.__new__(_reporting_class(type(module)))
    object.__setattr__(made, "__dict__", vars(module))

    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(leaf, run, args, kwargs)

    object.__setattr__(made, "_penstock_call", call)
    return made


_classes: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()


def _reporting_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` with its name, whose calls are reported."""
    found = _classes.get(cls)
    if found is None:
        # A slot: a stand-in shares its __dict__ with the model's own module.
        body = {
            "__slots__": ("_penstock_call",),
            "__call__": lambda self, *args, **kwargs: self._penstock_call(*args, **kwargs),
        }
        found = _classes[cls] = _subclass(cls, body)
    return found


def refuse_reads(module: nn.Module, name: str, message: str) -> None:
    """Raise a PartitionError wherever an attribute of a module, given by its path, is read."""
    path, _, last = name.rpartition(".")
    holder = module.get_submodule(path)

    def refuse(self: nn.Module) -> Any:
        raise PartitionError(message)

    def write(self: nn.Module, value: Any) -> None:
        vars(self)[last] = value

    body = {"__slots__": (), last: property(refuse, write)}
    object.__setattr__(holder, "__class__", _subclass(type(holder), body))


def _subclass(cls: type[nn.Module], body: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(names | body))
