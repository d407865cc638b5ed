"""Messages in turn, copies beside the compute, and what is read off the times."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.passes import lower, offload
from penstock.schedule.placement import linear
from penstock.schedule.program import Program
from penstock.schedule.registry import build
from penstock.schedule.rules import COMPUTE
from penstock.schedule.text import parse_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import Simulation, simulate
from penstock.trace import Span
from tests.programs import computed_programs

KINDS = {op.value: op for op in Op}


def one_rank(text: str, microbatches: int) -> Program:
    steps = tuple(action(0, KINDS[word[:-1]], int(word[-1])) for word in text.split())
    return Program(name="test", placement=linear(1), num_microbatches=microbatches, ranks=(steps,))


def cause_of(result: Simulation, span: Span) -> Action | None:
    cause = result.causes.cause(span)
    return None if cause is None else cause.action


SENDING = parse_csv("0F0,0F1,0F2\n1F0,1F1,1F2\n")


@pytest.mark.parametrize("spelled_out", [False, True])
@pytest.mark.parametrize(
    ("switches", "first", "second"),
    [
        # F ends at 1, 2, 3; a message takes 2, and 0.5 more to arrive.
        ({}, (1, 2, 3), (4.5, 5.5, 6.5)),
        ({"one_message_at_a_time": True}, (1, 2, 3), (4.5, 6.5, 8.5)),
        ({"transfers_overlap": False}, (1, 4, 7), (4.5, 7.5, 10.5)),
    ],
)
def test_messages_take_their_bytes_time(
    switches: dict[str, bool],
    first: tuple[float, ...],
    second: tuple[float, ...],
    spelled_out: bool,
) -> None:
    costs = Costs(message_bytes=[6, 0], bandwidth=3, latency=0.5, **switches)  # type: ignore[arg-type]
    result = simulate(lower(SENDING) if spelled_out else SENDING, costs)
    ends = [[span.end for span in result.trace.compute(rank)] for rank in (0, 1)]
    assert ends == [list(first), list(second)]
    assert result.busy_per_rank == (3, 3)


@given(computed_programs(max_ranks=3, max_splits=3), st.booleans(), st.booleans())
def test_messages_in_turn_are_never_earlier(program: Program, overlap: bool, in_turn: bool) -> None:
    costs = Costs(message_bytes=1, bandwidth=4, latency=0.25)
    held_up = Costs(
        message_bytes=1,
        bandwidth=4,
        latency=0.25,
        transfers_overlap=overlap,
        one_message_at_a_time=in_turn,
    )
    plain, slower = simulate(program, costs), simulate(program, held_up)
    for early, late in zip(plain.ends, slower.ends, strict=True):
        assert len(early) == len(late)
        assert all(a <= b for a, b in zip(early, late, strict=True))
    # Where sends are spelled out at once after what they send, nothing is different.
    spelled = simulate(lower(program), held_up)
    for rank in range(program.num_ranks):
        assert [s.end for s in spelled.trace.compute(rank)] == [
            s.end for s in slower.trace.compute(rank)
        ]


@given(
    computed_programs(max_ranks=3, max_splits=3), st.integers(0, 3), st.booleans(), st.booleans()
)
def test_the_critical_path_has_no_gap_but_messages(
    program: Program, latency: int, overlap: bool, in_turn: bool
) -> None:
    costs = Costs(
        forward=2,
        latency=latency,
        message_bytes=1,
        bandwidth=2,
        transfers_overlap=overlap,
        one_message_at_a_time=in_turn,
    )
    result = simulate(program, costs)
    path = result.critical_path
    assert path[0].start == 0
    assert path[-1].end == result.makespan
    for one, two in pairwise(path):
        if one.rank != two.rank and result.causes.cause(two) == one:
            assert one.end + latency <= two.start
        assert one.start <= two.start
    lowered = simulate(lower(program), costs)
    assert {s.action for s in path} == {s.action for s in lowered.critical_path}


def test_a_block_waits_for_its_last_arrival_not_for_the_last_message_made() -> None:
    program = parse_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n2F0,2B0,2F1,2B1\n")
    # 2B0 is done at 19 and there at 24; 0F1 is done, and there, at 20.
    result = simulate(program, Costs(forward=[10, 1, 1], latency=[0, 5, 0]))
    (forward,) = (span for span in result.trace.spans if span.action == action(1, Op.FORWARD, 1))
    assert forward.start == 24
    assert str(cause_of(result, forward)) == "2B0"


def test_causes_of_waits() -> None:
    result = simulate(build("1f1b", ranks=2, microbatches=2))
    causes = {str(s.action): str(cause_of(result, s)) for s in result.trace.spans}
    assert causes == {
        "0F0": "None",
        "0F1": "0F0",
        "0B0": "1B0",
        "0B1": "1B1",
        "1F0": "0F0",
        "1B0": "1F0",
        "1F1": "1B0",
        "1B1": "1F1",
    }
    assert [str(s.action) for s in result.critical_path] == [
        "0F0",
        "1F0",
        "1B0",
        "1F1",
        "1B1",
        "0B1",
    ]


@given(computed_programs(max_splits=3))
def test_the_curve_of_memory_agrees_with_the_count(program: Program) -> None:
    result = simulate(program)
    assert result.peak_bytes == result.peak_in_flight
    for curve in result.memory:
        times = [time for time, _ in curve]
        assert times == sorted(times)
        assert curve[-1][1] == 0


def test_memory_over_time_in_bytes() -> None:
    program = one_rank("F0 F1 I0 W0 I1 W1", 2)
    result = simulate(program, Costs(activation_bytes=8, weight_grad_bytes=2))
    assert result.memory == (((0, 0), (0, 8), (1, 16), (3, 10), (4, 8), (5, 2), (6, 0)),)
    assert result.peak_bytes == (16,)


def test_recomputation_holds_little_and_takes_a_second_forward() -> None:
    program = one_rank("F0 F1 RECOMPUTE0 B0 RECOMPUTE1 B1", 2)
    result = simulate(program, Costs(activation_bytes=8, recompute_bytes=1, recompute=0.5))
    assert result.makespan == 7
    assert result.memory == (((0, 0), (0, 8), (1, 9), (2, 9), (4.5, 8), (7, 0)),)
    assert simulate(program).makespan == 8


def test_copies_run_beside_the_compute_and_the_backward_waits_for_them() -> None:
    program = one_rank("F0 OFFLOAD0 F1 F2 B2 RELOAD0 B1 B0", 3)
    costs = Costs(activation_bytes=8, offload=2, reload=5)
    result = simulate(program, costs)
    times = {str(s.action): (s.start, s.end) for s in result.trace.spans}
    assert times["0OFFLOAD0"] == (1, 3)
    assert times["0F1"] == (1, 2)
    assert times["0RELOAD0"] == (5, 10)
    assert times["0B1"] == (5, 7)
    assert times["0B0"] == (10, 12)
    assert result.busy == 9
    assert result.peak_bytes == (24,)
    last = result.trace.spans[-1]
    assert str(cause_of(result, last)) == "0RELOAD0"


def test_a_deadlock_is_worded_alike_whatever_messages_take() -> None:
    program = parse_csv("0F0,0B0\n1B0,1F0\n")
    costs = Costs(message_bytes=1, bandwidth=1, one_message_at_a_time=True)
    with pytest.raises(ScheduleError, match=r"rank 0, step 1 \(0B0\): deadlock: waits for 1B0"):
        simulate(program, costs)


def test_idle_shares_per_rank() -> None:
    result = simulate(build("1f1b", ranks=2, microbatches=2), Costs(forward=[1, 2]))
    assert result.bubble_per_rank == tuple(1 - b / result.makespan for b in result.busy_per_rank)
    assert sum(result.bubble_per_rank) / 2 == pytest.approx(result.bubble_ratio)
    assert all(span.action.op in COMPUTE for span in result.critical_path)


def test_copies_wait_for_each_other_on_the_critical_path() -> None:
    """0B2 for its reload, which follows the two before it; the first of them an offload of 0F0."""
    program = offload(build("gpipe", ranks=1, microbatches=3))
    result = simulate(program, Costs(forward=1, input_grad=1, weight_grad=1, offload=4, reload=5))
    assert [str(span.action) for span in result.critical_path] == ["0F0", "0B2"]
    assert result.makespan == 1 + 4 + 3 * 5 + 2
