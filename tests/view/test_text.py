"""The text timeline: drawn in full for a small step, and its laws for others."""

from __future__ import annotations

import pytest

from penstock import Costs, build, simulate
from penstock.schedule.action import Op, Overlap, action
from penstock.schedule.text import parse_step
from penstock.simulate.critical_path import StepCauses
from penstock.trace import Span, Trace
from penstock.view.perfetto import to_perfetto
from penstock.view.text import to_text


def trace_of(name: str, *, ranks: int, microbatches: int) -> Trace:
    return simulate(build(name, ranks=ranks, microbatches=microbatches), Costs()).trace


def test_a_lane_per_rank_a_cell_per_unit() -> None:
    drawn = """\
rank 0  F0 F1 .. .. B0 -- .. B1 --
rank 1  .. F0 B0 -- F1 B1 -- .. ..
"""
    assert to_text(trace_of("1f1b", ranks=2, microbatches=2)) == drawn


def test_labels_name_the_stage_where_ranks_hold_several() -> None:
    lanes = to_text(trace_of("zbv", ranks=2, microbatches=4), width=200).splitlines()
    assert lanes[0].startswith("rank 0  0F0 0F1 ")
    assert lanes[1].startswith("rank 1  ... 1F0 2F0 ")


def test_every_action_is_there_once() -> None:
    trace = trace_of("interleaved-1f1b", ranks=2, microbatches=4)
    cells = to_text(trace, width=400).split()
    labels = [cell for cell in cells if cell[0].isdigit() and cell[1:2].isalpha()]
    assert sorted(labels) == sorted(str(s.action) for s in trace.spans)


def test_without_room_for_labels_a_cell_is_a_letter() -> None:
    drawn = """\
rank 0  FF..BB.BB
rank 1  .FBBFBB..
"""
    assert to_text(trace_of("1f1b", ranks=2, microbatches=2), width=25) == drawn


@pytest.mark.parametrize("width", [20, 40, 97])
def test_no_line_exceeds_the_width(width: int) -> None:
    text = to_text(trace_of("gpipe", ranks=3, microbatches=40), width=width)
    assert max(map(len, text.splitlines())) == width


def test_a_measured_trace_starts_at_its_first_span() -> None:
    spans = (
        Span(rank=0, action=action(0, Op.FORWARD, 0), start=7.5, end=7.75),
        Span(rank=0, action=action(0, Op.FULL_BACKWARD, 0), start=8.0, end=8.25),
    )
    assert to_text(Trace(name="x", num_ranks=1, unit="s", spans=spans)) == "rank 0  F0 .. B0\n"


def test_ranks_without_a_span_keep_their_lane() -> None:
    assert to_text(Trace(name="x", num_ranks=2, unit="s", spans=())).count("rank") == 2


def test_a_width_without_room_for_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 5, expected at least 20"):
        to_text(trace_of("gpipe", ranks=1, microbatches=1), width=5)


def test_parts_of_a_block_are_joined() -> None:
    trace = trace_of("dualpipev", ranks=2, microbatches=4)
    assert " 0F3+3B1 --- " in to_text(trace, width=200)
    assert to_text(trace, width=200).count("+") == len(trace.overlapped_pairs) == 6
    assert "F+B." in to_text(trace, width=60)


def test_copies_have_lanes_below_their_ranks() -> None:
    program = build("po-f", ranks=2, virtual=1, microbatches=3)
    trace = simulate(program, Costs(offload=2, reload=1)).trace
    lanes = to_text(trace, width=200).splitlines()
    assert [lane[:9].strip() for lane in lanes] == ["rank 0", "to host", "back", "rank 1"]
    computed, away, back = (lane[9:].split() for lane in lanes[:3])
    assert len(computed) == len(away) == len(back)
    assert away[away.index("O1") + 1] == "--"
    for number in "12":
        places = (
            computed.index("F" + number),
            away.index("O" + number),
            back.index("R" + number),
            computed.index("I" + number),
        )
        assert list(places) == sorted(set(places))
    assert len(to_text(simulate(program).trace).splitlines()) == 2


def test_actions_that_overlap_are_both_seen() -> None:
    """The longer one, begun first, goes on after the other has ended."""
    times = {action(0, Op.FORWARD, 0): (0, 1), action(0, Op.FORWARD, 1): (1, 6)}
    times |= {action(0, Op.FULL_BACKWARD, 0): (2, 3), action(0, Op.FULL_BACKWARD, 1): (6, 7)}
    spans = tuple(Span(rank=0, action=a, start=s, end=e) for a, (s, e) in times.items())
    pair = parse_step("(0F1;0B0)OVERLAP_F_B")
    assert isinstance(pair, Overlap)
    spans = tuple(sorted(spans, key=lambda span: span.start))
    trace = Trace(name="x", num_ranks=1, unit="s", spans=spans, overlapped_pairs=(pair,))
    assert to_text(trace) == "rank 0  F0 F1+B0+F1 -- -- B1\n"
    last = spans[-1]
    assert StepCauses(trace).cause(last) == spans[1]


def test_a_simulation_is_drawn_by_its_trace() -> None:
    result = simulate(build("1f1b", ranks=2, microbatches=2), Costs())
    assert to_text(result) == to_text(result.trace)
    assert to_perfetto(result) == to_perfetto(result.trace)
