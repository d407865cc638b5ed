"""What a message that comes says about those that were sent: never more than is so."""

from __future__ import annotations

import pytest
from hypothesis import given

from penstock.schedule.action import Action, Op, action
from penstock.schedule.check import global_order
from penstock.schedule.family import Family
from penstock.schedule.index import acknowledgements
from penstock.schedule.passes import lower
from penstock.schedule.program import Program
from penstock.schedule.registry import build, schedules
from tests.programs import computed_programs


def told(program: Program, rank: int) -> dict[str, int]:
    return {str(act): count for act, count in acknowledgements(program, rank).items()}


def test_1f1b_knows_all_but_what_is_in_flight() -> None:
    program = lower(build("1f1b", ranks=3, microbatches=4))
    #   rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    #   rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    assert told(program, 0) == {"0B0": 2, "0B1": 3, "0B2": 4, "0B3": 4}
    assert told(program, 2) == {"2F0": 0, "2F1": 0, "2F2": 1, "2F3": 2}


def test_gpipe_knows_nothing_until_the_first_gradient_and_then_all() -> None:
    program = lower(build("gpipe", ranks=2, microbatches=3))
    assert told(program, 0) == {"0B0": 3, "0B1": 3, "0B2": 3}


@pytest.mark.parametrize("each", schedules(), ids=lambda each: each.name)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_acknowledgements_hold_in_every_schedule(each: Family, ranks: int) -> None:
    ranks, microbatches = each.nearest(ranks, 7)
    check_told(lower(build(each.name, ranks=ranks, microbatches=microbatches)))


@given(program=computed_programs(max_ranks=4, max_stages=6, max_microbatches=4, max_splits=2))
def test_acknowledgements_hold_in_any_program(program: Program) -> None:
    check_told(lower(program))


def check_told(program: Program) -> None:
    """A message counted as arrived is one whose consumer the waiting action depends on.

    The dependencies are followed through the program itself: rank order, and each message.
    """
    placement, where = program.placement, places(program)
    for rank, steps in enumerate(program.ranks):
        sent: dict[int, list[Action]] = {}
        for act in (a for step in steps for a in step.parts):
            if act.op in (Op.SEND_F, Op.SEND_B):
                offset = 1 if act.op is Op.SEND_F else -1
                sent.setdefault(placement.rank_of(act.stage + offset), []).append(act)
        for act, count in acknowledgements(program, rank).items():
            peer = source_rank(act, program)
            ancestors = everything_before(act, program, where)
            for send in sent.get(peer, [])[:count]:
                # Some later or equal message of that edge was consumed before `act` could be.
                position = sent[peer].index(send)
                assert any(consumer(s) & ancestors for s in sent[peer][position:]), (act, send)


def source_rank(act: Action, program: Program) -> int:
    offset = -1 if act.op is Op.FORWARD else 1
    return program.placement.rank_of(act.stage + offset)


def consumer(send: Action) -> set[Action]:
    if send.op is Op.SEND_F:
        return {action(send.stage + 1, Op.FORWARD, send.microbatch)}
    kinds = (Op.FULL_BACKWARD, Op.INPUT_GRAD)
    return {action(send.stage - 1, op, send.microbatch) for op in kinds}


def places(program: Program) -> dict[Action, tuple[int, int]]:
    """Of each action, its rank and the number of its step."""
    ranks = enumerate(program.ranks)
    return {a: (rank, i) for rank, steps in ranks for i, st in enumerate(steps) for a in st.parts}


def everything_before(
    act: Action, program: Program, steps: dict[Action, tuple[int, int]]
) -> set[Action]:
    """All actions that end before ``act`` can begin, whatever the ranks' speeds."""
    found: set[Action] = set()
    todo = [act]
    while todo:
        now = todo.pop()
        rank, index = steps[now]
        # The step before, which has others before it.
        before = [a for step in program.ranks[rank][max(0, index - 1) : index] for a in step.parts]
        if now.op is Op.FORWARD and now.stage > 0:
            before.append(action(now.stage - 1, Op.SEND_F, now.microbatch))
        if now.op in (Op.FULL_BACKWARD, Op.INPUT_GRAD):
            before.append(action(now.stage + 1, Op.SEND_B, now.microbatch))
        for each in before:
            if each in steps and each not in found:
                found.add(each)
                todo.append(each)
    return found


def test_the_order_of_one_process_agrees() -> None:
    # A sanity check of the helper above: what comes before in every order comes before in one.
    program = lower(build("interleaved-1f1b", ranks=2, microbatches=3))
    place = {a: i for i, (_, st) in enumerate(global_order(program)) for a in st.parts}
    for act in acknowledgements(program, 0):
        assert all(place[b] < place[act] for b in everything_before(act, program, places(program)))
