"""The attributes of a module, before its call and after it.

    self.aux = loss             a tensor: taken for a further output, which can cross
    self.seen.append(loss)      in a container that others may hold too
    self.count = 3              a plain value: it does not cross, so that others may not read it
    self.running_mean.mul_()    a buffer: stays with the module

This module knows no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from penstock._torch_compat import HOOKS, REGISTRIES, WRAPPERS_STATE
from penstock.errors import PartitionError
from penstock.partition.forward.side_writes import are_same, tensors_in

__all__ = ["NO_STATE", "PLAIN", "Attributes", "Glance", "Stale", "kept_in", "put"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# The attributes that every module has.
NO_STATE = frozenset(vars(nn.Module()))
_MISSING = object()


class Attributes:
    """The attributes of a module and of all within it, as they are now.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = _attributes(module)
        self._held = {name: contents(value) for name, value in self._before.items()}
        self._buffers = {name: (b, b._version) for name, b in module.named_buffers()}
        # Some register hooks when they are first called, and note that in an attribute.
        self._hooks = [
            (hooks, dict(hooks))
            for each in module.modules()
            for hooks in (vars(each).get(name) for name in HOOKS)
            if hooks is not None
        ]

    def buffers(self) -> tuple[str, ...]:
        """The buffers that have been written or replaced since."""
        now = dict(self._module.named_buffers())
        written = (
            name
            for name, (buffer, version) in self._buffers.items()
            if now.get(name) is not buffer or buffer._version != version
        )
        return (*written, *(name for name in now if name not in self._buffers))

    def changed(self) -> dict[str, Any]:
        """The attributes that have other tensors in them since, by ``path.name``."""
        found = {}
        for name, value in _attributes(self._module).items():
            now = tensors_in(value)
            if now and not are_same(now, tensors_in(self._held.get(name))):
                found[name] = value
        return found

    def plain(self) -> list[str]:
        """The attributes that have other numbers, strings or the like in them since."""
        now = _attributes(self._module)
        pairs = ((name, value, self._held.get(name, _MISSING)) for name, value in now.items())
        return [name for name, value, was in pairs if _differs(value, was)]

    def filled(self) -> list[str]:
        """Those among them that are the same containers as before, with something else in them."""
        return [name for name, value in self.changed().items() if value is self._before.get(name)]

    def restore(self) -> None:
        """Make all attributes, the containers in them, and the hooks, what they were."""
        for hooks, held in self._hooks:
            if hooks.keys() != held.keys():
                hooks.clear()
                hooks.update(held)
        for name in (*self.changed(), *self.plain()):
            holder, last = _holder(self._module, name)
            if name not in self._before:
                vars(holder).pop(last, None)
                continue
            value = self._before[name]
            vars(holder)[last] = value
            refill(value, self._held[name])


class Glance:
    """What a module and all within it hold in attributes, to be looked at before every call.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._look_around()

    def _look_around(self) -> None:
        """Note where things may come to be: attributes, and the lists and dicts in them."""
        met: set[int] = set()
        # The name of an attribute, or with a dot behind that of a module; and what is in there.
        self._bags: list[tuple[str, Any]] = []
        for path, module in self._module.named_modules():
            self._bags.append((f"{path}.", vars(module)))
            for name, value in vars(module).items():
                if name not in NO_STATE and is_own(name) and id(value) not in met:
                    met.add(id(value))
                    full = f"{path}.{name}" if path else name
                    self._bags += [(full, bag) for bag in _bags(value)]

    def look(self) -> list[Any]:
        """All that is there now."""
        seen: list[Any] = []
        for _, bag in self._bags:
            seen += bag.values() if isinstance(bag, dict) else bag
        return seen

    def fresh(self, before: list[Any]) -> list[str]:
        """The attributes that have come to hold other tensors than at a look ``before``.

        Those of its own parameters and buffers aside, of which nn.RNN keeps a list, made anew where
        others have taken their places (FSDP2).
        """
        now = self.look()
        if are_same(now, before):
            return []
        known = set(map(id, before))
        own = set(map(id, chain(self._module.parameters(), self._module.buffers())))
        found = {
            f"{label}{key}".removeprefix(".") if label.endswith(".") else label
            for label, bag in self._bags
            for key, value in (bag.items() if isinstance(bag, dict) else enumerate(bag))
            if id(value) not in known
            and is_own(key)
            and any(id(tensor) not in own for tensor in tensors_in(value))
        }
        self._look_around()
        return sorted(found)


class Stale:
    """Stands in the dry run for what a part has set its attribute to: others may not use it.

    Args:
        told: what to say.
    """

    def __init__(self, told: str) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        """Refuse: it is looked into."""
        raise PartitionError(self._told)


def _refused(self: Stale, *_: object) -> Any:
    raise PartitionError(self._told)


# What Python asks of the class rather than of the object.
_ASKED = """add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg abs lt le gt ge
eq ne hash bool int float index len iter getitem contains call str repr format"""
for _name in _ASKED.split():
    setattr(Stale, f"__{_name}__", _refused)


def kept_in(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of these names, of those that there are."""
    found = {}
    for name in names:
        holder, last = _holder(module, name)
        if last in vars(holder):
            found[name] = vars(holder)[last]
    return found


def put(module: nn.Module, kept: Mapping[str, Any]) -> None:
    """Set attributes, as ``kept_in`` names them."""
    for name, value in kept.items():
        holder, last = _holder(module, name)
        vars(holder)[last] = value


def contents(value: Any) -> Any:
    """A list or dict copied, with those in it; anything else itself."""
    if type(value) is list:
        return [contents(item) for item in value]
    if type(value) is dict:
        return {key: contents(item) for key, item in value.items()}
    return value


def refill(value: Any, held: Any) -> None:
    """Give a list or dict the contents that it had."""
    if type(value) is list:
        value[:] = held
    elif type(value) is dict:
        value.clear()
        value.update(held)


def _differs(value: Any, was: Any) -> bool:
    if not isinstance(value, PLAIN) or (was is _MISSING and value is None):
        return False
    return type(value) is not type(was) or bool(value != was)


def _bags(value: Any, depth: int = 3) -> list[Any]:
    """The lists and dicts in a value, and the attributes of objects, that may come to hold more."""
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type, *PLAIN)) or callable(value):
        return []
    bag = value if isinstance(value, (list, dict, set)) else getattr(value, "__dict__", None)
    if not isinstance(bag, (list, dict, set)):
        return []
    inner = bag.values() if isinstance(bag, dict) else bag
    return [bag, *(found for item in list(inner) for found in _bags(item, depth - 1))]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if is_own(name)
    }


def is_own(name: Any) -> bool:
    """Whether an attribute is the module's own, not one in which torch keeps something on it."""
    return name not in REGISTRIES and not str(name).startswith(WRAPPERS_STATE)


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last
