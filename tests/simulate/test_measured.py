"""Two traces side by side: shifts, and actions that only one of them has."""

from dataclasses import replace

from hypothesis import given

from penstock.schedule.action import Op, action
from penstock.schedule.program import Program
from penstock.simulate.measured import compare_traces
from penstock.simulate.simulation import simulate
from penstock.trace import Span, Trace
from tests.programs import computed_programs


def span(text_op: Op, microbatch: int, start: float, end: float) -> Span:
    return Span(rank=0, action=action(0, text_op, microbatch), start=start, end=end)


def trace(*spans: Span) -> Trace:
    return Trace(name="test", num_ranks=1, unit="s", spans=spans)


@given(computed_programs(max_splits=3))
def test_the_same_step_later_differs_in_nothing(program: Program) -> None:
    simulated = simulate(program).trace
    moved = replace(
        simulated,
        spans=tuple(replace(s, start=s.start + 8, end=s.end + 8) for s in simulated.spans),
    )
    rows = compare_traces(moved, simulated)
    assert len(rows) == len(simulated.spans)
    assert all(row.later == row.longer == 0 for row in rows)


def test_moved_actions_and_distances() -> None:
    measured = trace(span(Op.FORWARD, 0, 5, 9), span(Op.FORWARD, 1, 12, 14))
    simulated = trace(span(Op.FORWARD, 0, 0, 2), span(Op.FORWARD, 1, 2, 6))
    assert [(str(r.action), r.later, r.longer) for r in compare_traces(measured, simulated)] == [
        ("0F0", 0, 2),
        ("0F1", 5, -2),
    ]


def test_actions_of_one_side_and_actions_that_run_twice() -> None:
    twice = span(Op.UNSHARD, 0, 0, 1), span(Op.UNSHARD, 0, 4, 6)
    one = trace(*twice, span(Op.FORWARD, 0, 1, 2), span(Op.SEND_F, 0, 2, 3))
    other = trace(*twice, span(Op.FORWARD, 0, 1, 2), span(Op.FORWARD, 1, 2, 3))
    rows = compare_traces(one, other)
    assert [(str(row.action), row.later) for row in rows] == [
        ("0UNSHARD0", 0),
        ("0F0", 0),
        ("0UNSHARD0", 0),
    ]
