"""State that a forward changes besides its result: attributes, buffers, containers, arguments.

self.aux = loss             an attribute: the module's own, which no code outside may read
self.seen.append(loss)      a container that other modules may hold too: refused
self.running_mean.mul_()    a buffer: stays with the module
load += counts              a tensor: seen by its version counter
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from penstock._torch_compat import HOOKS, WRAPPERS_STATE, version_of
from penstock.partition.forward.placeholder import PlaceholderTensor

__all__ = ["AttributeValues", "ModuleSnapshot", "StateChanges", "TensorVersions"]
__all__ += ["are_same", "is_equal", "tensors_in"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_REGISTRIES = (*HOOKS, "_parameters", "_buffers")


class TensorVersions:
    """Version counters of the tensors among some leaves, to detect later writes."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = ((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._versions = [(i, tensor, _version(tensor)) for i, tensor in tensors]

    def written(self) -> tuple[int, ...]:
        """The positions of the leaves that were written."""
        return tuple(i for i, tensor, version in self._versions if _version(tensor) != version)


def _version(tensor: Tensor) -> int:
    if type(tensor) is PlaceholderTensor:
        return tensor.provenance.num_writes
    return 0 if tensor.is_inference() else version_of(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanges:
    """Names of what one call has changed of a module's state."""

    attributes: tuple[str, ...]  # with new values, unless plain and equal
    filled: tuple[str, ...]  # attributes whose containers have received tensors
    replaced: tuple[str, ...]  # parameters and buffers that are other tensors now
    written: tuple[str, ...]  # parameters, buffers and tensors in attributes, in place


class AttributeValues:
    """The values in the attributes of a module and its submodules, and in containers in them.

    They are recorded before each call of a module, and compared after it: in one list, since a
    layer has hundreds. ``containers`` is of ``_containers_of``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._watch_containers()
        self.record()

    def _watch_containers(self) -> None:
        self.containers = _containers_of(self._module)
        self._labelled = [each for each in self.containers if each[0]]
        # Views: the values at the time that they are iterated over.
        values = [x.values() if isinstance(x, dict) else x for _, x in self._labelled]
        self._values: list[Collection[Any]] = values

    def record(self) -> None:
        """Record the current values, for ``fresh_tensors``."""
        self._sizes = list(map(len, self._values))
        self._before = list(chain.from_iterable(self._values))

    def fresh_tensors(self) -> list[str]:
        """The attributes that hold tensors which they did not hold before, but for own state.

        ``nn.RNN`` keeps a list of its parameters, and rebuilds it when FSDP replaces them.
        """
        sizes = list(map(len, self._values))
        if sizes == self._sizes and all(map(is_, chain.from_iterable(self._values), self._before)):
            return []
        known = set(map(id, (*self._module.parameters(), *self._module.buffers(), *self._before)))
        found = {
            _join(label, key)
            for label, container in self._labelled
            for key, value in _items(label, container)
            if id(value) not in known and any(id(t) not in known for t in tensors_in(value))
        }
        self._watch_containers()
        return sorted(found)


class ModuleSnapshot:
    """A snapshot of attributes, parameters, buffers and hooks of a module and its submodules.

    Attributes:
        loose: the tensors in attributes other than parameters and buffers, by ``watch_writes``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = AttributeValues(module)
        self._before: list[tuple[str, Any, Any]] = [
            (label, x, dict(x) if isinstance(x, dict) else list(x))
            for label, x in self._values.containers
        ]

    def watch_writes(self) -> None:
        """Record the tensors and their versions, for ``changes``."""
        self.loose: dict[str, Tensor] = {
            _join(label, key): value
            for label, attributes, _ in self._before
            if label.endswith(".")
            for key, value in _items(label, attributes)
            if isinstance(value, Tensor)
        }
        self._tensors = self._parameters_and_buffers()
        self._versions = TensorVersions((*self._tensors.values(), *self.loose.values()))

    def changes(self) -> StateChanges:
        """The changes since ``watch_writes``."""
        attributes: list[str] = []
        for label, now, was in self._before:
            if label.endswith("."):
                items = _items(label, now)
                attributes += [_join(label, k) for k, v in items if not is_equal(v, was.get(k))]
            elif label and not are_same(now, was):
                attributes.append(label)
        containers = [label for label, _, _ in self._before if not label.endswith(".")]
        tensors, after = self._tensors, self._parameters_and_buffers()
        names = [*tensors, *self.loose]
        return StateChanges(
            attributes=tuple(dict.fromkeys(attributes)),
            filled=tuple(name for name in self._values.fresh_tensors() if name in containers),
            replaced=tuple(n for n in tensors | after if after.get(n) is not tensors.get(n)),
            written=tuple(names[i] for i in self._versions.written()),
        )

    def restore(self) -> None:
        """Restore attributes, the contents of their containers, and registries."""
        for _, container, before in self._before:
            if not are_same(container, before):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)

    def _parameters_and_buffers(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}


def _containers_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The containers of values: attributes, and the lists, dicts and objects in them.

    Each container has a label: a module's path and a dot for its attributes, the attribute's name
    for a container inside it, and none for registries.
    """
    met: set[int] = set()
    found: list[tuple[str, Any]] = []
    for path, each in module.named_modules():
        attributes = vars(each)
        found.append((f"{path}.", attributes))
        for name, value in attributes.items():
            if name in _REGISTRIES and isinstance(value, dict):  # not the wrappers of torch.jit
                found.append(("", value))
            elif _is_tracked(name) and id(value) not in met:
                met.add(id(value))
                inner = (x for x in _nested(value) if isinstance(x, (list, dict, set)))
                found += [(_join(f"{path}.", name), container) for container in inner]
    return found


def _join(label: str, key: Any) -> str:
    """The name of an item: of a module's attribute, or of the attribute that holds it."""
    return f"{label}{key}".removeprefix(".") if label.endswith(".") else label


def _items(label: str, container: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container; of a module's attributes those that are not torch's own."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return (item for item in items if not label.endswith(".") or _is_tracked(item[0]))


def _is_tracked(name: Any) -> bool:
    return name not in _MODULE_ATTRIBUTES and not str(name).startswith(WRAPPERS_STATE)


def is_equal(value: Any, was: Any) -> bool:
    """True if two values are the same object, or plain and equal."""
    plain = isinstance(value, _PLAIN) and type(value) is type(was)
    return value is was or (plain and bool(value == was))


def are_same(left: Collection[Any], right: Collection[Any]) -> bool:
    """True if two collections, or the values of two dicts, are the same objects in order."""
    if isinstance(left, dict) and isinstance(right, dict):
        left, right = left.values(), right.values()
    return len(left) == len(right) and all(map(is_, left, right))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: an object, a container, or nested containers."""
    return [each for each in _nested(value) if isinstance(each, Tensor)]


def _nested(value: Any, depth: int = 4) -> Iterator[Any]:
    """A value, the items of containers in it, and the attributes of objects."""
    yield value
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type)):
        return
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _nested(vars(value), depth)
        return
    else:
        return
    for item in items:
        yield from _nested(item, depth - 1)
