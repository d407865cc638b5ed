"""Two traces side by side: scale, shifts, and what only one of them has."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, action
from penstock.schedule.registry import build
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import compare_traces
from penstock.simulate.simulation import simulate
from penstock.trace import Span, Trace
from tests.programs import computed_programs


def span(text_op: Op, microbatch: int, start: float, end: float) -> Span:
    return Span(rank=0, action=action(0, text_op, microbatch), start=start, end=end)


def trace(*spans: Span) -> Trace:
    return Trace(name="test", num_ranks=1, unit="s", spans=spans)


@given(computed_programs(max_splits=3), st.integers(1, 8))
def test_the_same_step_in_another_unit_differs_in_nothing(program: object, scale: int) -> None:
    simulated = simulate(program).trace  # type: ignore[arg-type]
    moved = replace(
        simulated,
        spans=tuple(
            replace(s, start=s.start * scale + 7, end=s.end * scale + 7) for s in simulated.spans
        ),
    )
    compared = compare_traces(moved, simulated)
    assert compared.scale == scale
    assert len(compared.rows) == len(simulated.spans)
    assert all(row.later == row.longer == 0 for row in compared.rows)
    assert compared.only_measured == compared.only_simulated == ()


def test_what_moved_and_by_how_much() -> None:
    measured = trace(span(Op.FORWARD, 0, 5, 9), span(Op.FORWARD, 1, 12, 14))
    simulated = trace(span(Op.FORWARD, 0, 0, 1), span(Op.FORWARD, 1, 1, 3))
    compared = compare_traces(measured, simulated)
    # Six seconds measured are three units simulated.
    assert compared.scale == 2
    assert [(str(r.action), r.later, r.longer) for r in compared.rows] == [
        ("0F0", 0, 2),
        ("0F1", 5, -2),
    ]
    assert [row.later for row in compare_traces(measured, simulated, scale=7).rows] == [0, 0]


def test_what_only_one_has_and_what_runs_twice() -> None:
    twice = span(Op.UNSHARD, 0, 0, 1), span(Op.UNSHARD, 0, 4, 6)
    one = trace(*twice, span(Op.FORWARD, 0, 1, 2), span(Op.SEND_F, 0, 2, 3))
    other = trace(*twice, span(Op.FORWARD, 0, 1, 2), span(Op.FORWARD, 1, 2, 3))
    compared = compare_traces(one, other)
    assert [row.later for row in compared.rows] == [0, 0, 0]
    assert [str(s.action) for s in compared.only_measured] == ["0SEND_F0"]
    assert [str(s.action) for s in compared.only_simulated] == ["0F1"]


def test_traces_with_nothing_in_common_have_no_scale() -> None:
    gpipe = simulate(build("gpipe", ranks=2, microbatches=2)).trace
    free = simulate(
        build("gpipe", ranks=2, microbatches=2), Costs(forward=0, input_grad=0, weight_grad=0)
    ).trace
    for other in (trace(), free):
        with pytest.raises(ScheduleError, match="computations in common, which take"):
            compare_traces(gpipe, other)
    assert len(compare_traces(gpipe, free, scale=1).rows) == 8
