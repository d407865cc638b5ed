"""State that a forward changes besides its result: attributes, buffers, containers, arguments.

    self.aux = loss             an attribute: the module's own, which no code outside may read
    self.seen.append(loss)      a container that other modules may hold too: refused
    self.running_mean.mul_()    a buffer: stays with the module
    load += counts              a tensor: seen by its version counter

This module knows no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

from penstock._torch_compat import HOOKS, WRAPPERS_STATE, version_of
from penstock.partition.forward.placeholder import PlaceholderTensor

__all__ = [
    "NO_STATE",
    "PLAIN",
    "ModuleSnapshot",
    "StateChanges",
    "TensorVersions",
    "are_same",
    "hidden_tensors_message",
    "hides_tensors",
    "is_opaque",
    "tensors_in",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# The attributes of every module.
NO_STATE = frozenset(vars(nn.Module()))
_MISSING = object()
_RESTORED = (*HOOKS, "_parameters", "_buffers")


class TensorVersions:
    """Version counters of the tensors among some leaves, to detect later writes."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = ((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._held = [(i, tensor, _version(tensor)) for i, tensor in tensors]

    def written(self) -> tuple[int, ...]:
        """The positions of the leaves that were written."""
        return tuple(i for i, tensor, version in self._held if _version(tensor) != version)


