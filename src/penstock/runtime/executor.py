"""The loop over bound actions, and the trace of its last run.

It depends on neither stages nor messages. On the CPU an action's time is its wall time; on CUDA it
is the device's, between two events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch

from penstock._torch_compat import profiler_is_on
from penstock.schedule.action import Action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.text import parse_action
from penstock.stage.device_streams import DeviceStreams, Event
from penstock.trace import Span, Trace

__all__ = ["BoundAction", "Executor", "merge_spans"]


@dataclass(frozen=True, slots=True)
class BoundAction:
    """An action, or the wait for its message (idle time), with its handler."""

    action: Action
    run: Callable[[], None]
    is_wait: bool = False
    # The begin and end of a part of an overlapped pair, on the host's clock or as events.
    between: Sequence[Any] = ()


class Executor:
    """Runs bound actions in order and records the time of each.

    Attributes:
        marks: the clock before the first action and after each one (``time.perf_counter``, s).
    """

    def __init__(
        self, actions: Sequence[BoundAction], streams: DeviceStreams | None = None
    ) -> None:
        self.actions = tuple(actions)
        self._runs = [action.run for action in actions]
        self._streams = streams
        self.marks: list[float] = []
        # The events before the first action and after each one.
        self._events: list[Event] = []
        if streams is not None:
            self._events = [streams.event(timed=True) for _ in range(len(actions) + 1)]

    @property
    def failed(self) -> BoundAction | None:
        """The action that raised the last run's exception."""
        done = len(self.marks) - 1
        return self.actions[done] if 0 <= done < len(self.actions) else None

    def run(self) -> None:
        """Run all actions."""
        is_profiled = profiler_is_on()
        if is_profiled or self._streams is not None:
            self._run_recorded(is_profiled)
            return
        clock = perf_counter
        marks = self.marks = [clock()]
        mark = marks.append
        for run in self._runs:
            run()
            mark(clock())

    def _run_recorded(self, is_profiled: bool) -> None:
        """Run all actions with events of the device, and ranges of torch's profiler."""
        streams, plain = self._streams, nullcontext()
        self.marks = [perf_counter()]
        if streams is not None:
            streams.mark(self._events[0], streams.current())
        for i, bound in enumerate(self.actions, start=1):
            name = f"penstock.{'wait ' if bound.is_wait else ''}{bound.action}"
            with torch.profiler.record_function(name) if is_profiled else plain:
                bound.run()
            if streams is not None:
                streams.mark(self._events[i], streams.current())
            self.marks.append(perf_counter())

    def encode_spans(self, placement: Placement) -> bytes:
        """The spans of the last run as JSON, in seconds of the wall clock; waits have none."""
        # Machines share no monotonic clock, but wall clocks are close enough for a timeline.
        offset, marks = time.time() - perf_counter(), self.marks
        seconds: Callable[[Any], float] = float
        if self._streams is not None and marks:
            # The host runs ahead of the device: its own marks are launch times.
            marks = self._events[: len(marks)]
            offset += self._streams.host_time_of(marks[0])
            seconds = partial(self._streams.elapsed_s, marks[0])
        rows = [
            [
                placement.rank_of(bound.action.stage),
                str(bound.action),
                *(seconds(mark) + offset for mark in bound.between or marked),
            ]
            for bound, marked in zip(self.actions, pairwise(marks), strict=False)
            if not bound.is_wait
        ]
        return json.dumps(rows).encode()


def merge_spans(name: str, program: Program, encoded: Sequence[bytes]) -> Trace:
    """A trace that begins at zero, of the spans that ``Executor.encode_spans`` returned."""
    rows = sorted((row for data in encoded for row in json.loads(data)), key=itemgetter(0, 2))
    origin = min((start for _, _, start, _ in rows), default=0.0)
    spans = tuple(
        Span(rank=rank, action=parse_action(text), start=start - origin, end=end - origin)
        for rank, text, start, end in rows
    )
    pairs = program.overlapped_pairs
    return Trace(
        name=name, num_ranks=program.num_ranks, unit="s", spans=spans, overlapped_pairs=pairs
    )
