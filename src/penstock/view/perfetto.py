"""A trace as Chrome's trace-event JSON, which https://ui.perfetto.dev opens.

Every rank is a process with two lanes, one for what it computes and one for the rest (messages,
sharding). Arrows lead from an action to the one on another rank that uses its result. This module
draws nothing itself.

Source of the format: the "Trace Event Format" document of the Chromium project.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, action
from penstock.schedule.rules import COMPUTE, REQUIRES
from penstock.schedule.text import parse_action
from penstock.trace import Span, Trace
from penstock.view.causes import makers
from penstock.view.palette import name_of

__all__ = ["from_perfetto", "load_perfetto", "save_perfetto", "to_perfetto"]

# Microseconds per unit. An abstract cost of 1 is shown as a millisecond.
_SCALE = {"s": 1e6, "1": 1e3}

# chrome://tracing colours events by these reserved names; Perfetto takes its colours from the
# event's name, of which it leaves out the digits, so that there too each op has one colour.
_COLOUR_NAMES = {
    Op.FORWARD: "thread_state_running",
    Op.FULL_BACKWARD: "thread_state_runnable",
    Op.INPUT_GRAD: "rail_response",
    Op.WEIGHT_GRAD: "good",
}

_COMPUTE_LANE, _OTHER_LANE = 0, 1


def to_perfetto(trace: Trace) -> str:
    """The trace as JSON text.

    Args:
        trace: measured (unit ``"s"``) or simulated (unit ``"1"``, shown as milliseconds).

    Raises:
        ScheduleError: the trace has another unit.

    Example:
        >>> from penstock.schedule.action import Op, action
        >>> span = Span(rank=0, action=action(0, Op.FORWARD, 3), start=1.0, end=2.0)
        >>> text = to_perfetto(Trace(name="1f1b", num_ranks=1, unit="1", spans=(span,)))
        >>> [e["name"] for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
        ['0F3']
    """
    scale = _SCALE.get(trace.unit)
    if scale is None:
        raise ScheduleError(
            f"the trace's unit is {trace.unit!r}, expected one of {', '.join(map(repr, _SCALE))}"
        )
    events = _lane_names(trace)
    events += [_complete_event(span, scale) for span in trace.spans]
    events += _arrows(trace, scale)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"schedule": trace.name, "ranks": trace.num_ranks, "unit": trace.unit},
        "traceEvents": events,
    }
    return json.dumps(document)


def save_perfetto(trace: Trace, path: str | PathLike[str]) -> None:
    """Write ``to_perfetto(trace)`` to a file; its folder is made if there is none.

    Args:
        trace: what to save.
        path: the file, best ``*.json``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(to_perfetto(trace), encoding="utf-8")


def from_perfetto(text: str) -> Trace:
    """Read a trace back.

    Args:
        text: what ``to_perfetto`` wrote.

    Raises:
        ScheduleError: not JSON, or JSON that ``to_perfetto`` did not write.

    Example:
        >>> trace = Trace(name="1f1b", num_ranks=2, unit="s", spans=())
        >>> from_perfetto(to_perfetto(trace)) == trace
        True
    """
    try:
        document = json.loads(text)
        told = document["otherData"]
        unit = told["unit"]
        spans = [
            _span(event, _SCALE[unit]) for event in document["traceEvents"] if event["ph"] == "X"
        ]
        name, num_ranks = str(told["schedule"]), int(told["ranks"])
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleError(
            f"not a trace that Penstock has saved ({type(error).__name__}: {error})"
        ) from error
    # Sorting keeps the order of what starts together, as the trace had it.
    spans.sort(key=lambda span: (span.rank, span.start))
    return Trace(name=name, num_ranks=num_ranks, unit=unit, spans=tuple(spans))


def _span(event: dict[str, Any], scale: float) -> Span:
    start, length = event["ts"] / scale, event["dur"] / scale
    return Span(
        rank=event["pid"], action=parse_action(event["name"]), start=start, end=start + length
    )


def load_perfetto(path: str | PathLike[str]) -> Trace:
    """``from_perfetto`` of a file.

    Raises:
        ScheduleError: the file is not a trace that ``save_perfetto`` wrote.
        OSError: the file can't be read.
    """
    return from_perfetto(Path(path).read_text(encoding="utf-8"))


def _lane(span: Span) -> int:
    return _COMPUTE_LANE if span.action.op in COMPUTE else _OTHER_LANE


def _lane_names(trace: Trace) -> list[dict[str, Any]]:
    used = {(span.rank, _lane(span)) for span in trace.spans}
    events = []
    for rank in range(trace.num_ranks):
        events.append(_metadata("process_name", rank, name=f"rank {rank}"))
        events.append(_metadata("process_sort_index", rank, sort_index=rank))
        for lane, name in ((_COMPUTE_LANE, "compute"), (_OTHER_LANE, "messages")):
            if lane == _COMPUTE_LANE or (rank, lane) in used:
                events.append({**_metadata("thread_name", rank, name=name), "tid": lane})
                events.append(
                    {**_metadata("thread_sort_index", rank, sort_index=lane), "tid": lane}
                )
    return events


def _metadata(kind: str, rank: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": args}


def _complete_event(span: Span, scale: float) -> dict[str, Any]:
    act = span.action
    args = {"stage": act.stage, "op": act.op.value}
    if act.microbatch is not None:
        args["microbatch"] = act.microbatch
    event: dict[str, Any] = {
        "ph": "X",
        "name": str(act),
        "cat": name_of(act.op),
        "pid": span.rank,
        "tid": _lane(span),
        "ts": span.start * scale,
        "dur": (span.end - span.start) * scale,
        "args": args,
    }
    if act.op in _COLOUR_NAMES:
        event["cname"] = _COLOUR_NAMES[act.op]
    return event


def _arrows(trace: Trace, scale: float) -> list[dict[str, Any]]:
    """A pair of flow events for each result that crosses ranks."""
    made = makers(trace.spans)
    events: list[dict[str, Any]] = []
    for span in trace.spans:
        for op, offset in REQUIRES[span.action.op] if span.action.op in COMPUTE else ():
            stage = span.action.stage + offset
            maker = made.get(action(stage, op, span.action.microbatch)) if stage >= 0 else None
            if maker is None or maker.rank == span.rank:
                continue
            arrow = {"cat": "message", "name": name_of(op), "id": len(events) // 2}
            # A flow binds to the slice that encloses its time, so it leaves within the maker.
            left = (maker.start + maker.end) / 2
            events += [
                {**arrow, "ph": "s", "pid": maker.rank, "tid": _COMPUTE_LANE, "ts": left * scale},
                {
                    **arrow,
                    "ph": "f",
                    "bp": "e",
                    "pid": span.rank,
                    "tid": _COMPUTE_LANE,
                    "ts": span.start * scale,
                },
            ]
    return events