def _version(tensor: Tensor) -> int:
    if type(tensor) is PlaceholderTensor:
        return tensor.provenance.num_writes
    return 0 if tensor.is_inference() else version_of(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanges:
    """Changes of a module's state by one call, by name.

    Args:
        attributes: attributes with new values; equal plain values count as unchanged.
        filled: the attributes whose containers hold new tensors.
        replaced: parameters and buffers that were replaced by other tensors.
        written: parameters, buffers and tensors in attributes that were written in place.
    """

    attributes: tuple[str, ...]
    filled: tuple[str, ...]
    replaced: tuple[str, ...]
    written: tuple[str, ...]


class ModuleSnapshot:
    """A snapshot of attributes, parameters, buffers and hooks of a module and its submodules.

    Args:
        module: the module.

    Attributes:
        loose: the tensors in attributes other than parameters and buffers, as of ``hold``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find_containers()

    def values(self) -> list[Any]:
        """The current values of attributes and their containers, for ``fresh_tensors``."""
        found: list[Any] = []
        for label, container in self._containers:
            if label:
                found += container.values() if isinstance(container, dict) else container
        return found

    def fresh_tensors(self, before: list[Any]) -> list[str]:
        """The attributes with other tensors than in ``before``, except the module's own state.

        ``nn.RNN`` keeps a list of its parameters, and rebuilds it when FSDP replaces them.
        """
        if are_same(self.values(), before):
            return []
        known = set(map(id, (*before, *self._module.parameters(), *self._module.buffers())))
        found = {
            _name(label, key)
            for label, container in self._containers
            for key, value in _tracked_items(label, container)
            if id(value) not in known and any(id(t) not in known for t in tensors_in(value))
        }
        self._find_containers()
        return sorted(found)

    def hold(self) -> None:
        """Record the current state, for ``changes`` and ``restore``."""
        self._held: list[tuple[str, Any, Any]] = [
            (label, each, dict(each) if isinstance(each, dict) else list(each))
            for label, each in self._containers
        ]
        self.loose: dict[str, Tensor] = {
            _name(label, key): value
            for label, attributes in self._containers
            if label.endswith(".")
            for key, value in _tracked_items(label, attributes)
            if isinstance(value, Tensor)
        }
        self._registered = self._parameters_and_buffers()
        self._versions = TensorVersions((*self._registered.values(), *self.loose.values()))

    def changes(self) -> StateChanges:
        """The changes since ``hold``."""
        attributes: dict[str, None] = {}
        filled: list[str] = []
        for label, container, held in self._held:
            if _is_same(container, held):
                continue
            before = held if isinstance(held, dict) else dict.fromkeys(map(id, held))
            for key, value in _tracked_items(label, container):
                if label.endswith("."):
                    if not _is_equal(value, before.get(key, _MISSING)):
                        attributes[_name(label, key)] = None
                    continue
                attributes[label] = None
                known = before.get(key) is value if isinstance(held, dict) else id(value) in before
                if not known and tensors_in(value):
                    filled.append(label)
        now = self._parameters_and_buffers()
        names = [*self._registered, *self.loose]
        return StateChanges(
            attributes=tuple(attributes),
            filled=tuple(filled),
            replaced=tuple(
                name
                for name in {**self._registered, **now}
                if now.get(name) is not self._registered.get(name)
            ),
            written=tuple(names[i] for i in self._versions.written()),
        )

    def restore(self) -> None:
        """Restore attributes, the contents of their containers, and registries."""
        for _, container, held in self._held:
            if _is_same(container, held):
                continue
            if isinstance(container, list):
                container[:] = held
            else:
                container.clear()
                container.update(held)

    def _parameters_and_buffers(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _find_containers(self) -> None:
        """Find where values may appear: attributes, and the lists, dicts and objects in them.

        Each container has a label: a module's path and a dot for its attributes, the attribute's
        name for a container inside it, and none for registries.
        """
        met: set[int] = set()
        self._containers: list[tuple[str, Any]] = []
        for path, module in self._module.named_modules():
            attributes = vars(module)
            self._containers.append((f"{path}.", attributes))
            for name, value in attributes.items():
                if name in _RESTORED and isinstance(value, dict):  # not the wrappers of torch.jit
                    self._containers.append(("", value))
                elif _is_tracked(name) and id(value) not in met:
                    met.add(id(value))
                    label = f"{path}.{name}".removeprefix(".")
                    self._containers += [(label, each) for each in _containers_in(value)]


def _name(label: str, key: Any) -> str:
    return f"{label}{key}".removeprefix(".") if label.endswith(".") else label


def _tracked_items(label: str, container: Any) -> Iterator[tuple[Any, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    if label.endswith("."):
        yield from (item for item in items if _is_tracked(item[0]))
    elif label:
        yield from items


def _is_tracked(name: Any) -> bool:
    return name not in NO_STATE and not str(name).startswith(WRAPPERS_STATE)


def _is_same(container: Any, held: Any) -> bool:
    if isinstance(container, dict):
        return len(container) == len(held) and all(map(is_, container.values(), held.values()))
    return len(container) == len(held) and all(map(is_, container, held))


def _is_equal(value: Any, was: Any) -> bool:
    if value is was or was is _MISSING:
        return value is was or value is None
    return isinstance(value, PLAIN) and type(value) is type(was) and bool(value == was)


def _containers_in(value: Any, depth: int = 3) -> list[Any]:
    """The lists, dicts and sets in a value, and the attributes of objects in it."""
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type, *PLAIN)) or callable(value):
        return []
    holds = isinstance(value, (list, dict, set))
    container = value if holds else getattr(value, "__dict__", None)
    if not isinstance(container, (list, dict, set)):
        return []
    inner = container.values() if isinstance(container, dict) else container
    below = (found for item in list(inner) for found in _containers_in(item, depth - 1))
    return [container, *below]


def are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """True if two lists contain the same objects."""
    return len(left) == len(right) and all(map(is_, left, right))


def tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    """The tensors in a value: an object, a container, or nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or isinstance(value, (nn.Module, type)):
        return []
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        items = list(vars(value).values())
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]


def is_opaque(leaf: Any) -> bool:
    """True for an object that may contain tensors."""
    plain = isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf)
    return (hasattr(leaf, "__dict__") or isinstance(leaf, set)) and not plain


def hides_tensors(leaf: Any) -> bool:
    """True for an object that contains tensors, even a callable."""
    if isinstance(leaf, (Tensor, nn.Module, type)):
        return False
    return bool(tensors_in(leaf) or tensors_in(dict(getattr(leaf, "__dict__", {}))))


def hidden_tensors_message(name: str, value: Any) -> str:
    """The message for an input that ``hides_tensors``."""
    return (
        f"input {name} is a {type(value).__qualname__}, an object in which stages don't find "
        "tensors; pass these in a dict, or register its class with torch's pytree "
        "(torch.utils._pytree.register_pytree_node)"
    )
