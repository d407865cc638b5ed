"""A real step's trace: what the executors noted, as spans.

On the CPU a call's time is its wall time; on CUDA it is the device's, between events on its stream.
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
    """The spans of the executor's last run, in seconds of the machine's wall clock.

    Waiting for a message is idle time: it gets no span.
    """
    return [
        Span(rank=placement.rank_of(call.action.stage), action=call.action, start=start, end=end)
        for call, (start, end) in zip(executor.calls, _times(executor, streams), strict=False)
        if not call.waits
    ]


def _times(executor: Executor, streams: DeviceStreams | None) -> list[tuple[float, float]]:
    """For each call that was finished, when it began and ended."""
    # Ranks on several machines share no monotonic clock; wall clocks are close enough to look at.
    offset = time.time() - time.perf_counter()
    finished = max(0, len(executor.marks) - 1)
    if streams is None or not finished:
        return [(begin + offset, end + offset) for begin, end in pairwise(executor.marks)]
    # The host runs ahead of the device: its own marks say when calls were asked for, not run.
    first = executor.events[0][0]
    start = streams.host_time_of(first) + offset
    return [
        (start + streams.elapsed_s(first, begin), start + streams.elapsed_s(first, end))
        for begin, end in executor.events[:finished]
    ]


def encode_spans(spans: Sequence[Span]) -> bytes:
    """Spans as JSON, to be sent to other ranks."""
    rows = [[s.rank, format_step(s.action), s.start, s.end] for s in spans]
    return json.dumps(rows).encode()


def decode_spans(data: bytes) -> list[Span]:
    """The spans that ``encode_spans`` wrote."""
    return [
        Span(rank=rank, action=parse_action(text), start=start, end=end)
        for rank, text, start, end in json.loads(data)
    ]


def merge_spans(name: str, num_ranks: int, spans: Sequence[Span]) -> Trace:
    """One trace that begins at zero."""
    origin = min((s.start for s in spans), default=0.0)
    moved = [
        Span(rank=s.rank, action=s.action, start=s.start - origin, end=s.end - origin)
        for s in spans
    ]
    moved.sort(key=lambda s: (s.rank, s.start))
    return Trace(name=name, num_ranks=num_ranks, unit="s", spans=tuple(moved))
