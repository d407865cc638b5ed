"""Finds every problem of a program; what has none is a ``CheckedProgram``, the only kind that runs.

Proven of a checked program:

- every action names a stage and microbatch that exist, on the rank that holds the stage;
- the pieces of a split sequence go forward in their order, and backward in reverse;
- each forward runs once; so does each backward, whole (B) or in two (I, W), or there is none;
- sends and receives stand exactly where a value crosses ranks, once each, and every directed pair
  of ranks has them in the same order at both ends;
- all ranks play to their end, each action after what it needs, even where a send waits until the
  matching receive is posted; or over channels of another kind, if asked (``Channels``);
- a stage that is ever unsharded is so whenever it computes, and resharded at the end;
- what a forward keeps is there when the backward asks for it: recomputed where it is recomputed at
  all, and reloaded where it was offloaded;
- gradients are reduced after the last weight gradient, once, for all stages or for none.

It follows that every received value is used, and so can be freed, exactly once: it has one
receive, one action asks for it, and that action runs once.

How a problem is worded is the affair of ``penstock.schedule.diagnosis``; how a deadlock is drawn,
that of ``penstock.schedule.counterexample``.
"""

from __future__ import annotations

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Op
from penstock.schedule.channels import TWO_WAY, Channels, waits
from penstock.schedule.coding import Coded, MessageOrders
from penstock.schedule.counterexample import circle_of, disorder_of
from penstock.schedule.diagnosis import (
    Problem,
    count_problems,
    malformed,
    order_problems,
    size_problems,
    stuck_problems,
    text_of,
)
from penstock.schedule.encoding import encode
from penstock.schedule.play import ProgramPlayer
from penstock.schedule.program import CheckedProgram, Program, refuse_no_program
from penstock.schedule.rules import COPIES, COVERS, RECEIVE_FOR, SEND_OF, TRANSFERS
from penstock.schedule.upkeep import keeping_problems, reduction_problems, sharding_problems

__all__ = ["Problem", "check", "problems"]

_SHOWN = 20


def check(program: Program, channels: Channels = TWO_WAY) -> CheckedProgram:
    """Prove that a program is right, or say all that is wrong with it.

    Args:
        program: any program, with or without transfers.
        channels: how messages travel; by default as the runtime needs it to be right: a send
            waits until its receive is posted, one channel for each direction. Without transfers
            there is nothing that travels (``penstock.schedule.passes.lower`` adds them).

    Returns:
        The same program, as the type that runs.

    Raises:
        ScheduleError: it has problems. The message lists the first twenty and counts the rest,
            and draws the smallest part of the program that shows a deadlock; the error's place
            is that of the first. Or what is given is no program.

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
    found, drawn = _examine(program, channels)
    if found:
        number = "a problem" if len(found) == 1 else f"{len(found)} problems"
        raise ScheduleError(
            f"program {program.name!r} has {number}:\n{text_of(found, _SHOWN)}{drawn}",
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
    """Everything that is wrong with a program.

    What makes the rest meaningless comes first and alone: steps that can't be, then actions that
    are doubled, missing or without need, then the order.

    Args:
        program: any program, with or without transfers.
        channels: how messages travel, as ``check`` takes it.

    Returns:
        The problems; none for a program that ``check`` accepts.
    """
    return tuple(_examine(program, channels)[0])


def _examine(program: Program, channels: Channels) -> tuple[list[Problem], str]:
    """The problems, and a drawing of what can't be told in a line."""
    refuse_no_program(program, "check()")
    if not isinstance(channels, Channels):
        raise ScheduleError(
            f"channels={channels!r}: expected Channels of penstock.schedule.channels, such as "
            "Channels(capacity=1)"
        )
    found = size_problems(program)
    if found:
        return found, ""
    try:
        coded = encode(program)
    except ScheduleError:
        return malformed(program), ""
    seen, complete = _tally(coded)
    if not complete:
        return count_problems(program), ""
    return _examine_order(program, channels, coded, seen)


