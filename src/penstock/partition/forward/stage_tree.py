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
from types import MethodType, new_class
from typing import Any, TypeAlias

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
from penstock.partition.ties import named_tensors, names_by_tensor
from penstock.stage.wrappers import unwrapped

__all__ = ["CallHandler", "StageTree", "copy_with_tensors", "refuse_reads"]

CallHandler: TypeAlias = Callable[[str, nn.Module | None, tuple[Any, ...], dict[str, Any]], Any]
"""From a leaf module's name, the module (None on other stages) and its arguments to its result."""


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
        self, leaves: LeafModules, own: Collection[str], handler: CallHandler, device: torch.device
    ) -> None:
        self._own, self._handler = own, handler
        self._copies: list[nn.Module] = []
        placed: dict[str, nn.Module] = {}

        def place(module: nn.Module, path: str) -> nn.Module | None:
            leaf = leaves.leaf_at(path)
            if leaf is not None and leaf not in placed:
                run = module if leaf in own else None
                shown = module if leaf in own else _copy_tree(module, self._copies)
                placed[leaf] = _reporting(shown, leaf, run, handler)
            return None if leaf is None else placed[leaf]

        def is_own(name: str) -> bool:
            return name in own or any(leaves.leaf_at(path) in own for path in prefixes(name))

        self.root = _copy_tree(leaves.model, self._copies, place)
        self.stubs = {leaf: stub for leaf, stub in placed.items() if leaf not in own}
        self.containers = {name: self.root.get_submodule(name) for name in leaves.containers}
        for container in self.containers.values():
            without_cache(container)
        # An own name for the first name of each own tensor.
        self._own_names: dict[str, str] = {}
        # Registries elsewhere in the tree that hold an own tensor, with its name.
        self._tied_places: list[tuple[dict[str, Any], str, str]] = []
        self._placeholders: dict[str, PlaceholderTensor] = {}
        instead: dict[int, Tensor] = {}
        tensors = named_tensors(leaves.model)
        for key, (first, *others) in names_by_tensor(leaves.model).items():
            here = [name for name in (first, *others) if is_own(name)]
            if not here:
                ref = ValueRef(ValueKind.PARAMETER, 0, 0, first)
                made = PlaceholderTensor.of(on_meta(tensors[first]), device, ref)
                instead[key] = self._placeholders[first] = made
                continue
            self._own_names[first] = here[0]
            elsewhere = {first, *others} - set(here)
            self._tied_places += [(*_registry_of(self.root, n), here[0]) for n in elsewhere]
        _replace_tensors(self._copies, instead)

    # --- what a stage registers --------------------------------------------------------------

    def register(self, stage: nn.Module, leaves: LeafModules) -> None:
        """Register this stage's modules and parameters on ``stage``, under the model's names.

        Containers on the paths to them are copies; leaf modules are the model's own.
        """
        made: dict[int, nn.Module | None] = {}
        # The registered containers, with the current own leaf modules in each and their names.
        self._registered: dict[str, tuple[nn.Module, dict[str, tuple[str, nn.Module]]]] = {}

        def registered(module: nn.Module, path: str) -> nn.Module | None:
            if id(module) in made:
                return made[id(module)]
            copy, dot = shallow_copy_module(module), f"{path}." if path else ""
            children_of(copy).clear()
            own: dict[str, tuple[str, nn.Module]] = {}
            for name, child in children(module):
                leaf = leaves.leaf_at(dot + name)
                if leaf is None:
                    below = registered(child, dot + name)
                    if below is not None:
                        children_of(copy)[name] = below
                elif leaf in self._own:
                    own[name] = leaf, child
                    children_of(copy)[name] = child
            for registry in registries(copy):
                for name in [name for name in registry if dot + name not in self._own]:
                    del registry[name]
            made[id(module)] = None
            if not path or any((children_of(copy), *registries(copy))):
                made[id(module)], self._registered[path] = copy, (copy, own)
            return made[id(module)]

        tree = registered(leaves.model, "")
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(stage, name, vars(tree)[name])
        self._stage = stage

    def sync_modules(self) -> None:
        """Adopt the modules, parameters and training modes that the stage registers now.

        Users may replace or wrap leaf modules at any time; leaf modules must not be missing, and
        containers keep their classes.
        """
        for path, container in self.containers.items():
            container.training = self._stage.training
            if path not in self._registered:
                continue
            before, own = self._registered[path]
            now = self._stage.get_submodule(path)
            if path and type(now) is not type(before):
                raise PartitionError(
                    f"{path} of this stage's module was replaced, but it is cut: the code of the "
                    f"model's own {type(container).__name__} runs; put other modules in the places "
                    "of its parts, or cut the model after the change"
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
                    own[name] = leaf, child
                    children_of(container)[name] = _reporting(child, leaf, child, self._handler)
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
        before = _replace_tensors(self._copies, instead) if instead else []
        try:
            yield
        finally:
            for mapping, key, was in before:
                mapping[key] = was


def copy_with_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """An uncompiled copy of a module with new parameters and buffers, each made by ``make``."""
    copies: list[nn.Module] = []
    copy = _copy_tree(module, copies)
    for each in copies:
        run_uncompiled(each)
    tensors = {id(t): t for m in copies for r in registries(m) for t in r.values() if t is not None}
    _replace_tensors(copies, {key: make(tensor) for key, tensor in tensors.items()})
    return copy


def _copy_tree(
    module: nn.Module,
    copies: list[nn.Module],
    place: Callable[[nn.Module, str], nn.Module | None] = lambda module, path: None,
) -> nn.Module:
    """Copy a tree of modules, and append the copies to ``copies``.

    Copies share the original's parameters, buffers and attributes. ``place`` gives the module to
    put at a path instead of a copy, or None.
    """
    made: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module:
        placed = place(module, path)
        if placed is not None or id(module) in made:
            return made[id(module)] if placed is None else placed
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
    modules: Iterable[nn.Module], instead: Mapping[int, Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Replace tensors, given by id, in registries, and in attributes: lists, tuples or dicts.

    Containers are replaced, not mutated, since the original module shares them: ``nn.LSTM`` keeps a
    list of its weights. Returns the changed places: the mapping, the key, and the old value.
    """

    def swapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return instead.get(id(value), value)
        new: Any = value
        if type(value) is list or type(value) is tuple:
            new = type(value)(map(swapped, value))
        elif type(value) is dict:
            new = {key: swapped(item) for key, item in value.items()}
        return value if new is value or are_same(new, value) else new

    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in modules:
        attributes = {n: v for n, v in vars(module).items() if isinstance(v, (list, tuple, dict))}
        places = [(vars(module), name) for name in attributes if name not in REGISTRIES]
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

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler(leaf, run, args, kwargs)

    made: nn.Module = object.__new__(_subclass(type(module), {"__call__": call}))
    object.__setattr__(made, "__dict__", vars(module))
    return made


def refuse_reads(module: nn.Module, name: str, message: str) -> None:
    """Raise a PartitionError wherever an attribute of a module, given by its path, is read."""
    path, _, last = name.rpartition(".")
    holder = module.get_submodule(path)

    def refuse(self: nn.Module) -> Any:
        raise PartitionError(message)

    def write(self: nn.Module, value: Any) -> None:
        vars(self)[last] = value

    cls = _subclass(type(holder), {last: property(refuse, write)})
    object.__setattr__(holder, "__class__", cls)


def _subclass(cls: type[nn.Module], body: dict[str, Any]) -> type[nn.Module]:
    """A subclass with the same name and layout."""
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()}
    return new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(same | body))
