"""State that a forward changes beside its result: attributes, buffers, containers and arguments.

    self.aux = loss             an attribute: the module's own, which no code outside may read
    self.seen.append(loss)      a container that other modules may hold too: refused
    self.running_mean.mul_()    a buffer: stays with the module
    load += counts              a tensor: seen by its version counter

This module knows no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from penstock._torch_compat import HOOKS, WRAPPERS_STATE, version_of
from penstock.partition.forward.placeholder import PlaceholderTensor

__all__ = [
    "NO_STATE",
    "PLAIN",
    "ModuleSnapshot",
    "TensorVersions",
    "are_same",
    "hidden_tensors_message",
    "hides_tensors",
    "is_opaque",
    "tensors_in",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# The attributes that every module has.
NO_STATE = frozenset(vars(nn.Module()))
_MISSING = object()


class TensorVersions:
    """Version counters of the tensors among some leaves, to see which are written into later."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = ((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._held = [(i, tensor, _version(tensor)) for i, tensor in tensors]

    def written(self) -> tuple[int, ...]:
        """The positions of the leaves that were written into."""
        return tuple(i for i, tensor, version in self._held if _version(tensor) != version)


def _version(tensor: Tensor) -> int:
    if type(tensor) is PlaceholderTensor:
        return tensor.provenance.num_writes
    return 0 if tensor.is_inference() else version_of(tensor)


class ModuleSnapshot:
    """Attributes, buffers and hooks of a module and all within it, as they were when taken.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find_containers()
        self.take()

    def take(self) -> None:
        """Take the snapshot anew."""
        self._taken = [(label, each, _copied(each)) for label, each in self._containers]

    def take_buffers(self) -> None:
        """Note the buffers too, for ``changed_buffers``."""
        self._buffers = dict(self._module.named_buffers())
        self._versions = TensorVersions(self._buffers.values())

    def changed_buffers(self) -> tuple[str, ...]:
        """The buffers that were written into or replaced."""
        names, now = list(self._buffers), dict(self._module.named_buffers())
        written = {names[i] for i in self._versions.written()}
        written |= {name for name in names if now.get(name) is not self._buffers[name]}
        return (*written, *(name for name in now if name not in self._buffers))

    def changes(self) -> list[tuple[str, Any, bool]]:
        """Attributes with new values; equal plain values count as unchanged.

        Returns:
            The attribute's name with its path, the new value, and True if that was put into a
            container which the attribute held before.
        """
        found: list[tuple[str, Any, bool]] = []
        for label, container, held in self._taken:
            if label is None or _is_same(container, held):
                continue
            if not label.endswith("."):
                known = set(map(id, held.values() if isinstance(held, dict) else held))
                values = container.values() if isinstance(container, dict) else container
                found += [(label, value, True) for value in values if id(value) not in known]
                continue
            for key, value in container.items():
                if _is_tracked(key) and not _is_equal(value, held.get(key, _MISSING)):
                    found.append((f"{label}{key}".removeprefix("."), value, False))
        if found:
            self._find_containers()
        return found

    def fresh_tensors(self) -> list[str]:
        """Attributes that have come to hold other tensors, the module's own state aside.

        ``nn.RNN`` keeps a list of its parameters, which is made anew where FSDP replaces them.
        """
        changes = self.changes()
        if not changes:
            return []
        own = {id(t) for t in (*self._module.parameters(), *self._module.buffers())}
        return sorted(
            {n for n, value, _ in changes if any(id(t) not in own for t in tensors_in(value))}
        )

    def restore(self) -> None:
        """Make attributes, the contents of their containers, and hooks what they were."""
        for _, container, held in self._taken:
            if _is_same(container, held):
                continue
            if isinstance(container, list):
                container[:] = held
            else:
                container.clear()
                container.update(held)

    def _find_containers(self) -> None:
        """Find where values may appear: attributes, and the lists, dicts and objects in them.

        Each has its label: of a module's attributes its path with a dot behind, of a container in
        an attribute that attribute's name, and of hooks None.
        """
        met: set[int] = set()
        self._containers: list[tuple[str | None, Any]] = []
        for path, module in self._module.named_modules():
            attributes = vars(module)
            self._containers.append((f"{path}.", attributes))
            for name, value in attributes.items():
                if name in HOOKS:
                    self._containers.append((None, value))
                elif _is_tracked(name) and id(value) not in met:
                    met.add(id(value))
                    label = f"{path}.{name}".removeprefix(".")
                    self._containers += [(label, each) for each in _containers_in(value)]


def _is_tracked(name: Any) -> bool:
    return name not in NO_STATE and not str(name).startswith(WRAPPERS_STATE)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _is_same(container: Any, held: Any) -> bool:
    if isinstance(container, dict):
        return len(container) == len(held) and all(map(is_, container.values(), held.values()))
    return len(container) == len(held) and all(map(is_, container, held))


def _is_equal(value: Any, was: Any) -> bool:
    if value is was or was is _MISSING:
        return value is was or value is None
    return isinstance(value, PLAIN) and type(value) is type(was) and bool(value == was)


def _containers_in(value: Any, depth: int = 3) -> list[Any]:
    """The lists, dicts and sets in a value, and the attributes of the objects in it."""
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
    """True if two lists hold the same objects."""
    return len(left) == len(right) and all(map(is_, left, right))


def tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    """The tensors in a value: an object, a container, or containers of such."""
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
    """True for an object that may hold tensors."""
    plain = isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf)
    return (hasattr(leaf, "__dict__") or isinstance(leaf, set)) and not plain


def hides_tensors(leaf: Any) -> bool:
    """True for an object that holds tensors, a callable one included."""
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
