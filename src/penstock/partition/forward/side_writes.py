"""What is written beside what a module returns: into its arguments, and between modules.

    acc.append(loss)      a container that others hold: they are on other stages, refused
    load += counts        a tensor: known by its version
    self.ema = mean       state of the code between the modules, which every stage runs

What modules keep in attributes of their own, attributes.py sees. This module knows no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import optree
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.forward.absent import Absent
from penstock.stage.pytree import flatten

__all__ = [
    "State",
    "are_same",
    "hides_tensors",
    "is_opaque",
    "refuse_filled",
    "tensors_in",
    "told_of_object",
    "told_replaced",
]


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
        self._registered = {name for name, _ in self._tensors(False)}

    def replaced(self) -> list[str]:
        """The attributes, no buffers, that held a tensor and now hold something else."""
        now = dict(self._tensors(True))
        return [
            name
            for name, (tensor, _) in self._before.items()
            if name not in self._registered and now.get(name) is not tensor
        ]

    def written(self) -> frozenset[str]:
        """The parameters and buffers that have been written into since.

        Raises:
            PartitionError: others have been put in their place, or a tensor that is neither has
                been written into.
        """
        found = set()
        now: dict[str, Any] = dict(self._tensors(True))
        for name, (tensor, version) in self._before.items():
            if now.get(name) is not tensor:
                if name not in self._registered:
                    continue  # see replaced()
                raise PartitionError(told_replaced(name))
            if type(tensor) is Absent and name in self._registered:
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


def told_replaced(name: str) -> str:
    """What to say of a tensor between modules that is another one after each call."""
    return (
        f"the code between the model's parts assigns a new tensor to {name}, of which it uses the "
        "one before: every stage would do that for itself, and some could not; keep it within a "
        "module that runs whole, or cut elsewhere"
    )


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf is an object that holds tensors, some that can be called among them."""
    if isinstance(leaf, (Tensor, nn.Module, type)):
        return False
    return bool(tensors_in(leaf) or tensors_in(dict(getattr(leaf, "__dict__", {}))))


def told_of_object(name: str, value: Any) -> str:
    """What to say of an input that holds tensors where nobody sees them."""
    return (
        f"input {name} is a {type(value).__qualname__}, an object in which stages don't find "
        "tensors; pass these, in a dict say, or register its class with torch's pytree "
        "(torch.utils._pytree.register_pytree_node)"
    )


def is_opaque(leaf: Any) -> bool:
    """Whether a leaf is an object that may hold tensors."""
    plain = isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf)
    return (hasattr(leaf, "__dict__") or isinstance(leaf, set)) and not plain


def refuse_filled(
    unit: str, states: list[Any], given: Any, lowered: list[Any], tree: optree.PyTreeSpec
) -> None:
    """A unit may not write into the objects and containers that it was given."""
    for state, held in states:
        now = tensors_in(state)
        if not are_same(now, held):
            raise PartitionError(
                f"{unit} writes tensors into the {type(state).__name__} that it is called "
                "with, which its other users, on other stages, would not see; leave it out "
                "(use_cache=False, for instance)"
            )
    leaves, shape = flatten(given)
    if shape != tree or not are_same(leaves, lowered):
        raise PartitionError(
            f"{unit} writes into a list or dict that it is called with, which its other users, on "
            "other stages, would not see; have it return what it writes"
        )


def are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
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
