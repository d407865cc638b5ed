"""What a module writes beside what it returns: into its attributes, and into what it was given.

    self.aux = loss             an attribute: taken for a further output, which can cross
    acc.append(loss)            a container that others hold: they are on other stages, refused
    load += counts              a tensor: known by its version
    self.running_mean.mul_()    a buffer: stays with the module, unless stages share that

Modules are looked at before and after their call. This module knows no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.absent import Absent
from penstock.partition.torch_private import REGISTRIES

__all__ = ["Attributes", "State", "kept_in", "put", "tensors_in"]


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

    def buffers(self) -> tuple[str, ...]:
        """The buffers that have been written or replaced since."""
        now = dict(self._module.named_buffers())
        return tuple(
            name
            for name, (buffer, version) in self._buffers.items()
            if now.get(name) is not buffer or buffer._version != version
        )

    def changed(self) -> dict[str, Any]:
        """The attributes that have other tensors in them since, by ``path.name``."""
        found = {}
        for name, value in _attributes(self._module).items():
            now = tensors_in(value)
            if now and not _same(now, tensors_in(self._held.get(name))):
                found[name] = value
        return found

    def filled(self) -> list[str]:
        """Those among them that are the same containers as before, with something else in them."""
        return [name for name, value in self.changed().items() if value is self._before.get(name)]

    def restore(self) -> None:
        """Make all attributes, and the containers in them, what they were."""
        for name in self.changed():
            holder, last = _holder(self._module, name)
            if name not in self._before:
                del vars(holder)[last]
                continue
            value = self._before[name]
            vars(holder)[last] = value
            refill(value, self._held[name])


class State:
    """The tensors that opened modules hold by themselves, as they are now.

    Args:
        opened: the modules, by name.
    """

    def __init__(self, opened: Mapping[str, nn.Module]) -> None:
        self._opened = opened
        self._before: dict[str, tuple[Any, int]] = {
            name: (x, x._version) for name, x in self._tensors(True)
        }

    def written(self) -> frozenset[str]:
        """The parameters and buffers that have been written into since.

        Raises:
            PartitionError: others have been put in their place, or a tensor that is neither has
                been written into or replaced.
        """
        found = set()
        now: dict[str, Any] = dict(self._tensors(True))
        registered = {name for name, _ in self._tensors(False)}
        for name, (tensor, version) in self._before.items():
            if now.get(name) is not tensor:
                raise PartitionError(
                    f"the code between the model's parts assigns a new tensor to {name}, which "
                    "every stage would do for itself, and some could not; keep it within a module "
                    "that runs whole, or cut elsewhere"
                )
            if type(tensor) is Absent and name in registered:
                if tensor.origin.written:
                    found.add(name)
                continue
            known: Any = tensor
            if type(known) is Absent or known._version != version:
                raise PartitionError(
                    f"the code between the model's parts writes into {name}, a tensor that is "
                    "neither parameter nor buffer; register it as a buffer of a module that runs "
                    "whole"
                )
        return frozenset(found)

    def _tensors(self, attributes: bool) -> Iterator[tuple[str, Any]]:
        for path, module in self._opened.items():
            dot = f"{path}." if path else ""
            each: dict[str, Any] = {**module._parameters, **module._buffers}
            each |= vars(module) if attributes else {}
            for name, value in each.items():
                if isinstance(value, Tensor):
                    yield f"{dot}{name}", value


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


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if name not in REGISTRIES
    }


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
