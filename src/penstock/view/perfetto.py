"""A trace as Chrome's trace-event JSON, which https://ui.perfetto.dev opens.

Every rank is a process with two threads: one for computations, one for messages, sharding and
copies.

Source of the format: the "Trace Event Format" document of the Chromium project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedule.action import Overlap
from penstock.schedule.rules import COMPUTE
from penstock.schedule.text import parse_action, parse_step
from penstock.trace import Span, Trace
from penstock.view.layout import Drawable, trace_of
from penstock.view.palette import LOOKS

__all__ = ["from_perfetto", "save_perfetto", "to_perfetto"]

# Microseconds per unit. An abstract cost of 1 is shown as a millisecond.
_SCALE = {"s": 1e6, "1": 1e3}
_COMPUTE_LANE, _OTHER_LANE = 0, 1

_Event = dict[str, Any]


def to_perfetto(trace: Drawable) -> str:
    """The trace of a step as JSON text.

    Args:
        trace: measured (unit ``"s"``) or simulated (unit ``"1"``, shown as milliseconds).

    Raises:
        ScheduleError: the trace has another unit.

    Examples:
        >>> from penstock.schedule.action import Op, action
        >>> span = Span(rank=0, action=action(0, Op.FORWARD, 3), start=1.0, end=2.0)
        >>> text = to_perfetto(Trace(name="1f1b", num_ranks=1, unit="1", spans=(span,)))
        >>> [e["name"] for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
        ['0F3']
    """
    trace = trace_of(trace)
    if trace.unit not in _SCALE:
        raise ScheduleError(f"the trace's unit is {trace.unit!r}, expected one of 's', '1'")
    header = {"schedule": trace.name, "ranks": trace.num_ranks, "unit": trace.unit}
    events = [*_lane_names(trace), *_complete_events(trace)]
    return json.dumps({"displayTimeUnit": "ms", "otherData": header, "traceEvents": events})


def save_perfetto(trace: Drawable, path: str | PathLike[str]) -> None:
    """Write ``to_perfetto(trace)`` to a file, usually ``*.json``; its folder is created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(to_perfetto(trace), encoding="utf-8")


def from_perfetto(text: str) -> Trace:
    """Read the output of ``to_perfetto`` back.

    Raises:
        ScheduleError: not JSON, or JSON that ``to_perfetto`` did not write.

    Examples:
        >>> trace = Trace(name="1f1b", num_ranks=2, unit="s", spans=())
        >>> from_perfetto(to_perfetto(trace)) == trace
        True
    """
    try:
        return _read(json.loads(text))
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
    ) as error:  # fmt: skip
        raise ScheduleError(
            f"not a trace that Penstock has saved ({type(error).__name__}: {error})"
        ) from error


def _read(document: _Event) -> Trace:
    header, events = document["otherData"], document["traceEvents"]
    name, num_ranks, scale = header["schedule"], header["ranks"], _SCALE[header["unit"]]
    # Every rank has at least one metadata event.
    if not isinstance(name, str) or type(num_ranks) is not int or num_ranks > len(events):
        raise ValueError(f"{num_ranks!r} ranks of schedule {name!r} in {len(events)} events")
    spans, pairs = [], dict[Overlap, None]()
    for event in events:
        if event["ph"] != "X":
            continue
        rank, start, length = event["pid"], event["ts"] / scale, event["dur"] / scale
        if type(rank) is not int or not 0 <= rank < num_ranks:
            raise ValueError(f"{event['name']} has pid {rank!r}, expected a rank below {num_ranks}")
        if not (math.isfinite(start) and 0 <= length < math.inf):
            raise ValueError(f"{event['name']} has ts {event['ts']!r} and dur {event['dur']!r}")
        act = parse_action(event["name"])
        spans.append(Span(rank=rank, action=act, start=start, end=start + length))
        pair = parse_step(event["args"]["pair"]) if "pair" in event["args"] else None
        if isinstance(pair, Overlap):
            pairs[pair] = None
    return Trace(
        name=name,
        num_ranks=num_ranks,
        unit=header["unit"],
        # The sort is stable: spans that start together keep their order.
        spans=tuple(sorted(spans, key=lambda s: (s.rank, s.start))),
        overlapped_pairs=tuple(pairs),
    )


def _lane_names(trace: Trace) -> Iterator[_Event]:
    """Metadata events that name and order processes and threads."""
    with_others = {span.rank for span in trace.spans if span.action.op not in COMPUTE}
    for rank in range(trace.num_ranks):
        lanes = [("process", 0, f"rank {rank}", rank), ("thread", _COMPUTE_LANE, "compute", 0)]
        if rank in with_others:
            lanes.append(("thread", _OTHER_LANE, "messages", 1))
        for kind, lane, text, order in lanes:
            place = {"pid": rank, "tid": lane}
            yield {"ph": "M", "name": f"{kind}_name", **place, "args": {"name": text}}
            yield {"ph": "M", "name": f"{kind}_sort_index", **place, "args": {"sort_index": order}}


def _complete_events(trace: Trace) -> Iterator[_Event]:
    """An event with a duration for each span."""
    scale, pair_of = _SCALE[trace.unit], trace.pair_of()
    for span in trace.spans:
        act, length = span.action, span.end - span.start
        lane = _COMPUTE_LANE if act.op in COMPUTE else _OTHER_LANE
        args: _Event = {"stage": act.stage, "op": act.op.value}
        if act.microbatch is not None:
            args["microbatch"] = act.microbatch
        if act in pair_of:
            args["pair"] = str(pair_of[act])
        yield {
            "ph": "X", "name": str(act), "cat": LOOKS[act.op].name, "pid": span.rank,
            "tid": lane, "ts": span.start * scale, "dur": length * scale, "args": args,
        }  # fmt: skip
