"""Programs that split sequences: what the rules ask of the chunks, and what keeps their number."""

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, action
from penstock.schedule.check import check, problems
from penstock.schedule.passes import forward_only, lower
from penstock.schedule.placement import bidirectional, linear
from penstock.schedule.program import Program
from penstock.schedule.registry import build
from penstock.schedule.text import format_csv, parse_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate
from tests.readiness import prerequisites

SPLIT = build("seq1f1b", ranks=3, microbatches=4, splits=3)


def one_rank(text: str, num_splits: int) -> Program:
    return parse_csv(text, num_splits=num_splits)


def test_chunks_of_one_sequence_need_each_other_and_no_others() -> None:
    def needed(op: Op, chunk: int) -> list[str]:
        return [str(a) for a in prerequisites(action(0, op, chunk), linear(1), num_splits=2)]

    assert needed(Op.FORWARD, 2) == []
    assert needed(Op.FORWARD, 3) == ["0F2"]
    assert needed(Op.FULL_BACKWARD, 2) == ["0F2", "0I3"]
    assert needed(Op.INPUT_GRAD, 3) == ["0F3"]
    assert needed(Op.WEIGHT_GRAD, 2) == ["0I2"]


@pytest.mark.parametrize("text", ["0F0,0F1,0B1,0B0", "0F2,0F3,0F0,0F1,0I3,0W3,0B2,0I1,0I0,0W0,0W1"])
def test_sequences_may_go_in_any_order_and_chunks_in_theirs(text: str) -> None:
    assert problems(one_rank(text, 2)) == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F1,0F0,0B1,0B0", "0F1 needs 0F0 before it"),
        ("0F0,0F1,0B0,0B1", "0B0 needs 0B1 before it"),
        ("0F0,0F1,0I0,0W0,0I1,0W1", "0I0 needs 0I1 before it"),
    ],
)
def test_chunks_out_of_order_are_refused_by_the_checker_and_the_simulator(
    text: str, told: str
) -> None:
    assert problems(one_rank(text, 1)) == ()
    with pytest.raises(ScheduleError, match=told):
        check(one_rank(text, 2))
    with pytest.raises(ScheduleError, match="can't go on"):
        simulate(one_rank(text, 2))


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (one_rank("0F0,0F1,0F2", 2), "3 microbatches for num_splits=2"),
        (one_rank("0F0", 0), "1 microbatch for num_splits=0"),
        (
            Program(
                name="both",
                placement=bidirectional(2),
                num_microbatches=4,
                num_splits=2,
                ranks=build("chimera", ranks=2, microbatches=4).ranks,
            ),
            "the chunks of one sequence share their stages",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(program: Program, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        check(program)


def test_every_pass_and_file_keeps_the_number_of_chunks() -> None:
    lowered = lower(SPLIT, sharding=True)
    for made in (
        SPLIT,
        lowered,
        check(lowered),
        forward_only(lowered),
        parse_csv(format_csv(SPLIT), num_splits=3),
    ):
        assert made.num_splits == 3
        assert made.num_whole_microbatches == 4
        assert problems(made) == ()


def test_slow_messages_keep_chunks_in_order() -> None:
    result = simulate(SPLIT, Costs(latency=0.5))
    ends = {span.action: span.end for span in result.trace.spans}
    starts = {span.action: span.start for span in result.trace.spans}
    for act in SPLIT.actions():
        for before in prerequisites(act, SPLIT.placement, num_splits=3):
            done = (
                before
                if before in ends
                else action(before.stage, Op.FULL_BACKWARD, before.microbatch)
            )
            assert ends[done] <= starts[act]
