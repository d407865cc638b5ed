"""One sequence of all ranks' steps: complete, in order, and without a wait."""

from __future__ import annotations

import pytest
from hypothesis import given

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.check import global_order
from penstock.schedule.passes import lower
from penstock.schedule.program import Program
from penstock.schedule.rules import COVERS
from penstock.schedule.text import parse_csv
from tests.programs import computed_programs
from tests.readiness import prerequisites


@given(computed_programs(max_splits=3))
def test_every_step_comes_after_all_that_it_needs(program: Program) -> None:
    for played in (program, lower(program)):
        order = global_order(played)
        for rank, steps in enumerate(played.ranks):
            assert tuple(step for at, step in order if at == rank) == steps
        done: set[Action] = set()
        for _, step in order:
            for act in step.parts:
                # Posting a receive needs nothing; a send is told apart below.
                if act.op not in (Op.RECV_F, Op.RECV_B):
                    needed = prerequisites(
                        act,
                        played.placement,
                        transfers=played.has_transfers,
                        num_splits=played.num_splits,
                    )
                    assert done.issuperset(needed)
                if act.op is Op.SEND_F:
                    assert action(act.stage + 1, Op.RECV_F, act.microbatch) in done
                if act.op is Op.SEND_B:
                    assert action(act.stage - 1, Op.RECV_B, act.microbatch) in done
            for act in step.parts:
                covered = COVERS.get(act.op, ())
                done |= {act, *(action(act.stage, op, act.microbatch) for op in covered)}


def test_a_rank_goes_as_far_as_it_can() -> None:
    order = global_order(lower(parse_csv("0F0,0F1\n1F0,1F1\n")))
    assert " ".join(f"{rank}:{step}" for rank, step in order) == (
        "0:0F0 1:1RECV_F0 1:1RECV_F1 0:0SEND_F0 0:0F1 0:0SEND_F1 1:1F0 1:1F1"
    )


def test_a_program_with_problems_has_no_order() -> None:
    with pytest.raises(ScheduleError, match="has a problem"):
        global_order(parse_csv("0B0,0F0\n"))
