"""What was seen to cross each cut of a model: tensors that later units take from earlier ones.

    embed ──h0──► layer 0 ──h1──► layer 1 ──h2──► head        cut before layer 1: h1, tables
      └──tables──────┴───────────────┘

It is told what goes into units and what comes out, and follows data by where it lies in memory, so
that views are known again. What the model computes between units is seen where a unit takes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor

from penstock.stage.trees import flatten

__all__ = ["Traffic", "memory_of", "tensors_of"]

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
        self._outputs: dict[int, list[Data]] = {}

    def enter(self, segment: int, given: Any) -> None:
        """A unit is called with ``given``."""
        for data in self._note(segment, given):
            self._last[data] = segment

    def leave(self, segment: int, output: Any) -> None:
        """A unit has returned ``output``."""
        self._outputs[segment] = list(self._note(segment, output))

    def _note(self, segment: int, value: Any) -> Iterable[Data]:
        for tensor in tensors_of(value):
            if memory_of(tensor) in self._known or not tensor.numel():
                continue
            data = (memory_of(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape)
            if data not in self._kept or tensor.requires_grad:
                self._kept[data] = tensor
            self._first.setdefault(data, segment)
            yield data

    def behind(self, segment: int) -> list[Tensor]:
        """What crosses a cut behind this segment, in the order in which it came to be."""
        crossing = [
            data
            for data, first in self._first.items()
            if first <= segment < self._last.get(data, -1)
        ]
        if not any(self._kept[data].requires_grad for data in crossing):
            # What goes on is computed anew from it before any unit takes it.
            crossing += self._latest(segment, besides=crossing)
        return [self._kept[data] for data in crossing]

    def _latest(self, segment: int, besides: list[Data]) -> list[Data]:
        """What the last unit up to here returned whose output takes a gradient."""
        for each in range(segment, -1, -1):
            differentiable = [
                data
                for data in dict.fromkeys(self._outputs.get(each, []))
                if self._kept[data].requires_grad
            ]
            if differentiable:
                return [data for data in differentiable if data not in besides]
        return []


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a tree."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    """Where the data of a tensor and of all its views begins."""
    return tensor.untyped_storage().data_ptr()
