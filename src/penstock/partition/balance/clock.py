"""The time of each unit's forward, input gradient and weight gradient, within the whole model.

    F   │ embed │ layer 0 │ layer 1 │ head   │       a stamp where a unit is entered
    I   │ head  │ layer 1 │ layer 0 │ embed  │       ... and where a gradient reaches its output
    W   │ head  │ layer 1 │ layer 0 │ embed  │       ... and where its weights are delivered

F is that of the model as it is; I and W are those of a stage that puts its weight gradients off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.balance.rehearsal import Rehearsal
from penstock.partition.balance.subject import Subject
from penstock.partition.balance.watch import UnitWatch
from penstock.partition.blocks import LeafModule
from penstock.stage.pytree import tensors_of
from penstock.stage.weight_grad import DeferredGrads, compiled_parts
from penstock.stage.weight_grad.accumulate import accumulate

__all__ = ["Times", "measure"]

Times: TypeAlias = tuple[float, ...]
"""Seconds per segment."""


def measure(
    subject: Subject, units: Sequence[LeafModule], seen: Rehearsal
) -> tuple[Times, Times, Times]:
    """The time of each segment's F, I and W in one run."""
    forward, order = time_forward(subject, units)
    if order != seen.order:
        raise PartitionError(
            f"the {type(subject.model).__name__} runs {len(order)} blocks where it ran "
            f"{len(seen.order)} before; switch off what drops layers at random, or call eval()"
        )
    if seen.leaks is None:
        return forward, time_whole_backward(subject, units), (0.0,) * len(order)
    return forward, *time_split_backward(subject, units, seen.leaks)


def time_forward(subject: Subject, units: Sequence[LeafModule]) -> tuple[Times, tuple[str, ...]]:
    """The time of each segment of a forward, and the units in its order."""
    stamps: list[float] = []
    watch = UnitWatch(units, enter=lambda segment, _: stamps.append(subject.stamp()))
    with watch.watching():
        start = subject.stamp()
        subject.forward()
        end = subject.stamp()
    times = [after - before for before, after in pairwise([start, *stamps[1:], end])]
    return tuple(times), tuple(watch.order)


class Arrivals:
    """When the gradient of each segment's output arrives, which is when its backward begins.

    Args:
        subject: what runs, and its clock.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._num_segments = 0
        self._arrived: dict[int, float] = {}

    def enter(self, segment: int, _: Any) -> None:
        """A segment begins."""
        self._num_segments = segment + 1

    def leave(self, segment: int, output: Any) -> None:
        """A unit has returned ``output``."""
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._arrive(segment))  # type: ignore[no-untyped-call]

    def _arrive(self, segment: int) -> None:
        if segment not in self._arrived:
            self._arrived[segment] = self._subject.stamp()

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> Times:
        """Run the backward; return the time of each segment's.

        What comes before the first arrival, the loss, counts with the last segment.
        """
        times = [0.0] * self._num_segments
        self._arrived.clear()  # those of gradients that were taken within the forward
        current, last = self._num_segments - 1, self._subject.stamp()
        torch.autograd.backward(list(roots), list(grads))
        end = self._subject.stamp()
        for segment, stamp in self._arrived.items():
            times[current] += stamp - last
            current, last = segment, stamp
        times[current] += end - last
        return tuple(times)


def time_whole_backward(subject: Subject, units: Sequence[LeafModule]) -> Times:
    """The time of each segment's full backward."""
    arrivals = Arrivals(subject)
    with UnitWatch(units, enter=arrivals.enter, leave=arrivals.leave).watching():
        roots, grads = subject.forward()
    return arrivals.backward(roots, grads)


def time_split_backward(
    subject: Subject, units: Sequence[LeafModule], leaks: Sequence[nn.Parameter]
) -> tuple[Times, Times]:
    """The time of each segment's I, and of its W."""
    arrivals = Arrivals(subject)
    work = DeferredGrads(leaks, compiled_parts(subject.model))
    begins: list[int] = []

    def enter(segment: int, given: Any) -> None:
        arrivals.enter(segment, given)
        begins.append(len(work.records))

    with work, UnitWatch(units, enter=enter, leave=arrivals.leave).watching():
        roots, grads = subject.forward()
    with work:
        input_times = arrivals.backward(roots, grads)
    records = work.records
    weight_times = []
    for begin, end in reversed(list(pairwise([0, *begins[1:], len(records)]))):
        part = [record for record in records[begin:end] if record and record[5]]
        start = subject.stamp()
        accumulate(part)
        weight_times.append(subject.stamp() - start)
    return input_times, tuple(reversed(weight_times))
