"""Where stages lie, which are neighbours, and which microbatches pass them."""

from typing import Any

import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, action
from penstock.schedule.check import problems
from penstock.schedule.placement import Placement, bidirectional, linear, looped, v_shape, wave
from penstock.schedule.program import Program
from penstock.schedule.registry import build
from penstock.schedule.text import format_csv, parse_csv
from tests.programs import placements
from tests.readiness import prerequisites


def test_shapes() -> None:
    assert linear(3).stage_ranks == (0, 1, 2)
    assert looped(2, 2).stage_ranks == (0, 1, 0, 1)
    assert v_shape(2).stage_ranks == (0, 1, 1, 0)
    assert wave(2, 2).stage_ranks == (0, 1, 1, 0, 0, 1, 1, 0)
    assert bidirectional(2) == Placement(num_ranks=2, stage_ranks=(0, 1, 1, 0), num_directions=2)


def test_any_sequence_of_ranks_is_kept_as_a_tuple() -> None:
    placement = Placement(num_ranks=2, stage_ranks=[0, 1, 1, 0])  # type: ignore[arg-type]
    assert placement == v_shape(2) and hash(placement) == hash(v_shape(2))


@pytest.mark.parametrize(
    ("num_ranks", "stage_ranks", "copies", "message"),
    [
        (0, (), 1, "on 0 ranks: ranks without a stage"),
        (-1, (), 1, "on -1 ranks: ranks without a stage"),
        (2, 0, 1, "ranks 0, num_ranks=2, num_directions=1: expected a rank for each stage"),
        (
            2,
            (0, 1.0),
            1,
            r"ranks \(0, 1.0\), num_ranks=2, num_directions=1: expected a rank for each",
        ),
        ("2", (0, 1), 1, "num_ranks='2', num_directions=1: expected a rank for each stage"),
        (2, (0, 1), "1", "num_ranks=2, num_directions='1': .* and whole numbers"),
        (2, (0, 1), 1.0, "num_ranks=2, num_directions=1.0: .* and whole numbers"),
    ],
)
def test_invalid_placements_are_refused(
    num_ranks: Any, stage_ranks: Any, copies: Any, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        Placement(num_ranks=num_ranks, stage_ranks=stage_ranks, num_directions=copies)


def test_a_model_in_two_directions() -> None:
    placement = bidirectional(4)
    assert (placement.num_stages, placement.num_model_stages) == (8, 4)
    assert [placement.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [placement.model_stage(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (placement.entries, placement.exits) == ((0, 4), (3, 7))
    assert [placement.passes(m, 3) for m in range(4)] == [True, False, True, False]
    assert [placement.passes(m, 4) for m in range(4)] == [False, True, False, True]


@given(placements())
def test_neighbours_follow_the_model_within_a_copy(placement: Placement) -> None:
    for copy in range(placement.num_directions):
        stage, path = placement.entries[copy], []
        while True:
            path.append(stage)
            after = placement.neighbour(stage, +1)
            if after is None:
                break
            assert placement.neighbour(after, -1) == stage
            stage = after
        assert stage == placement.exits[copy]
        assert [placement.model_stage(s) for s in path] == list(range(placement.num_model_stages))
        assert {placement.direction_of(s) for s in path} == {copy}
        assert placement.neighbour(path[0], -1) is None


def test_the_first_stage_of_a_copy_waits_for_nothing() -> None:
    placement = bidirectional(2)
    assert prerequisites(action(2, Op.FORWARD, 1), placement) == ()
    assert prerequisites(action(1, Op.INPUT_GRAD, 0), placement) == (action(1, Op.FORWARD, 0),)


@pytest.mark.parametrize("copies", [0, 2, 3])
def test_copies_have_as_many_stages_each(copies: int) -> None:
    with pytest.raises(ScheduleError, match=f"7 stages can't be {copies} copies of a model"):
        Placement(num_ranks=7, stage_ranks=tuple(range(7)), num_directions=copies)


def chimera() -> Program:
    return build("chimera", ranks=2, microbatches=4)


def test_copies_are_seen_in_a_csv() -> None:
    program = chimera()
    assert parse_csv(format_csv(program), name="chimera") == program
    one_way = build("zbv", ranks=2, microbatches=4)
    assert parse_csv(format_csv(one_way)).placement.num_directions == 1


def test_a_microbatch_in_the_wrong_direction_is_reported() -> None:
    program = chimera()
    swapped = (*program.ranks[0][:-1], action(0, Op.FULL_BACKWARD, 3))
    wrong = Program(
        name="wrong",
        placement=program.placement,
        num_microbatches=4,
        ranks=(swapped, program.ranks[1]),
    )
    (problem,) = problems(wrong)
    assert problem.message == "microbatch 3; B of stage 0 takes one of 0, 2"


def test_each_copy_takes_a_microbatch() -> None:
    steps = (action(0, Op.FORWARD, 0),)
    lonely = Program(
        name="lonely",
        placement=Placement(num_ranks=1, stage_ranks=(0, 0), num_directions=2),
        num_microbatches=1,
        ranks=(steps,),
    )
    (problem,) = problems(lonely)
    assert problem.message.startswith("1 microbatch for 2 copies of the model")
