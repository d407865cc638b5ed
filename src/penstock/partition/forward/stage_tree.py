"""The module tree of one stage: its own leaf modules shared with the model, stubs for the others.

    the model           the tree of stage 1           what stage 1 registers
      embed               stub, with placeholders       layers
      layers              a copy                          1: the model's own module
        0                 stub
        1                 stand-in of the model's own
      norm                stub

The tree runs the model's own forward. Its leaf modules, stand-ins and stubs alike, pass each call
to a ``CallHandler``, which runs the module or supplies its result. This module sends nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import EllipsisType, MethodType, new_class
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from penstock._torch_compat import (
    REGISTRIES,
    children,
    children_of,
    copied_shell,
    registries,
    run_uncompiled,
)
from penstock.errors import PartitionError
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.placeholder import (
    PlaceholderTensor,
    ValueKind,
    ValueRef,
    on_meta,
)
from penstock.partition.huggingface import without_cache
from penstock.partition.ties import names_by_tensor
from penstock.stage.wrappers import unwrapped

__all__ = [
    "CallHandler",
    "StageTree",
    "copy_with_tensors",
    "is_stub",
    "mark_stale",
    "registered_tree",
    "registry_of",
]

ChoosePlace = Callable[[nn.Module, str], "nn.Module | EllipsisType | None"]
"""A function that gives the module to put at a path of a copied tree; None omits it, ``...`` copies
it."""


class CallHandler(Protocol):
    """Supply the results of leaf modules when they are called."""

    def call(self, leaf: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a leaf module.

        Args:
            leaf: its name.
            run: the module itself; a stub (``is_stub``), which can't be run, on other stages.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        ...


class StageTree:
    """A copy of the model's tree of modules around the leaf modules of one stage.

    Args:
        leaves: the leaf modules of the plain model, which is left as it is.
        own: the names of the leaf modules, and of direct parameters, that the stage holds.
        handler: the handler of the calls.
        device: the device that placeholders report.
        stage: the module that registers the stage's modules (see ``registered_tree``); None for a
            trace.

    Attributes:
        root: the tree, a module of the model's class.
    """

    def __init__(
        self,
        leaves: LeafModules,
        own: Collection[str],
        handler: CallHandler,
        device: torch.device,
        stage: nn.Module | None = None,
    ) -> None:
        self._handler = handler
        self._placeholders: dict[str, PlaceholderTensor] = {}
        self._copies: list[nn.Module] = []
        made: dict[str, nn.Module] = {}
        names_of = names_by_tensor(leaves.model)

        def place(module: nn.Module, path: str) -> nn.Module | EllipsisType:
            leaf = leaves.leaf_at(path)
            if leaf is None:
                return ...
            if leaf not in made:
                if leaf in own:
                    made[leaf] = _stand_in(module, leaf, handler)
                else:
                    made[leaf] = _copy_tree(module, None, self._copies, stub=True)
                    _report(made[leaf], leaf, made[leaf], handler)
            return made[leaf]

        def is_own(name: str) -> bool:
            steps = name.split(".")
            paths = (".".join(steps[: i + 1]) for i in range(len(steps)))
            return any(path in own or leaves.leaf_at(path) in own for path in paths)

        def own_or_placeholder(tensor: Tensor) -> Tensor:
            names = names_of.get(id(tensor))
            if names is None or any(map(is_own, names)):
                return tensor
            if names[0] not in self._placeholders:
                ref = ValueRef(ValueKind.PARAMETER, 0, 0, names[0])
                made = PlaceholderTensor.of(ref, on_meta(tensor), device)
                self._placeholders[names[0]] = made
            return self._placeholders[names[0]]

        self.root = _copy_tree(leaves.model, place, self._copies)
        _replace_tensors(self._copies, own_or_placeholder)
        self.containers = {name: self.root.get_submodule(name) for name in leaves.containers}
        for container in self.containers.values():
            without_cache(container)
        if stage is not None:
            self._follow(stage, leaves, own)

    def _follow(self, stage: nn.Module, leaves: LeafModules, own: Collection[str]) -> None:
        """Remember the stage's registered modules, so that ``sync_modules`` can detect changes."""
        self._stage = stage
        held = {name: m for name, m in stage.named_modules() if name in leaves.containers}
        self._held = {name: held.get(name, stage) for name in leaves.containers}
        # The own leaf modules: full name, container, name within the container, and the module
        # itself.
        self._registered: list[tuple[str, str, str, nn.Module]] = []
        for path, module in held.items():
            for last, child in children_of(module).items():
                leaf = leaves.leaf_at(f"{path}.{last}" if path else last)
                if leaf is not None and leaf in own and child is not None:
                    self._registered.append((leaf, path, last, child))
        # Locations of own parameters and buffers in the tree outside stand-ins, with the stage's
        # name for each.
        self._own_places = [(name, name) for name in leaves.direct if name in own]
        for names in names_by_tensor(leaves.model).values():
            inside = [n for n in names if any(n.startswith(f"{leaf}.") for leaf in own)]
            if inside:
                others = (n for n in names if n not in inside and n not in leaves.direct)
                self._own_places += [(name, inside[0]) for name in others]

    def sync_modules(self) -> None:
        """Adopt the modules, parameters and training modes that the stage registers now.

        Users may replace or wrap leaf modules at any time.

        Raises:
            PartitionError: a leaf module is missing, or a container has changed its class.
        """
        now: dict[str, nn.Module] = {}
        for path, held in self._held.items():
            module = held if held is self._stage else self._stage.get_submodule(path)
            if module is not held and type(module) is not type(held):
                raise PartitionError(
                    f"{path} of this stage's module was replaced, but it is cut: the code of the "
                    f"model's own {type(held).__name__} runs; put other modules in the places of "
                    "its parts, or cut the model after the change"
                )
            self.containers[path].training = module.training
            now[path] = module
        for i, (leaf, path, last, before) in enumerate(self._registered):
            child = children_of(now[path]).get(last)
            if child is before:
                continue
            if child is None:
                raise PartitionError(
                    f"{leaf} is gone from this stage's module, and the model calls it; put a "
                    "module in its place, such as torch.nn.Identity()"
                )
            children_of(self.containers[path])[last] = _stand_in(child, leaf, self._handler)
            self._registered[i] = (leaf, path, last, child)
        for place, name in self._own_places:
            registry, last = registry_of(self.root, place)
            own, key = registry_of(self._stage, name)
            registry[last] = own[key]

    @contextmanager
    def lent(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Install parameters of other stages in all their places, for one microbatch."""
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


def registered_tree(leaves: LeafModules, own: Collection[str]) -> nn.Module:
    """The modules that a stage registers, under the names of the plain model.

    Args:
        leaves: the model's leaf modules.
        own: the names of the leaf modules, and of direct parameters, that the stage holds.

    Returns:
        Copies of the containers on the paths to the stage's modules; leaf modules are the model's
        own.
    """

    def place(module: nn.Module, path: str) -> nn.Module | EllipsisType | None:
        leaf = leaves.leaf_at(path)
        return ... if leaf is None else module if leaf in own else None

    tree = _copy_tree(leaves.model, place, [])
    containers = [(n, m) for n, m in tree.named_modules() if n in leaves.containers]
    for path, module in containers:
        for registry in registries(module):
            for name in [n for n in registry if f"{path}.{n}".removeprefix(".") not in own]:
                del registry[name]
    empty = {id(module) for _, module in containers}
    for _, module in reversed(containers):
        for name, child in children(module):
            if id(child) in empty:
                del children_of(module)[name]
        if children_of(module) or any(registries(module)):
            empty.discard(id(module))
    return tree


def copy_with_tensors(module: nn.Module, made: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module with new parameters and buffers, which can run independently.

    Args:
        module: the module; compiled submodules run uncompiled in the copy.
        made: a function that makes a tensor of the copy; called once per tensor.
    """
    copies: list[nn.Module] = []
    copy = _copy_tree(module, None, copies)
    for each in copies:
        run_uncompiled(each)
    tensors = {id(t): t for m in copies for r in registries(m) for t in r.values() if t is not None}
    known = {key: made(tensor) for key, tensor in tensors.items()}
    _replace_tensors(copies, lambda tensor: known.get(id(tensor), tensor))
    return copy


def _copy_tree(
    module: nn.Module, place: ChoosePlace | None, copies: list[nn.Module], *, stub: bool = False
) -> nn.Module:
    """Copy a tree of modules; the copies share the original's parameters, buffers and attributes.

    Args:
        module: the root.
        place: a function that gives the replacement of each module below the root; None to copy
            all.
        copies: a mapping that receives the copied modules.
        stub: if True, makes the copies stubs.
    """
    made: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module | None:
        found = ... if place is None else place(module, path)
        if not isinstance(found, EllipsisType):
            return found
        if id(module) in made:
            return made[id(module)]
        cls = _stub_class(type(module), reports=path == "") if stub else None
        copy = made[id(module)] = copied_shell(module, cls)
        if stub:
            object.__setattr__(copy, "_penstock_stale", {})
        copies.append(copy)
        for name, value in vars(module).items():
            if isinstance(value, MethodType) and value.__self__ is module:
                vars(copy)[name] = MethodType(value.__func__, copy)
        for name, child in children(module):
            below = visit(child, f"{path}.{name}" if path else name)
            if below is None:
                del children_of(copy)[name]
            else:
                children_of(copy)[name] = below
        return copy

    copy = visit(module, "")
    assert copy is not None, "the root is kept"
    return copy


def _replace_tensors(
    modules: Iterable[nn.Module], instead: Callable[[Tensor], Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Replace tensors in registries, and in attributes that are lists, tuples or dicts.

    Containers are replaced, not mutated, since the original module shares them: ``nn.LSTM`` keeps a
    list of its weights.

    Args:
        modules: copied modules.
        instead: a function from a tensor to its replacement, possibly the tensor itself.

    Returns:
        The changed places: the container, the key, and the old value.
    """

    def swapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return instead(value)
        if type(value) is list or type(value) is tuple:
            items = type(value)(map(swapped, value))
            return value if all(map(operator.is_, items, value)) else items
        if type(value) is dict:
            named = {key: swapped(item) for key, item in value.items()}
            return value if all(named[key] is value[key] for key in value) else named
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


def registry_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The registry of a parameter or buffer, found through wrappers, and its last name component.

    Raises:
        PartitionError: the parameter or buffer is missing.
    """
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


def is_stub(run: nn.Module) -> bool:
    """True for the stub of another stage's leaf module, as passed to a ``CallHandler``."""
    return hasattr(type(run), "_penstock_call")


def mark_stale(stub: nn.Module, name: str, message: str) -> None:
    """Refuse reads of a stub's attribute, given by its path, with an error message."""
    path, _, last = name.rpartition(".")
    stale = object.__getattribute__(stub.get_submodule(path), "_penstock_stale")
    stale[last] = message


def _stand_in(module: nn.Module, leaf: str, handler: CallHandler) -> nn.Module:
    """An object that shares all attributes of ``module`` and reports calls to a handler."""
    made: nn.Module = object.__new__(_stub_class(type(module), reports=True))
    object.__setattr__(made, "_penstock_stale", {})
    object.__setattr__(made, "__dict__", vars(module))
    _report(made, leaf, module, handler)
    return made


def _report(made: nn.Module, leaf: str, run: nn.Module, handler: CallHandler) -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler.call(leaf, run, args, kwargs)

    object.__setattr__(made, "_penstock_call", call)


_classes: WeakValueDictionary[tuple[type[nn.Module], bool], type[nn.Module]] = WeakValueDictionary()


def _stub_class(cls: type[nn.Module], *, reports: bool) -> type[nn.Module]:
    """A subclass of ``cls`` with its name, which reports calls and guards stale attributes.

    Args:
        cls: the class of the module.
        reports: True to report calls; False for modules inside a stub, which the top-level forward
            may run itself.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._penstock_call(*args, **kwargs)

    def read(self: Any, name: str) -> Any:
        message = object.__getattribute__(self, "_penstock_stale").get(name)
        if message is not None:
            raise PartitionError(message)
        return cls.__getattribute__(self, name)

    def body(namespace: dict[str, Any]) -> None:
        # Slots: a stand-in shares its __dict__ with the model's own module.
        namespace["__slots__"] = ("_penstock_stale", *(("_penstock_call",) if reports else ()))
        namespace["__module__"] = cls.__module__
        namespace["__qualname__"] = cls.__qualname__
        namespace["__getattribute__"] = read
        if reports:
            namespace["__call__"] = call

    found = _classes.get((cls, reports))
    if found is None:
        found = _classes[cls, reports] = new_class(cls.__name__, (cls,), exec_body=body)
    return found
