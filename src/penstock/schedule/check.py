"""Check programs: only a program without problems becomes a runnable ``CheckedProgram``.

Proven of a checked program:

- every action names an existing stage and microbatch, on the rank that holds the stage;
- the chunks of a split sequence go forward in their order, and backward in reverse;
- each forward runs once, and so does each backward, if any, whole (B) or split (I, W);
- each value that crosses ranks has exactly one send and one receive, and both ends of every
  directed pair of ranks have them in the same order;
- all ranks run to their end, each action after its prerequisites, even if a send blocks until the
  matching receive is posted; posting never blocks, the use of the message does;
- a sharded stage is unsharded whenever it computes (the end of a step reshards it);
- activations are present when the backward needs them, after recomputation or reload if any;
- gradients are reduced after the last weight gradient, once, for all stages or for none.

So every received value is used, and can be freed, exactly once.

Collectives are outside of this proof: those of UNSHARD and REDUCE_GRAD with a stage's replicas, and
those within a stage. They end if all replicas run the same program and order their own collectives
alike, which nothing here checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import TypeAlias

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.index import IndexedProgram, faults, index_program
from penstock.schedule.program import CheckedProgram, Program, refuse_no_program
from penstock.schedule.replay import DependencyReplay, blocking_replay
from penstock.schedule.rules import BACKWARDS, COMPUTE, COVERS, SHARDING, TRANSFERS, WEIGHT_GRADS
from penstock.schedule.wording import Problem, number_of

__all__ = ["Problem", "check", "global_order", "last_steps", "problems"]

_SHOWN = 20
_BACKWARDS = (Op.FULL_BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
# op → the state of parameters or activations that it needs, and the state that it leaves.
_STATES = {
    Op.UNSHARD: ("sharded", "unsharded"),
    Op.RESHARD: ("unsharded", "sharded"),
    Op.RECOMPUTE: ("dropped", "kept"),
    Op.OFFLOAD: ("kept", "away"),
    Op.RELOAD: ("away", "kept"),
    Op.INPUT_GRAD: ("kept", "used up"),
    Op.FULL_BACKWARD: ("kept", "used up"),
}

_Place: TypeAlias = tuple[int, int]
"""A rank and the index of one of its steps."""


def check(program: Program) -> CheckedProgram:
    """Prove that a program is valid, or raise with all its problems.

    Args:
        program: any program, with or without transfers.

    Returns:
        The same program, as the type that runs.

    Raises:
        ScheduleError: the program has problems, or is not a ``Program``. The message lists the
            first twenty problems; the error's place is that of the first.

    Examples:
        >>> from penstock.schedule.text import parse_csv
        >>> check(parse_csv("0F0,0B0\\n1F0,1B0\\n")).num_stages
        2
        >>> check(parse_csv("0F0,0B0\\n1B0,1F0\\n"))
        Traceback (most recent call last):
        penstock.errors.ScheduleError: rank 1, action 1B0: program 'csv' has 2 problems:
          rank 1, step 0 (1B0): 1B0 needs 1F0 before it
          rank 0, step 1 (0B0): deadlock: waits for 1B0 of rank 1, which is stuck at step 0 (1B0)
    """
    found = problems(program)
    if found:
        number = "a problem" if len(found) == 1 else f"{len(found)} problems"
        lines = [f"  {problem}" for problem in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} more")
        raise ScheduleError(
            "\n".join([f"program {program.name!r} has {number}:", *lines]),
            where=Where(rank=found[0].rank, action=found[0].action),
        )
    return CheckedProgram(**{each.name: getattr(program, each.name) for each in fields(Program)})


def problems(program: Program) -> tuple[Problem, ...]:
    """The problems of a program; none for a program that ``check`` accepts.

    Problems are reported in stages, each alone: first impossible steps, then duplicate, missing or
    superfluous actions, then the order.
    """
    refuse_no_program(program, "check()")
    found = [Problem(rank=None, step=None, action=None, message=m) for m in _sizes(program)]
    if found:
        return tuple(found)
    try:
        indexed = index_program(program)
    except ScheduleError:
        return tuple(faults(program))
    seen, repeated = _tally(indexed)
    expected = _expected(indexed, seen)
    if repeated or seen != expected:
        return tuple(_count_problems(program, indexed, seen, expected))
    used = {op for op in Op if 1 in seen[indexed.section(op)]}
    transfers = not used.isdisjoint(TRANSFERS)
    if transfers:
        found += _order_problems(program, indexed)
    replay = blocking_replay(indexed, transfers=transfers)
    if not replay.play():
        found += _stuck_problems(program, replay, indexed)
    if not used.isdisjoint(_STATES.keys() - BACKWARDS):
        found += _state_problems(program)
    if Op.REDUCE_GRAD in used:
        found += _reduction_problems(program)
    return tuple(found)


def global_order(program: Program) -> tuple[tuple[int, Step], ...]:
    """All steps of all ranks, as (rank, step), in one valid sequence, as one process runs them.

        rank 0   0F0 0F1 . . 0B0 0B1         (rank 0) 0F0 0F1, (rank 1) 1F0 1B0 1F1 1B1,
        rank 1   .  1F0 1B0 1F1 1B1          (rank 0) 0B0 0B1

    Each rank runs as far as it can before the next rank continues, so the order is the same on
    every machine. A send follows the posting of its receive, and the use of a received value
    follows its send. A program that is not a ``CheckedProgram`` is checked first.
    """
    checked = program if isinstance(program, CheckedProgram) else check(program)
    replay = blocking_replay(index_program(checked), transfers=checked.has_transfers)
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


def _places_of(program: Program) -> Iterator[tuple[Action, _Place]]:
    """Every action with its rank and step, rank by rank."""
    for rank, steps in enumerate(program.ranks):
        for number, step in enumerate(steps):
            for act in step.parts:
                yield act, (rank, number)


def _at(program: Program, place: _Place, message: str) -> Problem:
    rank, step = place
    return Problem(rank=rank, step=step, action=str(program.ranks[rank][step]), message=message)


def _sizes(program: Program) -> Iterator[str]:
    """Problems of the program's numbers of ranks, microbatches and chunks."""
    microbatches = number_of(program.num_microbatches, "microbatch")
    ways, splits = program.placement.num_directions, program.num_splits
    if program.num_ranks != program.placement.num_ranks:
        ranks = number_of(program.num_ranks, "rank")
        yield f"steps for {ranks}, but the placement has {program.placement.num_ranks}"
    if program.num_microbatches < 1:
        yield f"{microbatches}; a step takes at least one"
    elif program.num_microbatches < ways:
        copies = number_of(ways, "copy")
        yield f"{microbatches} for {copies} of the model; each copy takes at least one"
    if splits < 1 or program.num_microbatches % splits:
        yield f"{microbatches} for num_splits={splits}: each sequence is so many, at least one"
    elif splits > 1 and ways > 1:
        yield "split sequences and several copies; the chunks of one sequence share their stages"


