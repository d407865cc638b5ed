"""The trace of a real step, from the executor's recorded times.

On the CPU an action's time is its wall time; on CUDA it is the device's, between two events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise

from penstock.runtime.executor import Executor
from penstock.schedule.placement import Placement
from penstock.schedule.text import format_step, parse_action
from penstock.stage.device_streams import DeviceStreams
from penstock.trace import Span, Trace

__all__ = ["decode_spans", "encode_spans", "merge_spans", "spans_of"]


def spans_of(executor: Executor, placement: Placement, streams: DeviceStreams | None) -> list[Span]:
    """The spans of the last run, in seconds of the wall clock; waits for messages have none."""
    return [
        Span(rank=placement.rank_of(bound.action.stage), action=bound.action, start=start, end=end)
        for bound, (start, end) in zip(executor.actions, _times(executor, streams), strict=False)
        if not bound.is_wait
    ]


def _times(executor: Executor, streams: DeviceStreams | None) -> list[tuple[float, float]]:
    """Start and end of each finished action."""
    # Machines share no monotonic clock, but wall clocks are close enough for a timeline.
    offset = time.time() - time.perf_counter()
    finished = max(0, len(executor.marks) - 1)
    if streams is None or not finished:
        return [(begin + offset, end + offset) for begin, end in pairwise(executor.marks)]
    # The host runs ahead of the device: its own marks are launch times.
    first = executor.events[0][0]
    start = streams.host_time_of(first) + offset
    return [
        (start + streams.elapsed_s(first, begin), start + streams.elapsed_s(first, end))
        for begin, end in executor.events[:finished]
    ]


def encode_spans(spans: Sequence[Span]) -> bytes:
    """Encode spans as JSON, for other ranks."""
    rows = [[s.rank, format_step(s.action), s.start, s.end] for s in spans]
    return json.dumps(rows).encode()


def decode_spans(data: bytes) -> list[Span]:
    """Decode the spans of ``encode_spans``."""
    return [
        Span(rank=rank, action=parse_action(text), start=start, end=end)
        for rank, text, start, end in json.loads(data)
    ]


def merge_spans(name: str, num_ranks: int, spans: Sequence[Span]) -> Trace:
    """A trace of all ranks' spans that begins at zero."""
    origin = min((s.start for s in spans), default=0.0)
    shifted = [
        Span(rank=s.rank, action=s.action, start=s.start - origin, end=s.end - origin)
        for s in spans
    ]
    shifted.sort(key=lambda s: (s.rank, s.start))
    return Trace(name=name, num_ranks=num_ranks, unit="s", spans=tuple(shifted))
