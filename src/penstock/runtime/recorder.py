"""A real step's trace: what the executors noted, as spans.

On the CPU a call's time is its wall time; on CUDA it is the device's, between recorded events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from penstock.runtime.executor import Executor
from penstock.schedule.placement import Placement
from penstock.schedule.text import format_step, parse_action
from penstock.trace import Span, Trace

__all__ = ["decode_spans", "encode_spans", "merge_spans", "spans_of"]


def spans_of(executor: Executor, placement: Placement) -> list[Span]:
    """The spans of the executor's last run, in seconds of the machine's wall clock.

    Waiting for a message is idle time: it gets no span.
    """
    marks = _marks(executor)
    return [
        Span(
            rank=placement.rank_of(call.action.stage),
            action=call.action,
            start=marks[i],
            end=marks[i + 1],
        )
        for i, call in enumerate(executor.calls[: max(0, len(marks) - 1)])
        if not call.waits
    ]


def _marks(executor: Executor) -> list[float]:
    # Ranks on several machines share no monotonic clock; wall clocks are close enough to look at.
    offset = time.time() - time.perf_counter()
    if not executor.events:
        return [mark + offset for mark in executor.marks]
    torch.cuda.synchronize()
    first = executor.events[0]
    start = executor.marks[0] + offset
    return [start + first.elapsed_time(event) / 1e3 for event in executor.events]


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