def _tally(program: IndexedProgram) -> tuple[bytearray, bool]:
    """A mark for every id that occurs, and True if one occurs too often."""
    seen, ids = bytearray(program.size), list(program.ids())
    for number in ids:
        seen[number] = 1
    if seen.count(1) == len(ids):
        return seen, False
    repeated = (number for number, count in Counter(ids).items() if count > 1)
    return seen, any(program.action(number).op not in SHARDING for number in repeated)


def _expected(indexed: IndexedProgram, seen: bytearray) -> bytearray:
    """A mark for every id that must occur, given the ids that do."""
    expected, passing = seen[:], indexed.passing()
    expected[indexed.section(Op.FORWARD)] = passing
    # Byte strings of 0 and 1 as big integers, so that each operation covers all ids at once. If of
    # four microbatches 0101 have B and 0010 have I, then 1101 must have B, and 0010 I and W.
    each = int.from_bytes(passing)
    full, input_grad, weight_grad = (int.from_bytes(seen[indexed.section(op)]) for op in _BACKWARDS)
    split = each & (input_grad | weight_grad) & ~full
    has_backward = bool(full | input_grad | weight_grad)
    if has_backward:
        for op, numbers in zip(_BACKWARDS, (each & ~split, split, split), strict=True):
            expected[indexed.section(op)] = numbers.to_bytes(len(passing))
    if any(1 in seen[indexed.section(op)] for op in TRANSFERS):
        size = indexed.num_microbatches
        for (op, stage), transfer in zip(indexed.rows(), indexed.transfers(), strict=True):
            if op in TRANSFERS:
                needed = transfer is not None and (has_backward or op in (Op.SEND_F, Op.RECV_F))
                row = passing[stage * size : (stage + 1) * size] if needed else bytes(size)
                start = indexed.id(op, stage)
                expected[start : start + size] = row
    return expected


def _count_problems(
    program: Program, indexed: IndexedProgram, seen: bytearray, expected: bytearray
) -> Iterator[Problem]:
    """The duplicate, missing and superfluous actions."""
    places: dict[Action, _Place] = {}
    for act, place in _places_of(program):
        first = places.setdefault(act, place)
        if first is not place and act.op not in SHARDING:
            yield _at(program, place, f"{act} again, first done at step {first[1]}; once is enough")
    for number, (has, wants) in enumerate(zip(seen, expected, strict=True)):
        if has == wants:
            continue
        act = indexed.action(number)
        if has:
            full = action(act.stage, Op.FULL_BACKWARD, act.microbatch)
            why = "another rank needs" if act.op in TRANSFERS else f"{full} has not done"
            yield _at(program, places[act], f"{act} gives nothing that {why}; leave it out")
        else:
            rank = program.placement.rank_of(act.stage)
            yield Problem(rank=rank, step=None, action=str(act), message=f"{act} is missing")


