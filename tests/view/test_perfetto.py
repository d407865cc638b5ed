"""The trace-event file: what Perfetto needs of it, and that times and places are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import ScheduleError, build, simulate
from penstock.schedule.action import Op, action
from penstock.schedule.passes import lower
from penstock.schedule.rules import COMPUTE
from penstock.trace import Span, Trace
from penstock.view.perfetto import from_perfetto, save_perfetto, to_perfetto

Event = dict[str, Any]


def events_of(trace: Trace, phase: str) -> list[Event]:
    return [e for e in json.loads(to_perfetto(trace))["traceEvents"] if e["ph"] == phase]


def one_span(unit: str) -> Trace:
    span = Span(rank=1, action=action(1, Op.FORWARD, 3), start=0.5, end=0.75)
    return Trace(name="1f1b", num_ranks=2, unit=unit, spans=(span,))


@pytest.mark.parametrize(("unit", "start", "duration"), [("s", 5e5, 2.5e5), ("1", 500, 250)])
def test_times_are_microseconds(unit: str, start: float, duration: float) -> None:
    (event,) = events_of(one_span(unit), "X")
    assert (event["ts"], event["dur"]) == (start, duration)
    assert (event["pid"], event["name"], event["cat"]) == (1, "1F3", "forward")
    assert event["args"] == {"stage": 1, "op": "F", "microbatch": 3}


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unit is 'min', expected one of 's', '1'"):
        to_perfetto(one_span("min"))


def test_every_rank_and_lane_has_its_name() -> None:
    program = lower(build("1f1b", ranks=2, microbatches=2))
    names = [
        (e["pid"], e["args"]["name"])
        for e in events_of(simulate(program).trace, "M")
        if "name" in e["args"]
    ]
    assert names == [
        (rank, name) for rank in range(2) for name in (f"rank {rank}", "compute", "messages")
    ]


def test_every_span_is_one_complete_event() -> None:
    trace = simulate(lower(build("zbv", ranks=3, microbatches=5))).trace
    shown = sorted((e["pid"], e["name"], e["ts"], e["dur"]) for e in events_of(trace, "X"))
    spans = ((s.rank, str(s.action), s.start * 1e3, (s.end - s.start) * 1e3) for s in trace.spans)
    assert shown == sorted(spans)


def test_computation_and_messages_have_separate_lanes() -> None:
    trace = simulate(lower(build("1f1b", ranks=2, microbatches=2))).trace
    by_lane = {e["name"]: e["tid"] for e in events_of(trace, "X")}
    assert {str(s.action): int(s.action.op not in COMPUTE) for s in trace.spans} == by_lane


def test_saved_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    save_perfetto(one_span("s"), path)
    assert path.read_text(encoding="utf-8") == to_perfetto(one_span("s"))


def test_overlapped_pairs_are_written_and_read_back() -> None:
    trace = simulate(build("dualpipev", ranks=2, microbatches=4)).trace
    told = {e["name"]: e["args"].get("pair") for e in events_of(trace, "X")}
    assert told["0F3"] == told["3B1"] == "(0F3;3B1)OVERLAP_F_B"
    assert told["0F0"] is None
    assert from_perfetto(to_perfetto(trace)).pair_of() == trace.pair_of() != {}
