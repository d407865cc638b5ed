"""What pages draw: where boxes lie, what they waited for, what is held."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from penstock import Costs, build, check, schedules, simulate
from penstock.schedule.family import Family
from penstock.schedule.passes import lower
from penstock.schedule.rules import COMPUTE
from penstock.simulate.result import Simulation
from penstock.trace import Span, Trace
from penstock.view.boxes import arrange, memory_lines
from penstock.view.causes import critical_path, waited_for


def step(name: str, *, costs: Costs | None = None) -> Simulation:
    return simulate(build(name, ranks=4, microbatches=8), costs or Costs())


@pytest.mark.parametrize("each", schedules(), ids=lambda each: each.name)
def test_every_schedule_can_be_drawn(each: Family) -> None:
    result = step(each.name)
    drawing = arrange(result)
    computes = sum(act.op in COMPUTE for act in result.program.actions())
    assert {len(column) for column in drawing.boxes.values()} >= {computes}
    assert len({len(column) for column in drawing.boxes.values()}) == 1
    assert drawing.end == pytest.approx(result.makespan)
    assert drawing.peaks == result.peak_bytes
    for left, right, top, foot, rank in zip(
        *(drawing.boxes[name] for name in ("left", "right", "top", "foot", "rank")), strict=True
    ):
        assert 0 <= left <= right <= drawing.end + 1e-9
        assert rank < top < foot < rank + 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_causes_seen_from_times_are_those_of_the_simulation(name: str, latency: float) -> None:
    """For a measured step times are all there is."""
    result = step(name, costs=Costs(forward=1, input_grad=1.5, weight_grad=0.7, latency=latency))
    causes = waited_for(result.trace)
    for rank in range(4):
        before = None
        for span in result.trace.compute(rank):
            told = result.waited_for(span)
            seen = causes.get(span)
            if told is None:
                assert seen == before
            else:
                assert seen is not None
                assert (seen.action.stage, seen.action.microbatch) == (told.stage, told.microbatch)
            before = span
    path = critical_path(result.trace, causes)
    assert path[0].start == 0
    assert path[-1].end == pytest.approx(result.makespan)
    gaps = [b.start - a.end for a, b in pairwise(path)]
    assert all(math.isclose(gap, 0, abs_tol=1e-9) or gap == pytest.approx(latency) for gap in gaps)


def test_transfers_that_are_spelled_out_change_nothing_that_is_drawn() -> None:
    program = build("interleaved-1f1b", ranks=4, microbatches=8)
    costs = Costs(latency=0.3)
    plain = arrange(simulate(program, costs))
    spelled = arrange(simulate(lower(check(program)), costs))
    for name in ("action", "left", "right", "waited"):
        assert spelled.boxes[name] == plain.boxes[name]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zbv", "chimera"])
def test_a_trace_holds_what_its_program_holds(name: str) -> None:
    result = step(name)
    peaks = [max(held for _, held in line) for line in memory_lines(result.trace)]
    assert tuple(peaks) == result.peak_in_flight
    assert all(line[-1][1] == 0 for line in memory_lines(result.trace))


def test_a_measured_step_begins_at_zero_and_is_drawn_in_milliseconds() -> None:
    spans = tuple(
        Span(rank=s.rank, action=s.action, start=5 + s.start / 1e3, end=5 + s.end / 1e3)
        for s in step("1f1b").trace.spans
    )
    drawing = arrange(Trace(name="1f1b", num_ranks=4, unit="s", spans=spans))
    assert drawing.boxes["left"][0] == 0
    assert drawing.end == pytest.approx(33)
    assert drawing.boxes["waited"][0] == "nothing"


def test_a_trace_without_spans_draws_nothing() -> None:
    drawing = arrange(Trace(name="x", num_ranks=2, unit="s", spans=()))
    assert (drawing.boxes["left"], drawing.path["xs"], drawing.peaks) == ([], [], (0.0, 0.0))