def _message_orders(program: IndexedProgram) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """By directed pair of ranks (from, to), the ids of its receives: by sends, and by posting."""
    orders: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    # By row: the list that a transfer belongs to, and the offset to the receive.
    lists: list[tuple[list[int], int] | None] = []
    for transfer in program.transfers():
        if transfer is None:
            lists.append(None)
        elif transfer.is_send:
            sent, _ = orders.setdefault((transfer.rank, transfer.peer), ([], []))
            lists.append((sent, transfer.offset))
        else:
            _, posted = orders.setdefault((transfer.peer, transfer.rank), ([], []))
            lists.append((posted, 0))
    width = program.num_microbatches
    for number in chain(*program.queues):
        entry = lists[number // width] if number >= 0 else None
        if entry is not None:
            entry[0].append(number + entry[1])
    return orders


def _order_problems(program: Program, indexed: IndexedProgram) -> Iterator[Problem]:
    """The first order mismatch between the two ends of each directed pair of ranks."""
    for (source, target), (sent, posted) in sorted(_message_orders(indexed).items()):
        if sent == posted:
            continue
        k = next(k for k, ends in enumerate(zip(sent, posted, strict=True)) if ends[0] != ends[1])
        receive, expected = indexed.action(posted[k]), indexed.action(sent[k])
        message = (
            f"{receive} is posted as number {k} of the messages from rank {source}; post "
            f"{expected} here, which rank {source} sends as number {k}, so that both ends have "
            "the same order"
        )
        yield _at(program, (target, program.ranks[target].index(receive)), message)


def _stuck_problems(
    program: Program, replay: DependencyReplay, indexed: IndexedProgram
) -> Iterator[Problem]:
    """The wait of each rank in a deadlocked replay: first for its own actions, then for others'."""
    deadlocks, acts = [], set(program.actions())
    for rank, awaited in enumerate(replay.awaits):
        if awaited is None:
            continue
        needed, place = indexed.action(awaited), replay.positions[rank]
        if needed.op in COVERS[Op.FULL_BACKWARD] and needed not in acts:
            needed = action(needed.stage, Op.FULL_BACKWARD, needed.microbatch)
        other = program.placement.rank_of(needed.stage)
        if other == rank:
            step = program.ranks[rank][place]
            yield _at(program, (rank, place), f"{step} needs {needed} before it")
            continue
        reached = replay.positions[other]
        message = (
            f"deadlock: waits for {needed} of rank {other}, which is stuck at step {reached} "
            f"({program.ranks[other][reached]})"
        )
        deadlocks.append(_at(program, (rank, place), message))
    yield from deadlocks


def _state_problems(program: Program) -> Iterator[Problem]:
    """The steps that find parameters or activations of their stage in a wrong state.

    parameters    sharded ──UNSHARD──► unsharded ──RESHARD──► sharded
    activations   F ──► kept ──OFFLOAD──► away ──RELOAD──► kept ──► I or B
                  F ──► dropped ──RECOMPUTE──► kept ──► I or B
    """
    acts = list(program.actions())
    # By stage the state of parameters (with None), by stage and microbatch that of activations.
    states: dict[tuple[int, int | None], str]
    states = {(act.stage, None): "sharded" for act in acts if act.op in SHARDING}
    dropped = {(act.stage, act.microbatch) for act in acts if act.op is Op.RECOMPUTE}
    for act, place in _places_of(program):
        if act.op in COMPUTE and states.get((act.stage, None)) == "sharded":
            yield _at(
                program, place, f"{act} needs its parameters: put {act.stage}UNSHARD before it"
            )
        key = act.stage, act.microbatch
        if act.op is Op.FORWARD:
            states[key] = "dropped" if key in dropped else "kept"
        elif act.op in _STATES:
            what = "parameters" if act.op in SHARDING else "activations"
            state = states.get(key, "not made yet")
            wanted, states[key] = _STATES[act.op]
            if state != wanted:
                yield _at(program, place, f"{act} needs its {what} {wanted}; here they are {state}")
            elif act.op is Op.OFFLOAD and key in dropped:
                yield _at(program, place, f"{act} of recomputed activations: leave out either")


def _reduction_problems(program: Program) -> Iterator[Problem]:
    """The stages whose gradients are reduced too early, or not at all while others' are."""
    for rank, steps in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        made = last_steps(steps, WEIGHT_GRADS, len(stages))
        reduced = last_steps(steps, frozenset({Op.REDUCE_GRAD}), len(stages))
        for stage in stages:
            after, step = made.get(stage), reduced.get(stage)
            if after == step or (after is not None and step is not None and after < step):
                continue
            message = (
                "gradients are reduced after the last weight gradient of their stage"
                f"{'' if after is None else f' (here step {after})'}, for all stages or for none"
            )
            text = f"{stage}REDUCE_GRAD"
            yield Problem(rank=rank, step=step, action=text, message=message)
