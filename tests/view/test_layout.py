"""The layout: positions of boxes, causes of their starts, memory."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from penstock import Costs, build, check, schedules, simulate
from penstock.schedule.action import Op, Overlap, action
from penstock.schedule.family import Family
from penstock.schedule.passes import lower
from penstock.schedule.rules import COMPUTE
from penstock.schedule.text import parse_csv
from penstock.simulate.simulation import Simulation
from penstock.trace import Span, Trace
from penstock.view.layout import arrange
from penstock.view.page import figures_of


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


def test_transfers_that_are_spelled_out_change_nothing_that_is_drawn() -> None:
    program = build("interleaved-1f1b", ranks=4, microbatches=8)
    costs = Costs(latency=0.3)
    plain = arrange(simulate(program, costs))
    spelled = arrange(simulate(lower(check(program)), costs))
    for name in ("action", "left", "right", "waited"):
        assert spelled.boxes[name] == plain.boxes[name]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zbv", "chimera"])
def test_a_trace_has_the_memory_of_its_program(name: str) -> None:
    result = step(name)
    drawing = arrange(result.trace)
    assert drawing.peaks == result.peak_in_flight
    # Each rank's outline ends at its foot: nothing is held after the step.
    levels = [y for y, after in pairwise(drawing.memory["y"]) if math.isnan(after)]
    assert [round(y % 1, 9) for y in levels] == [0.97] * 4


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "po-f", "chimera"])
def test_the_memory_of_each_rank_is_an_outline(name: str) -> None:
    result = step(name, costs=Costs(offload=0.5, reload=0.5))
    memory = arrange(result).memory
    outlines: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(memory["x"], memory["y"], strict=True):
        assert math.isnan(x) == math.isnan(y)
        if math.isnan(x):
            outlines.append([])
        else:
            outlines[-1].append((x, y))
    assert outlines.pop() == [] and len(outlines) == 4
    heights = []
    for rank, (points, line) in enumerate(zip(outlines, result.memory, strict=True)):
        assert {x for x, _ in points} == {time for time, _ in line} | {result.makespan}
        foot = points[0][1]
        assert foot == points[-1][1] and all(rank < y <= foot < rank + 1 for _, y in points)
        heights.append(foot - min(y for _, y in points))
    # The fullest rank's is the highest, and the others' are as much lower as they hold less.
    peaks = result.peak_bytes
    assert heights == pytest.approx([max(heights) * peak / max(peaks) for peak in peaks])


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


def test_pairs_have_frames_from_their_first_start_to_their_last_end() -> None:
    drawing = arrange(step("dualpipev"))
    at = drawing.boxes["action"].index("0F7")
    other = drawing.boxes["action"].index(drawing.boxes["pair"][at].split()[-1])
    frame = (drawing.boxes["left"][at], drawing.boxes["right"][other], 0)
    frames = zip(
        *(drawing.overlapped_pairs[name] for name in ("left", "right", "top")), strict=True
    )
    assert frame in [(left, right, int(top)) for left, right, top in frames]
    assert drawing.boxes["pair"][0] == ""


def test_parts_of_a_pair_that_ran_at_one_time_share_the_lane() -> None:
    forward, backward = action(0, Op.FORWARD, 1), action(0, Op.FULL_BACKWARD, 0)
    spans = (
        Span(rank=0, action=forward, start=0, end=3),
        Span(rank=0, action=backward, start=1, end=4),
    )
    pair = Overlap(parts=(forward, backward))
    trace = Trace(name="x", num_ranks=1, unit="s", spans=spans, overlapped_pairs=(pair,))
    for memory, foot in ((True, 0.62), (False, 0.92)):
        drawn = arrange(trace, memory=memory).boxes
        assert drawn["foot"][0] == drawn["top"][1]
        assert drawn["top"][0] < drawn["foot"][0] < drawn["foot"][1] == pytest.approx(foot)


def test_copies_lie_above_computations() -> None:
    drawing = arrange(step("po-f", costs=Costs(offload=0.5, reload=0.5)))
    kinds = drawing.boxes["kind"]
    tops, feet = drawing.boxes["top"], drawing.boxes["foot"]
    highest = min(top % 1 for top, kind in zip(tops, kinds, strict=True) if kind == "forward")
    reloads = [foot % 1 for foot, kind in zip(feet, kinds, strict=True) if "reload" in kind]
    offloads = [foot % 1 for foot, kind in zip(feet, kinds, strict=True) if "offload" in kind]
    assert max(offloads) < min(reloads) < highest


def test_figures_show_the_lower_bound_of_programs_with_overlapped_pairs() -> None:
    program = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert dict(figures_of([simulate(program)]))["makespan lower bound"] == "6"
    overlapped = simulate(program, Costs(overlap=1))
    assert dict(figures_of([overlapped]))["makespan lower bound"] == "2"
