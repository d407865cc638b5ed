"""The text form: what is written is read back; what can't be read is named with its place."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action as TorchAction

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Overlap, action
from penstock.schedule.passes import lower
from penstock.schedule.placement import Placement, linear, v_shape
from penstock.schedule.program import Program
from penstock.schedule.text import (
    format_csv,
    load_csv,
    parse_action,
    parse_csv,
    parse_step,
    save_csv,
)
from tests.programs import computed_programs

EVERY_STEP = {
    "0F1": action(0, Op.FORWARD, 1),
    "3B0": action(3, Op.FULL_BACKWARD, 0),
    "1I2": action(1, Op.INPUT_GRAD, 2),
    "1W2": action(1, Op.WEIGHT_GRAD, 2),
    "2SEND_F0": action(2, Op.SEND_F, 0),
    "3RECV_F0": action(3, Op.RECV_F, 0),
    "12SEND_B345": action(12, Op.SEND_B, 345),
    "11RECV_B345": action(11, Op.RECV_B, 345),
    "0UNSHARD": action(0, Op.UNSHARD),
    "0RESHARD": action(0, Op.RESHARD),
    "0REDUCE_GRAD": action(0, Op.REDUCE_GRAD),
    "(0F3;1B2)OVERLAP_F_B": Overlap(
        parts=(action(0, Op.FORWARD, 3), action(1, Op.FULL_BACKWARD, 2))
    ),
    "(0F3;1I2;1W2)OVERLAP_F_B": Overlap(
        parts=(
            action(0, Op.FORWARD, 3),
            action(1, Op.INPUT_GRAD, 2),
            action(1, Op.WEIGHT_GRAD, 2),
        )
    ),
}


@pytest.mark.parametrize("text", EVERY_STEP)
def test_every_kind_of_step_is_read_and_written(text: str) -> None:
    assert parse_step(text) == EVERY_STEP[text]
    assert str(EVERY_STEP[text]) == text
    assert parse_step(f"  {text}\t") == EVERY_STEP[text]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not an action"),
        ("0F1x", "is not an action"),
        ("0F1 0F2", "is not an action"),
        ("0F-1", "is not an action"),
        ("-1F0", "is not an action"),
        ("0G1", "is not an action"),
        ("0f1", "is not an action"),
        ("F1", "is not an action"),
        ("\u0663F1", "is not an action"),
        ("0F", "is not an action"),
        ("4SEND_B", "is not an action"),
        ("0UNSHARD1", "is not an action"),
        ("(0F3;1B2)", "is not an overlapped pair"),
        ("(0F3;1B2", "is not an overlapped pair"),
        ("(0F3;1B2)OVERLAP_F_B2", "is not an overlapped pair"),
        ("(0F3;1B2)OVERLAP_F_B 1W2", "is not an overlapped pair"),
        ("()OVERLAP_F_B", "'' is not an action"),
        ("(0F3;)OVERLAP_F_B", "'' is not an action"),
        ("((0F3;1B2)OVERLAP_F_B;0F4)OVERLAP_F_B", "is not an overlapped pair"),
    ],
)
def test_incomplete_steps_are_an_error(text: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_step(text)
    assert told in str(caught.value)


def test_a_block_is_no_action() -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action("(0F3;1B2)OVERLAP_F_B")


@given(computed_programs(max_splits=3))
def test_reading_inverts_writing(program: Program) -> None:
    for written in (program, lower(program, sharding=True)):
        # A program without transfers may leave the last microbatches to be guessed; say all.
        assert (
            parse_csv(
                format_csv(written),
                num_microbatches=written.num_microbatches,
                placement=written.placement,
                num_splits=written.num_splits,
                name=written.name,
            )
            == written
        )
        # Each stage computes each microbatch, so all of it can be seen from the text.
        splits = written.num_splits
        assert parse_csv(format_csv(written), num_splits=splits, name=written.name) == written


def test_idle_cells_and_both_kinds_of_line_ends_are_read() -> None:
    program = parse_csv('0F0, ,0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,"",\r\n\r\n')
    assert format_csv(program) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert program.placement == linear(2)
    assert program.num_microbatches == 2


def test_the_placement_is_inferred_from_the_computations() -> None:
    assert parse_csv("0F0,3F0\n1F0,2F0\n").placement == v_shape(2)


def test_a_placement_with_idle_ranks_in_the_text_is_kept() -> None:
    program = Program(name="csv", placement=linear(3), num_microbatches=1, ranks=((), (), ()))
    assert format_csv(program) == "\n\n\n"
    assert parse_csv("\n\n\n", placement=linear(3), num_microbatches=1) == program


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2, column 2: '1X0' is not an action"),
        ("0F0,,0F1 junk\n", "row 1, column 3: '0F1 junk'"),
        ("0F0\n0F1\n", "stage 0 is computed in row 1 and in row 2"),
        ("0F0\n2F0\n", "stages 1 are computed nowhere"),
        ("0F0\n\n1F0\n", "placement (0, 2) on 3 ranks: ranks without a stage [1]"),
        ("", "no steps: stages 0 are computed nowhere"),
        ("\n\n", "no steps"),
        ('"0F0', "row 1: not CSV (unexpected end of data); steps need no quotes"),
        ('0F0\n"1F0"x', "row 2: not CSV (',' expected after '\"'); steps need no quotes"),
    ],
)
def test_malformed_programs_are_an_error_with_a_place(text: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(text)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("text", ["0F0\n", "0F0\n1F0\n2F0\n"])
def test_rows_are_as_many_as_ranks(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"rows?; the placement has 2 ranks"):
        parse_csv(text, placement=linear(2))


def test_a_file_gives_its_name_and_says_where_it_is_wrong(tmp_path: Path) -> None:
    program = parse_csv("0F0,0B0\n1F0,1B0\n", name="mine")
    save_csv(program, tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv").read_bytes() == b"0F0,0B0\n1F0,1B0\n"
    assert load_csv(tmp_path / "mine.csv") == program
    alike = load_csv(tmp_path / "mine.csv", num_microbatches=1, placement=linear(2), num_splits=1)
    assert alike == program

    (tmp_path / "wrong.csv").write_text("0F0,0Q0\n")
    with pytest.raises(ScheduleError) as caught:
        load_csv(tmp_path / "wrong.csv")
    place = f"{tmp_path / 'wrong.csv'}: row 1, column 2: '0Q0'"
    assert str(caught.value).startswith(place)
    assert (caught.value.rank, caught.value.action) == (0, "0Q0")

    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="not a text file in UTF-8"):
        load_csv(tmp_path / "binary.csv")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "marked.csv").write_text("0F0\n", encoding="utf-8-sig")
    assert format_csv(load_csv(tmp_path / "marked.csv")) == "0F0\n"


@given(computed_programs())
def test_torch_reads_our_files_and_we_read_torchs(program: Program) -> None:
    for act in EVERY_STEP:
        assert str(parse_step(str(TorchAction.from_str(act)))) == act
    for line in format_csv(lower(program, sharding=True)).splitlines():
        for cell in line.split(","):
            theirs = TorchAction.from_str(cell)
            ours = parse_step(cell)
            assert str(theirs) == cell
            parts = theirs.sub_actions or (theirs,)
            assert [
                (a.stage_index, a.computation_type.value, a.microbatch_index) for a in parts
            ] == [(a.stage, a.op.value, a.microbatch) for a in ours.parts]


def test_placement_given_and_placement_seen_may_differ_in_nothing_but_trust() -> None:
    other = Placement(num_ranks=2, stage_ranks=(1, 0))
    # Reading does not judge: the checker says that both stages are on the wrong rank.
    assert parse_csv("0F0\n1F0\n", placement=other).placement == other


@given(computed_programs(), st.data())
def test_the_files_that_torch_writes_are_read(program: Program, data: st.DataObject) -> None:
    # As torch does it: actions and None for idle time, handed to the csv module.
    file = io.StringIO()
    writer = csv.writer(file)
    for steps in program.ranks:
        row: list[TorchAction | None] = [TorchAction.from_str(str(step)) for step in steps]
        for _ in range(data.draw(st.integers(0, 3))):
            row.insert(data.draw(st.integers(0, len(row))), None)
        writer.writerow(row)
    assert parse_csv(file.getvalue(), name=program.name) == program


@pytest.mark.parametrize("text", ["0F30000000,0B0\n", "99999999F0,99999999B0\n"])
def test_a_number_far_beyond_the_text_is_refused_at_once(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"\d+ (stages|microbatches) in a program of 2 "):
        parse_csv(text)


@pytest.mark.parametrize(("stage", "kind"), [(901, np.int64), (902, np.uint8), (903, bool)])
def test_actions_hold_plain_integers(stage: int, kind: Callable[[int], Any]) -> None:
    """A schedule may count by NumPy; an action that it makes first is every schedule's."""
    for number in (0, 1):
        made = action(stage, Op.FORWARD, kind(number))
        assert str(made) == f"{stage}F{number}"
        assert type(made.microbatch) is int
        assert action(stage, Op.FORWARD, number) is made
