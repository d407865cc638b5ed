"""Which messages are certain to have arrived, known without asking.

    rank 0   F0 S F1 S F2 S      B0 ◄─ once B0's gradient is here, F0's message has arrived:
    rank 1         F0 B0 S ─────┘      rank 1 has computed on it before it sent

A rank holds what it sends until it has arrived. Programs are known on every rank, so a message
that comes also tells what its sender had received before; no rank needs to ask, or to wait.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import RECEIVE_FOR, REQUIRES, SEND_OF, SENDS

__all__ = ["acknowledgements"]


def acknowledgements(program: Program, rank: int) -> dict[Action, int]:
    """What each message that ``rank`` waits for says about those that it has sent.

    Args:
        program: a checked program with its transfers.
        rank: whose sends are asked about.

    Returns:
        For each computation of ``rank`` that waits for a message: how many of the messages that
        it has sent to that message's sender, counted from the step's start, have arrived once it
        is here.

    Example:
        >>> from penstock.schedule.passes import lower
        >>> from penstock.schedule.catalog import build
        >>> program = lower(build("1f1b", ranks=2, microbatches=3))
        >>> {str(a): n for a, n in acknowledgements(program, 0).items()}
        {'0B0': 1, '0B1': 2, '0B2': 3}
    """
    known = {
        peer: _known_at_sends(program, rank, peer)
        for peer in range(program.num_ranks)
        if peer != rank
    }
    found: dict[Action, int] = {}
    for step in program.ranks[rank]:
        for act in step.parts:
            for send, peer in _waits_for(act, program.placement):
                found[act] = known[peer].get(send, 0)
    return found


def _known_at_sends(program: Program, rank: int, peer: int) -> dict[Action, int]:
    """For each send of ``peer``, how many messages of ``rank`` it has waited for by then."""
    numbers: dict[Action, int] = {}
    for act in (a for step in program.ranks[rank] for a in step.parts):
        if _goes_to(act, program.placement) == peer:
            numbers[act] = len(numbers) + 1
    known: dict[Action, int] = {}
    arrived = 0
    for act in (a for step in program.ranks[peer] for a in step.parts):
        if act.op in SENDS:
            known[act] = arrived
        for send, _ in _waits_for(act, program.placement):
            # Messages between two ranks arrive in order: one that is here says so of all before.
            arrived = max(arrived, numbers.get(send, 0))
    return known


def _waits_for(act: Action, placement: Placement) -> list[tuple[Action, int]]:
    """The sends on other ranks that ``act`` waits for, and who sends."""
    found = []
    for op, offset in REQUIRES[act.op]:
        receive = RECEIVE_FOR.get((op, offset))
        other = placement.neighbour(act.stage, offset)
        if receive is not None and other is not None and not placement.same_rank(act.stage, other):
            send = action(other, SEND_OF[receive], act.microbatch)
            found.append((send, placement.rank_of(other)))
    return found


def _goes_to(act: Action, placement: Placement) -> int | None:
    match act.op:
        case Op.SEND_F:
            other = placement.neighbour(act.stage, +1)
        case Op.SEND_B:
            other = placement.neighbour(act.stage, -1)
        case _:
            return None
    assert other is not None, "a checked program sends to stages that exist"
    return placement.rank_of(other)
