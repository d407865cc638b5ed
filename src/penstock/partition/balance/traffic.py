"""What was seen to cross each cut of a model: tensors that later units take from earlier ones.

    embed ──h0──► layer 0 ──h1──► layer 1 ──h2──► head        cut before layer 1: h1, tables
      └──tables──────┴───────────────┘

It is told what goes into units and what comes out, and follows data by where it lies in memory, so
that views are known again. Where the model computes between units, as when it joins a skip
connection, the autograd graph tells whose outputs went into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from penstock.stage.pytree import tensors_of

__all__ = ["Traffic", "memory_of"]

Data: TypeAlias = tuple[Any, ...]


class Traffic:
    """Which tensors cross which cut of a model that runs.

    Args:
        known: tensors that every stage has by itself: the model's inputs and its state.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {memory_of(tensor) for tensor in known}
        self._kept: dict[Data, Tensor] = {}  # alive, so that nothing else comes to lie there
        self._first: dict[Data, int] = {}
        self._last: dict[Data, int] = {}
        self._made: dict[Node, Data] = {}  # by what autograd knows a unit's output

    def enter(self, segment: int, given: Any) -> None:
        """A unit is called with ``given``."""
        for data in self._note(segment, given):
            self._last[data] = segment
        for data in self._sources([tensor.grad_fn for tensor in tensors_of(given)]):
            self._last[data] = segment

    def leave(self, segment: int, output: Any) -> None:
        """A unit has returned ``output``."""
        for data in self._note(segment, output):
            node = self._kept[data].grad_fn
            if node is not None:
                self._made[node] = data

    def _sources(self, nodes: Iterable[Node | None]) -> Iterator[Data]:
        """The outputs of units that these nodes of the graph compute from."""
        stack = [node for node in nodes if node is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node in self._made:
                yield self._made[node]
                continue
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)

    def _note(self, segment: int, value: Any) -> Iterator[Data]:
        """What ``value`` holds, noted."""
        for tensor in tensors_of(value):
            if memory_of(tensor) in self._known or not tensor.numel():
                continue
            data = (memory_of(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape)
            self._kept[data] = tensor
            self._first.setdefault(data, segment)
            yield data

    def behind(self, segment: int) -> list[Tensor]:
        """What crosses a cut behind this segment, in the order in which it came to be."""
        return [
            self._kept[data]
            for data, first in self._first.items()
            if first <= segment < self._last.get(data, -1)
        ]


def memory_of(tensor: Tensor) -> int:
    """Where the data of a tensor and of all its views begins."""
    return tensor.untyped_storage().data_ptr()
