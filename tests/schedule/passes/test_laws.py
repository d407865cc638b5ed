"""What each pass promises, for any program; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as peer

from penstock.errors import ScheduleError
from penstock.schedule import passes
from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.check import check, problems
from penstock.schedule.passes import (
    forward_only,
    insert_sharding,
    insert_transfers,
    keep_microbatches,
    lower,
    offload,
    recompute,
    reduce_gradients,
)
from penstock.schedule.program import CheckedProgram, Program
from penstock.schedule.registry import build
from penstock.schedule.rules import COMPUTE, COVERS, TRANSFERS
from penstock.schedule.text import parse_csv
from tests.programs import computed_programs
from tests.readiness import prerequisites
from tests.schedule.plain_check import without_transfers

SENDS = {Op.SEND_F: Op.FORWARD, Op.SEND_B: Op.INPUT_GRAD}


def without(steps: tuple[Step, ...], ops: frozenset[Op]) -> tuple[Step, ...]:
    return tuple(step for step in steps if not any(act.op in ops for act in step.parts))


@given(computed_programs(max_splits=3), st.data())
def test_the_first_microbatches_run_in_the_same_order(
    program: Program, data: st.DataObject
) -> None:
    whole = data.draw(st.integers(program.placement.num_directions, program.num_whole_microbatches))
    num = whole * program.num_splits
    lowered = lower(program)
    kept = keep_microbatches(program, num)
    assert (kept.num_whole_microbatches, kept.num_splits) == (whole, program.num_splits)
    for steps, before in zip(kept.ranks, program.ranks, strict=True):
        acts = [act for step in steps for act in step.parts]
        all_acts = [act for step in before for act in step.parts]
        assert acts == [act for act in all_acts if act.microbatch in range(num)]
    assert problems(lower(kept)) == () == problems(keep_microbatches(lowered, num))


@given(computed_programs(max_splits=3))
def test_transfers_are_inserted_around_the_steps_as_they_are(program: Program) -> None:
    assert without_transfers(insert_transfers(program)) == program
    reduced = reduce_gradients(program)
    assert without_transfers(insert_transfers(reduced)) == reduced


@given(computed_programs(max_splits=3))
def test_a_send_stands_right_after_the_action_of_its_value(program: Program) -> None:
    for steps in insert_transfers(program).ranks:
        made: set[Action] = set()
        for step in without(steps, frozenset({Op.RECV_F, Op.RECV_B})):
            (first, *_) = step.parts
            if first.op in SENDS:
                assert action(first.stage, SENDS[first.op], first.microbatch) in made
            else:
                made = set()
                for act in step.parts:
                    covered = COVERS.get(act.op, ())
                    made |= {act, *(action(act.stage, op, act.microbatch) for op in covered)}


@given(computed_programs(max_splits=3))
def test_a_receive_is_posted_one_computing_step_ahead_or_earlier(program: Program) -> None:
    lowered = insert_transfers(program)
    for steps in lowered.ranks:
        computing = [i for i, step in enumerate(steps) if step.parts[0].op in COMPUTE]
        for k, place in enumerate(computing):
            for act in steps[place].parts:
                for needed in prerequisites(
                    act, program.placement, transfers=True, num_splits=program.num_splits
                ):
                    if needed.op in TRANSFERS:
                        assert steps.index(needed) < computing[max(k - 1, 0)]


def test_a_receive_is_hoisted_no_further_than_where_ranks_would_wait_for_each_other() -> None:
    # Rank 1 sends 2 before it computes 1 of the next: only from microbatch 2 on does rank 0, which
    # runs ahead, need a receive before that send.
    before = "0F0,0F1,0F2,0F3,3F0,3F1,3F2,3F3\n1F0,2F0,1F1,2F1,1F2,2F2,1F3,2F3\n"
    steps = insert_transfers(parse_csv(before)).ranks[1]
    text = [str(step) for step in steps]
    assert text.index("1RECV_F1") == text.index("1F0") + 1
    assert text.index("1RECV_F2") == text.index("2SEND_F0") - 1
    assert text.index("1RECV_F3") == text.index("2SEND_F1") - 1


@given(computed_programs(max_splits=3))
def test_each_stage_is_reduced_once_right_after_its_last_weight_gradient(program: Program) -> None:
    reduced = reduce_gradients(program)
    for steps, before in zip(reduced.ranks, program.ranks, strict=True):
        assert without(steps, frozenset({Op.REDUCE_GRAD})) == before
        made: list[int] = []
        for step in steps:
            (first, *_) = step.parts
            if first.op is Op.REDUCE_GRAD:
                assert first.stage in made
                made.remove(first.stage)
                # Reduced when complete: no weight gradient of it comes later.
                later = steps[steps.index(step) :]
                ops = {a.op for s in later for a in s.parts if a.stage == first.stage}
                assert not ops & {Op.FULL_BACKWARD, Op.WEIGHT_GRAD}
            else:
                made = [
                    *(a.stage for a in step.parts if a.op in (Op.FULL_BACKWARD, Op.WEIGHT_GRAD))
                ]


@given(computed_programs(max_splits=3), st.integers(1, 4), st.sampled_from(["full", "auto", 1]))
def test_no_more_stages_are_unsharded_than_allowed(
    program: Program, most: int, lookahead: Any
) -> None:
    ahead = (1,) * program.num_ranks if lookahead == 1 else lookahead
    made = insert_sharding(program, max_active_stages=most, unshard_lookahead=ahead)
    for steps, before in zip(made.ranks, program.ranks, strict=True):
        assert without(steps, frozenset({Op.UNSHARD, Op.RESHARD})) == before
        widest = max((len({a.stage for a in step.parts}) for step in before), default=0)
        present: set[int] = set()
        for place, act in [(i, act) for i, step in enumerate(steps) for act in step.parts]:
            if act.op is Op.UNSHARD:
                present.add(act.stage)
                computed = next(s for s in steps[place:] if s.parts[0].op is not Op.UNSHARD)
                assert lookahead != 1 or act.stage in {a.stage for a in computed.parts}
            elif act.op is Op.RESHARD:
                present.remove(act.stage)
            else:
                assert act.stage in present
            assert len(present) <= max(most, widest)
        assert not present


def test_a_pass_over_a_checked_program_proves_nothing() -> None:
    checked = check(parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n"))
    for made in (
        forward_only(checked),
        insert_sharding(checked),
        insert_transfers(checked),
        reduce_gradients(checked),
    ):
        assert not isinstance(made, CheckedProgram)


def test_transfers_are_not_inserted_twice() -> None:
    lowered = insert_transfers(parse_csv("0F0\n1F0\n"))
    with pytest.raises(ScheduleError, match="has RECV_F and SEND_F already; take these"):
        insert_transfers(lowered)


def test_transfers_need_a_program_that_ends() -> None:
    with pytest.raises(ScheduleError, match="1B0 needs 1F0 before it"):
        insert_transfers(parse_csv("0F0,0B0\n1B0,1F0\n"))


def test_gradients_are_not_reduced_twice() -> None:
    reduced = reduce_gradients(parse_csv("0F0,0B0\n"))
    with pytest.raises(ScheduleError, match="has REDUCE_GRAD already"):
        reduce_gradients(reduced)


def test_sharding_is_not_inserted_twice_and_allows_at_least_one_stage() -> None:
    program = parse_csv("0F0,0B0\n")
    with pytest.raises(ScheduleError, match="has RESHARD and UNSHARD already"):
        insert_sharding(insert_sharding(program))
    with pytest.raises(ScheduleError, match="max_active_stages is 0; at least 1"):
        insert_sharding(program, max_active_stages=0)
    with pytest.raises(ScheduleError, match=r"max_active_stages is 2\.5; at least 1"):
        insert_sharding(program, max_active_stages=2.5)  # type: ignore[arg-type]
    for wrong in ("most", (1, 1), (3,), (0,), (), 3, 1.0, None):
        with pytest.raises(ScheduleError, match="a number from 1 to 2, or one for each of 1 ranks"):
            insert_sharding(program, max_active_stages=2, unshard_lookahead=wrong)  # type: ignore[arg-type]
    assert insert_sharding(program, unshard_lookahead=3) == insert_sharding(program)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compares with the API of torch 2.13 to 2.15"
)
def test_gathers_are_those_of_torch() -> None:
    program = build("interleaved-1f1b", ranks=2, virtual=3, microbatches=4)
    for most in (1, 2, 3):
        made = insert_sharding(program, max_active_stages=most)
        for rank, steps in enumerate(made.ranks):
            order = [peer._Action.from_str(str(step)) for step in program.ranks[rank]]
            theirs = peer._add_unshard_reshard(order, most)
            # Torch leaves the last ones unsharded.
            assert list(map(str, steps))[: len(theirs)] == list(map(str, theirs))


# --- activations --------------------------------------------------------------------------------

KEEPING = frozenset({Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD})


@given(computed_programs(max_splits=3), st.data())
def test_activations_are_kept_otherwise_around_the_steps_as_they_are(
    program: Program, data: st.DataObject
) -> None:
    assume(any(act.op is not Op.FORWARD for act in program.actions()))
    stages = data.draw(st.sets(st.integers(0, program.num_stages - 1), min_size=1))
    others = set(range(program.num_stages)) - stages
    ahead = data.draw(st.integers(1, 4))
    changed = offload(recompute(program, stages=stages), stages=others, ahead=ahead)
    assert tuple(without(steps, KEEPING) for steps in changed.ranks) == program.ranks
    assert without_transfers(check(insert_transfers(changed))) == changed
    ops = [act.op for act in changed.actions() if act.stage in stages]
    assert ops.count(Op.RECOMPUTE) == ops.count(Op.FORWARD)
    away = [act.op for act in changed.actions() if act.op in (Op.OFFLOAD, Op.RELOAD)]
    assert away.count(Op.OFFLOAD) == away.count(Op.RELOAD)


def test_microbatches_without_a_forward_are_not_offloaded() -> None:
    """The checker says what is wrong with such a program, not the pass."""
    changed = offload(parse_csv("0F0,0F1,0F2,0B0,0B1,0B2,0B3\n1B0,1F0\n"))
    assert {str(a) for a in changed.actions() if a.op in KEEPING} == {
        f"0{op}{m}" for op in ("OFFLOAD", "RELOAD") for m in range(3)
    }


def test_offloading_without_saved_activations_is_refused() -> None:
    program = parse_csv("0F0,0F1,0B0,0B1\n")
    with pytest.raises(ScheduleError, match=r"no stages \[3\]; its stages are 0 to 0"):
        recompute(program, stages=[3])
    with pytest.raises(ScheduleError, match=r"stages \[0\] are recomputed or offloaded already"):
        offload(recompute(program))
    with pytest.raises(ScheduleError, match="no backwards"):
        recompute(forward_only(program))
    with pytest.raises(ScheduleError, match="at least 1"):
        offload(program, ahead=0)


@pytest.mark.parametrize("name", sorted({*passes.__all__} - {"keep_microbatches"}))
def test_invalid_programs_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name}\(\) takes a program, not '1f1b'"):
        getattr(passes, name)("1f1b")


@pytest.mark.parametrize("name", ["recompute", "offload"])
def test_invalid_stages_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="stages=0: expected numbers of stages"):
        getattr(passes, name)(parse_csv("0F0,0B0\n"), stages=0)
