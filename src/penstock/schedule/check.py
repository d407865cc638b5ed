"""Check programs: only a program without problems becomes a runnable ``CheckedProgram``.

Proven of a checked program:

- every action names an existing stage and microbatch, on the rank that holds the stage;
- the chunks of a split sequence go forward in their order, and backward in reverse;
- each forward runs once, and so does each backward, whole (B) or split (I, W), unless the program
  has no backwards;
- each value that crosses ranks has exactly one send and one receive, and both ends of every
  directed pair of ranks have them in the same order;
- all ranks run to their end over the requested channels (``Channels``), each action after its
  prerequisites, even if a send blocks until the matching receive is posted;
- a sharded stage is unsharded whenever it computes, and resharded at the end;
- activations are present when the backward needs them, after recomputation or reload if any;
- gradients are reduced after the last weight gradient, once, for all stages or for none.

It follows that every received value is used, and can be freed, exactly once: it has one receive and
one consumer, which runs once.

The checker works on integers for speed. Only an invalid program is examined action by action, to
locate the problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.channels import (
    TWO_WAY,
    Channels,
    blocking_replay,
    message_orders,
    order_problems,
    places_of,
    problem_at,
    stuck_problems,
)
from penstock.schedule.index import ActionIndex, IndexedProgram, fault_of, index_program
from penstock.schedule.messages import Problem, number_of
from penstock.schedule.program import CheckedProgram, Program, refuse_no_program
from penstock.schedule.rules import (
    COMPUTE,
    COPIES,
    RECEIVE_FOR,
    SEND_OF,
    TRANSFERS,
    WEIGHT_GRADS,
)

__all__ = ["TWO_WAY", "Channels", "Problem", "check", "global_order", "last_steps", "problems"]

_SHOWN = 20
# op → the state of the activations that it needs, and the state that it leaves.
_ACTIVATIONS = {
    Op.RECOMPUTE: ("dropped", "kept"),
    Op.OFFLOAD: ("kept", "away"),
    Op.RELOAD: ("away", "kept"),
    Op.INPUT_GRAD: ("kept", "used up"),
    Op.FULL_BACKWARD: ("kept", "used up"),
}
_REDUCTION = frozenset({Op.REDUCE_GRAD})


def check(program: Program, channels: Channels = TWO_WAY) -> CheckedProgram:
    """Prove that a program is valid, or raise with all its problems.

    Args:
        program: any program, with or without transfers.
        channels: the channels of messages; by default the runtime's requirement: one channel per
            direction, on which a send blocks until its receive is posted. A program without
            transfers has no messages (``penstock.schedule.passes.lower`` adds them).

    Returns:
        The same program, as the type that runs.

    Raises:
        ScheduleError: the program has problems, or is not a ``Program``. The message lists the
            first twenty problems and counts the rest; the error's place is that of the first.

    Example:
        >>> from penstock.schedule.text import parse_csv
        >>> check(parse_csv("0F0,0B0\\n1F0,1B0\\n")).num_stages
        2
        >>> check(parse_csv("0F0,0B0\\n1B0,1F0\\n"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        penstock.errors.ScheduleError: rank 1, action 1B0: program 'csv' has 2 problems:
          rank 1, step 0 (1B0): 1B0 needs 1F0, which comes only at step 1
          rank 0, step 1 (0B0): deadlock: waits for rank 1 to do 1B0 (its step 0), ...
    """
    found = problems(program, channels)
    if found:
        number = "a problem" if len(found) == 1 else f"{len(found)} problems"
        lines = [f"  {problem}" for problem in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} more")
        raise ScheduleError(
            "\n".join([f"program {program.name!r} has {number}:", *lines]),
            where=Where(rank=found[0].rank, action=found[0].action),
        )
    return CheckedProgram(
        name=program.name,
        placement=program.placement,
        num_microbatches=program.num_microbatches,
        ranks=program.ranks,
        num_splits=program.num_splits,
    )


def problems(program: Program, channels: Channels = TWO_WAY) -> tuple[Problem, ...]:
    """All problems of a program.

    Problems are reported in stages, each alone: first impossible steps, then duplicate, missing or
    superfluous actions, then the order.

    Args:
        program: any program, with or without transfers.
        channels: the channels of messages, as for ``check``.

    Returns:
        The problems; none for a program that ``check`` accepts.
    """
    refuse_no_program(program, "check()")
    if not isinstance(channels, Channels):
        raise ScheduleError(
            f"channels={channels!r}: expected Channels of penstock.schedule.channels, such as "
            "Channels(per_pair=True)"
        )
    found = [Problem(rank=None, step=None, action=None, message=m) for m in _sizes(program)]
    if found:
        return tuple(found)
    try:
        indexed = index_program(program)
    except ScheduleError:
        return tuple(_impossible_steps(program))
    index = indexed.index
    seen, repeated = _tally(indexed)
    expected = _expected(index, seen)
    if repeated or seen != expected:
        return tuple(_count_problems(program, indexed, seen, expected))
    used = {op for op in Op if 1 in seen[index.section(op)]}
    transfers = not used.isdisjoint(TRANSFERS)
    if transfers:
        orders = message_orders(indexed)
        if any(sent != posted for sent, posted in orders.values()):
            found += order_problems(program, orders, index)
    replay = blocking_replay(indexed, channels, transfers=transfers)
    if not replay.play():
        found += stuck_problems(program, replay, index)
    if used & {Op.UNSHARD, Op.RESHARD, Op.RECOMPUTE, *COPIES}:
        found += _state_problems(program)
    if Op.REDUCE_GRAD in used:
        found += _reduction_problems(program)
    return tuple(found)


def global_order(program: Program) -> tuple[tuple[int, Step], ...]:
    """All steps of all ranks in one valid sequence, as one process would run them.

        rank 0   0F0 0F1 . . 0B0 0B1         (rank 0) 0F0 0F1, (rank 1) 1F0 1B0 1F1 1B1,
        rank 1   .  1F0 1B0 1F1 1B1          (rank 0) 0B0 0B1

    Each rank runs as far as it can before the next rank continues. This keeps the order of each
    rank's steps, and is the same on every machine. A send follows the posting of its receive, and
    the use of a received value follows its send.

    Args:
        program: a program; one that is not a ``CheckedProgram`` is checked first.

    Returns:
        Pairs of a rank and its step.

    Raises:
        ScheduleError: the program has problems.

    Example:
        >>> from penstock.schedule.text import parse_csv
        >>> program = parse_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> " ".join(f"{rank}:{step}" for rank, step in global_order(program))
        '0:0F0 0:0F1 1:1F0 1:1B0 1:1F1 1:1B1 0:0B0 0:0B1'
    """
    checked = program if isinstance(program, CheckedProgram) else check(program)
    replay = blocking_replay(index_program(checked), TWO_WAY, transfers=checked.has_transfers)
    ended = replay.play()
    assert ended, "a checked program runs to its end"
    return tuple(
        (rank, step)
        for rank, first, stop in replay.runs()
        for step in checked.ranks[rank][first:stop]
    )


def last_steps(steps: tuple[Step, ...], ops: frozenset[Op], num_stages: int) -> dict[int, int]:
    """For each stage of a rank, the index of its last step with one of ``ops``."""
    last: dict[int, int] = {}
    for number in range(len(steps) - 1, -1, -1):
        for act in steps[number].parts:
            if act.op in ops:
                last.setdefault(act.stage, number)
        if len(last) == num_stages:
            break
    return last


def _sizes(program: Program) -> Iterator[str]:
    """Problems of the program's numbers of ranks, microbatches and chunks."""
    microbatches = number_of(program.num_microbatches, "microbatch")
    if program.num_ranks != program.placement.num_ranks:
        ranks = number_of(program.num_ranks, "rank")
        yield f"steps for {ranks}, but the placement has {program.placement.num_ranks}"
    if program.num_microbatches < 1:
        yield f"{microbatches}; a step takes at least one"
    elif program.num_microbatches < program.placement.num_directions:
        copies = number_of(program.placement.num_directions, "copy")
        yield f"{microbatches} for {copies} of the model; each copy takes at least one"
    if program.num_splits < 1 or program.num_microbatches % program.num_splits:
        yield (
            f"{microbatches} for num_splits={program.num_splits}: each sequence is so many of "
            "them, at least one"
        )
    elif program.num_splits > 1 and program.placement.num_directions > 1:
        yield (
            "sequences are split and the model is there in several copies; the chunks of one "
            "sequence go through the same stages"
        )


def _impossible_steps(program: Program) -> Iterator[Problem]:
    for rank, steps in enumerate(program.ranks):
        for number, step in enumerate(steps):
            fault = fault_of(step, rank, program)
            if fault is not None:
                yield problem_at(program, (rank, number), fault)


def _tally(program: IndexedProgram) -> tuple[bytearray, set[int]]:
    """A mark for every id that occurs, and the ids that occur too often."""
    seen = bytearray(program.index.size)
    ids = list(program.ids())
    for number in ids:
        seen[number] = 1
    if seen.count(1) == len(ids):
        return seen, set()
    again = (Op.UNSHARD, Op.RESHARD)
    repeated = {number for number, count in Counter(ids).items() if count > 1}
    return seen, {number for number in repeated if program.index.action(number).op not in again}


def _expected(index: ActionIndex, seen: bytearray) -> bytearray:
    """A mark for every id that must occur, given the ids that do."""
    expected = seen[:]
    passing = index.passing()

    def marks(op: Op) -> int:
        # Byte strings of 0 and 1 as big integers, so that each operation covers all ids at once.
        return int.from_bytes(seen[index.section(op)])

    expected[index.section(Op.FORWARD)] = passing
    full, halves = marks(Op.FULL_BACKWARD), marks(Op.INPUT_GRAD) | marks(Op.WEIGHT_GRAD)
    has_backward = bool(full | halves)
    if has_backward:
        each = int.from_bytes(passing)
        split = (each & halves) & ~full
        for op, wanted in (
            (Op.FULL_BACKWARD, each & ~split),
            (Op.INPUT_GRAD, split),
            (Op.WEIGHT_GRAD, split),
        ):
            expected[index.section(op)] = wanted.to_bytes(len(passing))
    if any(1 in seen[index.section(op)] for op in TRANSFERS):
        size = index.num_microbatches
        for (value, _), receive in RECEIVE_FOR.items():
            for op in (receive, SEND_OF[receive]):
                for stage in range(index.placement.num_stages):
                    crosses = value is Op.FORWARD or has_backward
                    needed = crosses and index.peer(op, stage) is not None
                    row = passing[stage * size : (stage + 1) * size] if needed else bytes(size)
                    start = index.id(op, stage)
                    expected[start : start + size] = row
    return expected


def _count_problems(
    program: Program, indexed: IndexedProgram, seen: bytearray, expected: bytearray
) -> Iterator[Problem]:
    """The duplicate, missing and superfluous actions."""
    index, places = indexed.index, dict[Action, tuple[int, int]]()
    for act, place in places_of(program):
        if act not in places:
            places[act] = place
        elif act.op not in (Op.UNSHARD, Op.RESHARD):
            first = places[act][1]
            message = f"{act} again, first done at step {first}; once is enough"
            yield problem_at(program, place, message)
    for number, (has, wants) in enumerate(zip(seen, expected, strict=True)):
        if has == wants:
            continue
        act = index.action(number)
        if wants:
            rank = program.placement.rank_of(act.stage)
            message = _missing(act, index, places)
            yield Problem(rank=rank, step=None, action=str(act), message=message)
        elif act.op in TRANSFERS:
            message = f"{act} carries nothing that another rank needs; leave it out"
            yield problem_at(program, places[act], message)
        else:
            full = action(act.stage, Op.FULL_BACKWARD, act.microbatch)
            message = f"{act} is done already, as a part of {full}"
            yield problem_at(program, places[act], message)


def _missing(act: Action, index: ActionIndex, present: Container[Action]) -> str:
    """The message about a missing action."""
    halves = [action(act.stage, op, act.microbatch) for op in (Op.INPUT_GRAD, Op.WEIGHT_GRAD)]
    if act.op is Op.FULL_BACKWARD:
        return f"the backward is missing: {act}, or {halves[0]} and {halves[1]}"
    if act in halves:
        (half,) = (other for other in halves if other in present)
        return f"{act} is missing: {half} is half of a backward"
    peer = index.peer(act.op, act.stage)
    if peer is None:
        return f"{act} is missing"
    maker, user = (peer[1], act.stage) if act.op in SEND_OF else (act.stage, peer[1])
    value = "output" if act.op in (Op.SEND_F, Op.RECV_F) else "input gradient"
    rank = index.placement.rank_of(user)
    return f"{act} is missing: rank {rank} needs the {value} of stage {maker}"


def _state_problems(program: Program) -> Iterator[Problem]:
    """The steps that find parameters or activations of their stage in a wrong state.

    parameters    sharded ──UNSHARD──► whole ──RESHARD──► sharded
    activations   F ──► kept ──OFFLOAD──► away ──RELOAD──► kept ──► I or B
                  F ──► dropped ──RECOMPUTE──► kept ──► I or B
    """
    acts = list(program.actions())
    sharded = {a.stage for a in acts if a.op in (Op.UNSHARD, Op.RESHARD)}
    dropped = {(a.stage, a.microbatch) for a in acts if a.op is Op.RECOMPUTE}
    whole: set[int] = set()
    states: dict[tuple[int, int | None], str] = {}
    for act, place in places_of(program):
        key = act.stage, act.microbatch
        if act.op is Op.UNSHARD:
            if act.stage in whole:
                yield problem_at(program, place, f"stage {act.stage} is unsharded already")
            whole.add(act.stage)
        elif act.op is Op.RESHARD:
            if act.stage not in whole:
                yield problem_at(program, place, f"stage {act.stage} is not unsharded here")
            whole.discard(act.stage)
        elif act.op in COMPUTE and act.stage in sharded - whole:
            message = f"{act} needs the parameters: put {act.stage}UNSHARD before it"
            yield problem_at(program, place, message)
        if act.op is Op.FORWARD:
            states[key] = "dropped" if key in dropped else "kept"
        elif act.op in _ACTIVATIONS:
            state = states.get(key, "not made yet")
            wanted, states[key] = _ACTIVATIONS[act.op]
            if state != wanted:
                message = (
                    f"the activations of {act.stage}F{act.microbatch} are {state} here; {act} "
                    f"needs them {wanted}"
                )
                yield problem_at(program, place, message)
    for stage in sorted(whole):
        text, rank = f"{stage}RESHARD", program.placement.rank_of(stage)
        message = f"stage {stage} is left unsharded; put {text} at the end"
        yield Problem(rank=rank, step=None, action=text, message=message)


def _reduction_problems(program: Program) -> Iterator[Problem]:
    """The stages whose gradients are reduced too early, or not at all while others' are."""
    for rank, steps in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        made = last_steps(steps, WEIGHT_GRADS, len(stages))
        reduced = last_steps(steps, _REDUCTION, len(stages))
        for stage in stages:
            text = f"{stage}REDUCE_GRAD"
            step = reduced.get(stage)
            if step is None and stage in made:
                message = f"{text} is missing: gradients are reduced for all stages or for none"
            elif step is not None and stage not in made:
                message = f"stage {stage} has no weight gradient to reduce"
            elif step is not None and step < made[stage]:
                message = (
                    f"reduced before the last weight gradient of stage {stage}, at step "
                    f"{made[stage]} ({steps[made[stage]]})"
                )
            else:
                continue
            yield Problem(rank=rank, step=step, action=text, message=message)
