"""``simulate``: against a slow simulation that is right by inspection, and case by case."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Overlap, Step, action
from penstock.schedule.passes import lower
from penstock.schedule.placement import linear
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family, schedules
from penstock.schedule.text import parse_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate
from tests.programs import computed_programs
from tests.simulate.slow_simulation import slowly

COST = st.integers(0, 9).map(lambda quarters: quarters / 4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, Costs]:
    """A program of any family, and any costs per stage."""
    name = draw(st.sampled_from([each.name for each in schedules()]))
    ranks, microbatches = family(name).nearest(draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    program = build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        virtual=draw(st.sampled_from((family(name).virtuals or (1, 2, 3))[:3])),
    )
    per_stage = st.lists(COST, min_size=program.num_stages, max_size=program.num_stages)
    return program, Costs(
        forward=draw(per_stage),
        input_grad=draw(per_stage),
        weight_grad=draw(per_stage),
        latency=draw(per_stage),
        overlap=draw(st.none() | per_stage),
    )


@settings(deadline=None, max_examples=60)
@given(cases())
def test_times_are_those_of_a_simulation_that_is_right_by_inspection(
    case: tuple[Program, Costs],
) -> None:
    program, costs = case
    expected, result = slowly(program, costs), simulate(program, costs)
    for rank, steps in enumerate(program.ranks):
        ends = iter(result.ends[rank])
        for step in steps:
            # Results of a pair are there at its end, which is that of its last part.
            *_, end = [next(ends) for _ in step.parts]
            assert all(end == pytest.approx(expected[part]) for part in step.parts)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_spelling_out_the_transfers_changes_no_time(case: tuple[Program, Costs]) -> None:
    program, costs = case
    plain, lowered = simulate(program, costs), simulate(lower(program), costs)
    for rank in range(program.num_ranks):
        spans = [(span.action, span.start, span.end) for span in plain.trace.compute(rank)]
        other = [(span.action, span.start, span.end) for span in lowered.trace.compute(rank)]
        assert spans == other
    assert lowered.messages == plain.messages
    assert lowered.makespan == plain.makespan
    assert lowered.busy == pytest.approx(plain.busy)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_no_rank_does_two_things_at_once(case: tuple[Program, Costs]) -> None:
    result = simulate(*case)
    for starts, ends in zip(result.starts, result.ends, strict=True):
        assert all(end >= start >= 0 for start, end in zip(starts, ends, strict=True))
        assert all(later >= end - 1e-9 for end, later in zip(ends, starts[1:], strict=False))


def test_the_same_simulation_twice_is_the_same() -> None:
    program = build("zbv", ranks=4, microbatches=9)
    assert simulate(program) == simulate(program)


def test_latency_is_paid_between_ranks_only() -> None:
    linear_result = simulate(build("gpipe", ranks=2, microbatches=1), Costs(latency=5))
    assert linear_result.makespan == 6 + 2 * 5
    # At the turn of a V neighbouring stages share a rank.
    v_result = simulate(build("zbv", ranks=2, microbatches=1), Costs(latency=5))
    assert v_result.makespan == simulate(build("zbv", ranks=2, microbatches=1)).makespan + 4 * 5


def test_costs_per_stage() -> None:
    costs = Costs(forward=[1, 4], input_grad=[2, 3], weight_grad=[1, 0])
    result = simulate(build("1f1b", ranks=2, microbatches=2), costs)
    assert result.ends == ((1, 2, 11, 18), (5, 8, 12, 15))


def test_a_receive_blocks_only_actions_that_need_its_message() -> None:
    program = parse_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    trace = simulate(program, Costs(latency=0.5)).trace
    times = {str(span.action): (span.start, span.end) for span in trace.spans}
    # Both receives are posted at once and end when their messages come.
    assert times["1RECV_F0"] == (0.0, 1.5)
    assert times["1RECV_F1"] == (0.0, 2.5)
    assert times["1F0"] == (1.5, 2.5)
    assert times["0SEND_F1"] == (2.0, 2.0)
    assert times["0RECV_B0"] == (2.0, 5.0)
    assert times["0B0"] == (5.0, 7.0)
    assert times["1F1"] == (4.5, 5.5)
    assert times["0RECV_B1"] == (7.0, 8.0)


def test_a_receive_posted_after_its_message_came_ends_at_once() -> None:
    program = parse_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n")
    trace = simulate(program, Costs(forward=[1, 9])).trace
    times = {str(span.action): (span.start, span.end) for span in trace.spans}
    assert times["1RECV_F1"] == (10.0, 10.0)
    assert times["1F1"] == (10.0, 19.0)


def test_actions_on_whole_stages_take_no_time() -> None:
    program = parse_csv("0UNSHARD,0F0,0B0,0RESHARD,0UNSHARD,0F1,0B1,0RESHARD,0REDUCE_GRAD\n")
    result = simulate(program)
    assert (result.makespan, result.messages, result.peak_in_flight) == (6.0, 0, (1,))
    assert result.ends[0] == (0, 1, 3, 3, 3, 4, 6, 6, 6)


def block_program(*last: Step) -> Program:
    f0, f1, b0, b1 = (action(0, op, mb) for op in (Op.FORWARD, Op.FULL_BACKWARD) for mb in (0, 1))
    return Program(
        name="test",
        placement=linear(1),
        num_microbatches=2,
        ranks=((f0, Overlap(parts=(f1, b0)), b1, *last),),
    )


def test_a_block_lasts_as_long_as_its_parts_unless_told() -> None:
    assert simulate(block_program()).ends == ((1, 2, 4, 6),)
    told = simulate(block_program(), Costs(overlap=1.5))
    # The pair runs from 1 to 2.5, of which the forward has a third as it has of the parts.
    assert told.ends == ((1, 1.5, 2.5, 4.5),)
    assert told.busy == told.makespan == 4.5
    free = simulate(block_program(), Costs(forward=0, input_grad=0, weight_grad=0, overlap=2))
    assert free.ends == ((0, 1, 2, 2),)


def test_parts_of_a_block_that_need_each_other_are_refused_as_by_check() -> None:
    f0, b0 = action(0, Op.FORWARD, 0), action(0, Op.FULL_BACKWARD, 0)
    program = Program(
        name="test",
        placement=linear(1),
        num_microbatches=1,
        ranks=((Overlap(parts=(f0, b0)),),),
    )
    with pytest.raises(ScheduleError, match="needs 0F0 before it"):
        simulate(program)


def test_no_actions_no_time() -> None:
    empty = Program(name="test", placement=linear(2), num_microbatches=1, ranks=((), ()))
    result = simulate(empty)
    assert (result.makespan, result.span, result.bubble_ratio) == (0.0, 0.0, 0.0)
    assert result.span_bubble_ratio == 0.0
    assert result.trace.spans == ()


@pytest.mark.parametrize(
    ("csv", "said"),
    [
        (
            "0F0,0B0\n1B0,1F0\n",
            r"can't go on:\n"
            r"  rank 1, step 0 \(1B0\): 1B0 needs 1F0 before it\n"
            r"  rank 0, step 1 \(0B0\): deadlock: waits for 1B0 of rank 1",
        ),
        ("0F0,0I0,0W0\n1F0,1W0\n", r"rank 1: 1I0 is missing"),
        ("0F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", r"rank 0: 0SEND_F0 is missing"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1\n", r"rank 1: 1B0 is missing"),
        ("0F0,0F0,0B0\n", r"rank 0, step 1 \(0F0\): 0F0 again, first done at step 0"),
        ("0F0,0B0,0I0\n", r"rank 0, step 2 \(0I0\): .* 0B0 "),
        # The copy and the message of the second one are due before the rank comes to it.
        (
            "0F0,0OFFLOAD0,0RELOAD0,0F1,0F2,0RELOAD0,0B0,0B1,0B2\n",
            r"rank 0, step 5 \(0RELOAD0\): 0RELOAD0 again, first done at step 2",
        ),
        ("0F0,0B0,0F0\n1F0,1B0\n", r"rank 0, step 2 \(0F0\): 0F0 again"),
    ],
)
def test_a_deadlocked_program_names_the_waiting_actions(csv: str, said: str) -> None:
    for costs in (Costs(), Costs(message_bytes=1, bandwidth=10, one_message_at_a_time=True)):
        with pytest.raises(ScheduleError, match=said):
            simulate(parse_csv(csv), costs)


def test_a_receive_without_its_send_is_named() -> None:
    program = Program(
        name="test",
        placement=linear(2),
        num_microbatches=1,
        ranks=((action(0, Op.FORWARD, 0),), (action(1, Op.RECV_F, 0),)),
    )
    with pytest.raises(ScheduleError, match="rank 0: 0SEND_F0 is missing"):
        simulate(program)


def test_a_slow_edge_delays_both_directions_and_nothing_else() -> None:
    program = build("gpipe", ranks=3, microbatches=1)

    def gaps(costs: Costs) -> list[float]:
        """How long each message is on its way: 0 to 1, 1 to 2, 2 to 1, 1 to 0."""
        starts, ends = (
            {span.action: getattr(span, at) for span in simulate(program, costs).trace.spans}
            for at in ("start", "end")
        )
        chain = [(stage, Op.FORWARD) for stage in range(3)]
        chain += [(stage, Op.FULL_BACKWARD) for stage in (2, 1, 0)]
        steps = [action(stage, op, 0) for stage, op in chain]
        found = [starts[two] - ends[one] for one, two in pairwise(steps)]
        assert found.pop(2) == 0, "a stage waits for no message from itself"
        return found

    assert gaps(Costs(latency=[0, 5, 9])) == [0, 5, 5, 0]
    assert gaps(Costs(latency=[5, 0, 9])) == [5, 0, 0, 5]
    slow = Costs(message_bytes=[0, 8, 0], bandwidth=[1, 4, 1])
    for switches in ({}, {"transfers_overlap": False}, {"one_message_at_a_time": True}):
        assert gaps(replace(slow, **switches)) == [0, 2, 2, 0]
        assert gaps(replace(slow, latency=[1, 0, 0], **switches)) == [1, 2, 2, 1]


def test_edges_between_stages_of_one_rank_delay_nothing() -> None:
    program = build("zbv", ranks=2, microbatches=3)
    assert simulate(program, Costs(latency=[0, 5, 0, 0])).trace == simulate(program).trace


@settings(deadline=None, max_examples=60)
@given(computed_programs(max_ranks=3), st.data(), st.booleans(), st.booleans())
def test_edges_as_slow_as_each_other_are_one_number(
    program: Program, data: st.DataObject, overlap: bool, in_turn: bool
) -> None:
    latency, bandwidth = data.draw(COST), data.draw(st.sampled_from([0.5, 1.0, 4.0]))
    stages = program.num_stages
    one = Costs(
        latency=latency,
        message_bytes=3,
        bandwidth=bandwidth,
        transfers_overlap=overlap,
        one_message_at_a_time=in_turn,
    )
    each = replace(one, latency=[latency] * stages, bandwidth=[bandwidth] * stages)
    for every in (program, lower(program)):
        assert simulate(every, each).trace == simulate(every, one).trace


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(latency=.* has 2 numbers, .* has 3 stages"):
        simulate(build("gpipe", ranks=3, microbatches=1), Costs(latency=[1, 2]))
