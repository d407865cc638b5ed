"""Watch what a model's forward keeps on its modules while it is captured.

    self.count += 1                  read, then written: state between calls     refused
    self.average = 0.9 * self.…      a buffer replaced by another one            refused
    self.cache["k"] = k              a list or dict of the module changed        refused
    self.scores = s; … self.scores   written, then read within the call          works, and told
    self.flag = True                 as it was before                            nothing to do

A graph holds the operations of one call. What a call leaves on the model for the next one is no
operation: every microbatch would run as the example's call did. This module knows no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import nn

from penstock.partition.forward.module_state import NO_STATE, PLAIN

__all__ = ["ABSENT", "AttributeWatch", "watching_writes"]

REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
CONTAINERS = (list, dict, set)


class Missing(Enum):
    """Stands for an attribute that is not there; copies of it are itself."""

    ABSENT = "absent"


ABSENT = Missing.ABSENT
_CONTENTS = "the contents of containers"


@contextmanager
def watching_writes(model: nn.Module, refuse: Callable[[str], None]) -> Iterator[AttributeWatch]:
    """Call ``refuse`` where code run in this keeps something on ``model`` for the next call.

    Modules of torch's own are not watched: what they keep (as flat weights are) is no state.

    Args:
        model: the model; afterwards its attributes are those from before.
        refuse: told what is kept; it raises.

    Yields:
        What is written, and what is read, as it is found.
    """
    watch = AttributeWatch(model, refuse)
    module_type: Any = nn.Module
    set_attribute = module_type.__dict__["__setattr__"]

    def reading(module: nn.Module, name: str) -> Any:
        watch.read(module, name)
        return object.__getattribute__(module, name)

    def writing(module: nn.Module, name: str, value: Any) -> None:
        watch.write(module, name, value)
        set_attribute(module, name, value)

    module_type.__getattribute__ = reading
    module_type.__setattr__ = writing
    try:
        yield watch
    finally:
        module_type.__setattr__ = set_attribute
        del module_type.__getattribute__
        changed = watch.restore()
    for told in changed:
        refuse(told)


class AttributeWatch:
    """What a forward reads and writes of its modules' attributes.

    Attributes:
        written: the names of attributes that were written before they were read.
    """

    def __init__(self, model: nn.Module, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._watched = {
            id(module): (module, f"{name}." if name else "")
            for name, module in model.named_modules()
            if not type(module).__module__.startswith("torch.")
        }
        self._before = {key: _state(module) for key, (module, _) in self._watched.items()}
        self._touched: set[tuple[int, str]] = set()  # read, or written, first of all
        self._own: set[tuple[int, str]] = set()
        self.written: set[str] = set()

    def plain_reads(self) -> list[tuple[str, str, Any]]:
        """The plain values that were read, or found missing: module, attribute and value."""
        found = []
        for key, name in sorted(self._touched - self._own, key=lambda each: each[1]):
            module, prefix = self._watched.get(key, (None, ""))
            if module is None or name in NO_STATE or hasattr(type(module), name):
                continue
            value = vars(module).get(name, ABSENT)
            registered = any(name in vars(module)[place] for place in REGISTERED)
            if not registered and (value is ABSENT or isinstance(value, PLAIN)):
                found.append((prefix.removesuffix("."), name, value))
        return found

    def read(self, module: nn.Module, name: str) -> None:
        """An attribute is read."""
        self._touched.add((id(module), name))

    def write(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute is written."""
        key = (id(module), name)
        if id(module) not in self._watched or key in self._own:
            return
        shown = f"{self._watched[id(module)][1]}{name}"
        for place, kind in REGISTERED.items():
            held = vars(module)[place]
            if name in held:
                if held[name] is not value:
                    self._refuse(_replaced(kind, shown))
                return
        before = vars(module).get(name, ABSENT)
        if _same(before, value):
            return
        if key in self._touched:
            self._refuse(
                f"attribute {shown}, which it reads and then writes: a graph would begin every "
                "call with the value that it has now"
            )
        self._own.add(key)
        self.written.add(shown)

    def restore(self) -> list[str]:
        """Put back what was there, and say what was changed in other ways than by assigning."""
        found = []
        for key, (module, prefix) in self._watched.items():
            now, before = vars(module), self._before[key]
            for place, kind in REGISTERED.items():
                for name in _changed(before.pop(place), now[place]):
                    found.append(_replaced(kind, f"{prefix}{name}"))
            contents: Mapping[str, Any] = before.pop(_CONTENTS)
            for name in _changed(before, now):
                if name not in REGISTERED and (key, name) not in self._own:
                    found.append(f"attribute {prefix}{name}, which it sets past __setattr__")
                if name in before:
                    now[name] = before[name]
                elif name not in REGISTERED:
                    del now[name]
            for name, held in contents.items():
                if _restored(before[name], held):
                    found.append(
                        f"attribute {prefix}{name}, a {type(held).__name__} that it changes: a "
                        "graph would not, and begin every call with what is in it now"
                    )
        return found


def _state(module: nn.Module) -> dict[str, Any]:
    state = dict(vars(module))
    for place in REGISTERED:
        state[place] = dict(state[place])
    state[_CONTENTS] = {
        name: value.copy()
        for name, value in vars(module).items()
        if type(value) in CONTAINERS and name not in REGISTERED
    }
    return state


def _replaced(kind: str, shown: str) -> str:
    advice = "; write into it instead (copy_, mul_ and their like)" if kind == "buffer" else ""
    return f"{kind} {shown}, in whose place it puts another: a graph keeps the old one{advice}"


def _same(left: Any, right: Any) -> bool:
    return left is right or (
        type(left) is type(right) and isinstance(left, PLAIN) and bool(left == right)
    )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys((*before, *now))
    return [n for n in names if not _same(before.get(n, ABSENT), now.get(n, ABSENT))]


def _restored(container: Any, contents: Any) -> bool:
    """Give a container its contents back; whether they had changed."""
    if len(container) == len(contents) and _equal_items(container, contents):
        return False
    container.clear()
    container.extend(contents) if isinstance(container, list) else container.update(contents)
    return True


def _equal_items(left: Any, right: Any) -> bool:
    if isinstance(left, set):
        return bool(left == right)
    if isinstance(left, dict):
        return not _changed(left, right)
    return all(_same(a, b) for a, b in zip(left, right, strict=True))
