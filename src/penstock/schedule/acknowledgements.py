"""Implicit acknowledgements: which sends have arrived by the time that a message comes back."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.index import index_program
from penstock.schedule.program import Program
from penstock.schedule.rules import SENDS

__all__ = ["acknowledgements"]


def acknowledgements(program: Program, rank: int) -> dict[Action, int]:
    """The number of sends that each received message acknowledges.

        rank 0   F0 S F1 S F2 S      B0 ◄─ when the gradient for B0 is here, F0's message arrived:
        rank 1         F0 B0 S ─────┘      rank 1 has computed on it before it sent

    A rank keeps a sent tensor until it has arrived. Since every rank knows the program, a received
    message implies which messages its sender had received before.

    Args:
        program: a checked program with its transfers.
        rank: the rank that sends and receives.

    Returns:
        For each computation of ``rank`` that waits for a message: the number of this rank's sends
        to the message's sender, from the step's start, that are known to have arrived.
    """
    indexed = index_program(program)
    width = program.num_microbatches
    ops = [op for op, _ in indexed.rows()]
    # By row: the receiving rank of a send, and the offsets of the sends that an action waits for.
    target = [t.peer if t is not None and t.is_send else None for t in indexed.transfers()]
    awaited = [
        [offset for offset in offsets if ops[(row * width + offset) // width] in SENDS]
        for row, offsets in enumerate(indexed.blocking())
    ]
    orders = [[part for step in queue for part in indexed.parts(step)] for queue in indexed.queues]
    # By send of a peer: the number of this rank's messages that the peer has waited for by then.
    arrived: dict[int, int] = {}
    for peer, order in enumerate(orders):
        sent = (number for number in orders[rank] if target[number // width] == peer != rank)
        place = {number: count for count, number in enumerate(sent, 1)}
        known = 0
        for number in order if place else ():
            if target[number // width] == rank:
                arrived[number] = known
            for offset in awaited[number // width]:
                # Messages between two ranks arrive in order, so one acknowledges all earlier ones.
                known = max(known, place.get(number + offset, 0))
    return {
        indexed.action(number): arrived.get(number + offset, 0)
        for number in orders[rank]
        for offset in awaited[number // width]
    }
