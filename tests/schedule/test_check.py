"""The checker: every kind of problem is found, named with its place, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.check import check, global_order, problems
from penstock.schedule.passes import forward_only, lower
from penstock.schedule.placement import linear
from penstock.schedule.program import CheckedProgram, Program
from penstock.schedule.rules import COMPUTE, COVERS
from penstock.schedule.text import parse_action, parse_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate
from tests.programs import computed_programs
from tests.readiness import prerequisites
from tests.schedule.plain_channels import plays
from tests.schedule.plain_check import is_right, without_transfers
from tests.simulate.slow_simulation import slowly

# What the plain rules know.
OPS = [op for op in Op if op.value not in ("RECOMPUTE", "OFFLOAD", "RELOAD")]

# Mutations are many and each is small: thousands of them, or what the profile asks for beyond.
MANY = max(700, settings().max_examples)

# Cases parted by an empty line: what is wrong, a row per rank, then the problems found.
WRONG = re.split(r"(?<=\n)\n(?=\w)", (Path(__file__).parent / "wrong_programs.txt").read_text())


def told(text: str, *, microbatches: int | None = None, ranks: int = 2) -> list[str]:
    """The problems of a program with one stage per rank."""
    program = parse_csv(text, num_microbatches=microbatches, placement=linear(ranks))
    return [str(problem) for problem in problems(program)]


@given(computed_programs(max_splits=3))
def test_programs_drawn_by_the_rules_are_right_with_and_without_transfers(
    program: Program,
) -> None:
    assert problems(program) == ()
    assert is_right(program)
    for sharding in (False, True):
        lowered = lower(program, sharding=sharding, max_active_stages=1)
        assert problems(lowered) == ()
        assert is_right(lowered)
        assert lower(lowered, sharding=sharding) == lowered


@given(computed_programs(max_splits=3))
def test_passes_keep_programs_right(program: Program) -> None:
    lowered = lower(program, sharding=True)
    assert problems(forward_only(lowered)) == ()
    assert problems(lower(forward_only(program))) == ()
    kept = [[a for s in steps for a in s.parts if a.op is Op.FORWARD] for steps in lowered.ranks]
    assert [list(steps) for steps in forward_only(lowered).ranks] == kept


@st.composite
def mutated(draw: st.DrawFn) -> Program:
    """A right program with a few changes, which may well leave it right."""
    program = draw(computed_programs(max_ranks=3, max_stages=4, max_microbatches=3, max_splits=2))
    if draw(st.booleans()):
        program = lower(program, sharding=draw(st.booleans()), max_active_stages=1)
    ranks = [list(steps) for steps in program.ranks]
    for _ in range(draw(st.integers(1, 2))):
        mutate(draw, ranks)
    return Program(
        name="mutated",
        placement=program.placement,
        num_microbatches=program.num_microbatches,
        num_splits=program.num_splits,
        ranks=tuple(map(tuple, ranks)),
    )


def mutate(draw: st.DrawFn, ranks: list[list[Step]]) -> None:
    steps = ranks[draw(st.integers(0, len(ranks) - 1))]
    if not steps:
        return
    at = draw(st.integers(0, len(steps) - 1))
    to = draw(st.integers(0, len(steps) - 1))
    match draw(
        st.sampled_from(["swap", "next", "drop", "double", "move", "migrate", "alter", "op"])
    ):
        case "swap":
            steps[at], steps[to] = steps[to], steps[at]
        case "next":
            to = min(at + 1, len(steps) - 1)
            steps[at], steps[to] = steps[to], steps[at]
        case "drop":
            del steps[at]
        case "double":
            steps.insert(to, steps[at])
        case "move":
            steps.insert(to, steps.pop(at))
        case "migrate":
            other = ranks[draw(st.integers(0, len(ranks) - 1))]
            other.insert(draw(st.integers(0, len(other))), steps.pop(at))
        case "alter":
            parts = steps[at].parts
            changed = action(
                parts[0].stage + draw(st.integers(-1, 1)),
                parts[0].op,
                draw(st.one_of(st.none(), st.integers(-1, 3))),
            )
            step = steps[at]
            steps[at] = (
                changed if isinstance(step, Action) else Overlap(parts=(changed, *parts[1:]))
            )
        case "op":
            first = steps[at].parts[0]
            steps[at] = action(first.stage, draw(st.sampled_from(OPS)), first.microbatch)


@settings(max_examples=MANY)
@given(mutated())
def test_the_checker_and_the_plain_rules_agree_on_changed_programs(program: Program) -> None:
    found = problems(program)
    assert (found == ()) == is_right(program)
    if not found:
        assert isinstance(check(program), CheckedProgram)
        assert len(global_order(program)) == sum(map(len, program.ranks))
        is_simulated_right(program)
        return
    with pytest.raises(ScheduleError) as caught:
        check(program)
    assert str(found[0]) in str(caught.value)
    for problem in found:
        if problem.step is not None:
            assert problem.rank is not None
            assert problem.action == str(program.ranks[problem.rank][problem.step])


def is_simulated_right(program: Program) -> None:
    """What the checker lets pass does its work."""
    result, ends = simulate(program), slowly(without_transfers(program), Costs())
    spans = [span for span in result.trace.spans if span.action.op in COMPUTE]
    assert {span.action for span in spans} == {a for a in program.actions() if a.op in COMPUTE}
    for span in spans:
        # A send that was moved to later may hold up others, and nothing comes earlier for it.
        assert span.end >= ends[span.action] or in_a_block(program, span.action)
        for before in prerequisites(span.action, program.placement, num_splits=program.num_splits):
            assert any(other.end <= span.start for other in spans if does(other.action, before))


def does(act: Action, wanted: Action) -> bool:
    same = (act.stage, act.microbatch) == (wanted.stage, wanted.microbatch)
    return same and wanted.op in (act.op, *COVERS.get(act.op, ()))


def in_a_block(program: Program, act: Action) -> bool:
    return any(len(s.parts) > 1 and act in s.parts for steps in program.ranks for s in steps)


@settings(max_examples=MANY // 2)
@given(mutated())
def test_the_checker_and_plain_counting_of_messages_agree(program: Program) -> None:
    assert (problems(program) == ()) == is_right(program, plays)


def test_an_awaited_action_is_named_as_it_stands_in_the_program() -> None:
    # 0B0 needs the input gradient 1I0, and this program has it in 1B0.
    with pytest.raises(ScheduleError) as caught:
        check(parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n"))
    assert str(caught.value).splitlines()[1] == (
        "  rank 0, step 1 (0B0): deadlock: waits for 1B0 of rank 1, which is stuck at step 1 (1F1)"
    )


def test_a_checked_program_is_the_program() -> None:
    program = parse_csv("0F0,0B0\n1F0,1B0\n")
    checked = check(program)
    assert isinstance(checked, CheckedProgram)
    assert (checked.name, checked.placement, checked.num_microbatches, checked.ranks) == (
        program.name,
        program.placement,
        program.num_microbatches,
        program.ranks,
    )


@pytest.mark.parametrize("case", WRONG, ids=[case.partition("\n")[0] for case in WRONG])
def test_each_problem_is_named_with_its_place(case: str) -> None:
    _, *lines = case.splitlines()
    rows = [line for line in lines if not line.startswith("-> ")]
    expected = [line.removeprefix("-> ") for line in lines if line.startswith("-> ")]
    assert expected
    assert told("\n".join(rows) + "\n", microbatches=1) == expected


def test_both_ends_of_a_channel_have_one_order() -> None:
    assert told("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n") == [
        "rank 1, step 0 (1RECV_F1): 1RECV_F1 is posted as number 0 of the messages from rank 0; "
        "post 1RECV_F0 here, which rank 0 sends as number 0, so that both ends have the same order"
    ]


def test_an_action_needs_its_microbatch_and_a_whole_stage_takes_none() -> None:
    steps = (Action(stage=0, op=Op.FORWARD), Action(stage=0, op=Op.UNSHARD, microbatch=0))
    program = Program(name="x", placement=linear(1), num_microbatches=1, ranks=(steps,))
    assert [str(problem) for problem in problems(program)] == [
        "rank 0, step 0 (0F): microbatch None; F of stage 0 takes one of 0",
        "rank 0, step 1 (0UNSHARD0): microbatch 0; UNSHARD of stage 0 takes none",
    ]


@pytest.mark.parametrize("pair", ["", "0F0;0SEND_F0", "0F0;0F1", "0B0;0B1", "0F0;0I1;0W1"])
def test_a_pair_holds_a_forward_and_a_backward(pair: str) -> None:
    steps = (Overlap(parts=tuple(map(parse_action, filter(None, pair.split(";"))))),)
    program = Program(name="x", placement=linear(1), num_microbatches=1, ranks=(steps,))
    assert [str(problem) for problem in problems(program)] == [
        f"rank 0, step 0 (({pair})OVERLAP_F_B): an overlapped pair is one forward and one backward"
    ]


def test_as_many_ranks_as_placed_and_at_least_one_microbatch() -> None:
    program = Program(name="x", placement=linear(2), num_microbatches=0, ranks=((),))
    assert [str(problem) for problem in problems(program)] == [
        "steps for 1 rank, but the placement has 2",
        "0 microbatches; a step takes at least one",
    ]


def test_two_blocking_sends_against_each_other_are_a_deadlock() -> None:
    # Right where sends are buffered; torch's own lowering makes such programs.
    assert told(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    ) == [
        "rank 0, step 3 (0SEND_F1): deadlock: waits for 1RECV_F1 of rank 1, which is "
        "stuck at step 3 (1SEND_B0)",
        "rank 1, step 3 (1SEND_B0): deadlock: waits for 0RECV_B0 of rank 0, which is "
        "stuck at step 3 (0SEND_F1)",
    ]


def test_computation_that_waits_in_a_circle_is_a_deadlock() -> None:
    # A V: the first rank wants to finish microbatch 0 before it starts 1, the second the reverse.
    program = parse_csv("0F0,3F0,0F1,3F1\n1F0,1F1,2F0,2F1\n")
    assert [str(problem) for problem in problems(program)] == [
        "rank 0, step 1 (3F0): deadlock: waits for 2F0 of rank 1, which is stuck at step 1 (1F1)",
        "rank 1, step 1 (1F1): deadlock: waits for 0F1 of rank 0, which is stuck at step 1 (3F0)",
    ]


def test_twenty_problems_are_listed_and_the_rest_counted() -> None:
    program = parse_csv("0F0\n1F0\n", num_microbatches=13)
    with pytest.raises(ScheduleError) as caught:
        check(program)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 0, action 0F1: program 'csv' has 24 problems:"
    assert lines[1] == "  rank 0: 0F1 is missing"
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  and 4 more"
    assert (caught.value.rank, caught.value.action) == (0, "0F1")