def _examine_order(
    program: Program, channels: Channels, coded: Coded, seen: bytearray
) -> tuple[list[Problem], str]:
    coding = coded.coding
    used = {op for op in Op if 1 in seen[coding.section(op)]}
    found: list[Problem] = []
    drawn = ""
    if used.isdisjoint(TRANSFERS):
        player = ProgramPlayer(coded, coding.needs(transfers=False))
    else:
        orders = _message_orders(coded)
        if any(sent != posted for sent, posted in orders.values()):
            found += order_problems(program, orders, coding)
            drawn += disorder_of(orders, coding)
        player = ProgramPlayer(coded, *waits(coded, channels))
    if not player.play():
        found += stuck_problems(program, player, coding)
        drawn += circle_of(program, player, coding)
    if Op.UNSHARD in used or Op.RESHARD in used:
        found += sharding_problems(program)
    if used & {Op.RECOMPUTE, *COPIES}:
        found += keeping_problems(program)
    if Op.REDUCE_GRAD in used:
        found += reduction_problems(program)
    return found, drawn


def _tally(coded: Coded) -> tuple[bytearray, bool]:
    """A mark for every code that occurs, and whether each that must does so, once."""
    coding = coded.coding
    seen = bytearray(coding.size)
    repeated: set[int] = set()
    for queue in coded.queues:
        for code in queue:
            if code < 0:
                for part in coded.parts(code):
                    if seen[part]:
                        repeated.add(part)
                    seen[part] = 1
                continue
            if seen[code]:
                repeated.add(code)
            seen[code] = 1
    once = not any(coding.action(code).op not in (Op.UNSHARD, Op.RESHARD) for code in repeated)
    return seen, once and _computes_all(coded, seen) and _transfers_all(coded, seen)


def _computes_all(coded: Coded, seen: bytearray) -> bool:
    section = coded.coding.section
    forward, full = seen[section(Op.FORWARD)], seen[section(Op.FULL_BACKWARD)]
    by_input, by_weight = seen[section(Op.INPUT_GRAD)], seen[section(Op.WEIGHT_GRAD)]
    has_backward = 1 in full or 1 in by_input or 1 in by_weight
    expected = coded.coding.passing()
    # In bytes of 0 and 1: each of full and by_input where the other is not.
    either = int.from_bytes(full) ^ int.from_bytes(by_input)
    whole = by_input == by_weight and either == int.from_bytes(expected)
    return forward == expected and (whole or not has_backward)


def _transfers_all(coded: Coded, seen: bytearray) -> bool:
    coding = coded.coding
    if not any(1 in seen[coding.section(op)] for op in TRANSFERS):
        return True
    size, passing = coding.num_microbatches, coding.passing()
    for (value, _), receive in RECEIVE_FOR.items():
        makers = (value, *(op for op, covered in COVERS.items() if value in covered))
        made = any(1 in seen[coding.section(op)] for op in makers)
        for op in (receive, SEND_OF[receive]):
            for stage in range(coding.placement.num_stages):
                start = coding.code(op, stage)
                needed = made and coding.partner(op, stage) is not None
                # How many there are is enough: of what does not pass a stage, none is seen.
                wanted = passing[stage * size : stage * size + size].count(1) if needed else 0
                if seen[start : start + size].count(1) != wanted:
                    return False
    return True


def _message_orders(coded: Coded) -> MessageOrders:
    coding = coded.coding
    num_microbatches = coding.num_microbatches
    orders: MessageOrders = {}
    # By key: where to note a transfer, and how far the receive is from it.
    notes: list[tuple[list[int], int] | None] = []
    for transfer in coding.transfers_by_key():
        partner = None if transfer is None else coding.partner(*transfer)
        if transfer is None or partner is None:
            notes.append(None)
            continue
        here, there = (coding.placement.rank_of(stage) for _, stage in (transfer, partner))
        if transfer[0] in RECEIVE_FOR.values():
            notes.append((orders.setdefault((there, here), ([], []))[1], 0))
        else:
            distance = coding.code(*partner) - coding.code(*transfer)
            notes.append((orders.setdefault((here, there), ([], []))[0], distance))
    for queue in coded.queues:
        for code in queue:
            note = notes[code // num_microbatches] if code >= 0 else None
            if note is not None:
                note[0].append(code + note[1])
    return orders
