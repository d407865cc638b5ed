"""Acknowledgements that need no message: which sends a received message proves to have arrived.

    rank 0   F0 S F1 S F2 S      B0 ◄─ once the gradient for B0 is here, F0's message has arrived:
    rank 1         F0 B0 S ─────┘      rank 1 has computed on it before it sent

A rank holds a sent tensor until it has arrived. Every rank knows the program, so a message that
comes also tells which messages its sender had received before: no rank needs to ask, or to wait.
"""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.index import ActionIndex, index_program
from penstock.schedule.program import Program
from penstock.schedule.rules import SENDS

__all__ = ["acknowledgements"]


def acknowledgements(program: Program, rank: int) -> dict[Action, int]:
    """The number of own sends that each received message acknowledges.

    Args:
        program: a checked program with its transfers.
        rank: the rank that sends and receives.

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
    indexed = index_program(program)
    index, width = indexed.index, program.num_microbatches
    target = _targets(index)
    awaited = _awaited_sends(index)
    orders = [[part for step in queue for part in indexed.parts(step)] for queue in indexed.queues]
    own = orders[rank]
    arrived: list[dict[int, int]] = []
    for peer, order in enumerate(orders):
        sent = (number for number in own if target[number // width] == peer != rank)
        place = {number: count for count, number in enumerate(sent, 1)}
        arrived.append(_arrived_at_sends(order, place, target, awaited, width))
    found: dict[Action, int] = {}
    for number in own:
        for offset in awaited[number // width]:
            send = number + offset
            sender = index.placement.rank_of(index.op_and_stage(send // width)[1])
            found[index.action(number)] = arrived[sender].get(send, 0)
    return found


def _arrived_at_sends(
    order: list[int],
    place: dict[int, int],
    target: list[int | None],
    awaited: list[tuple[int, ...]],
    width: int,
) -> dict[int, int]:
    """For each send of a rank, how many of the numbered messages it has waited for by then."""
    known: dict[int, int] = {}
    arrived = 0
    for number in order:
        if target[number // width] is not None:
            known[number] = arrived
        for offset in awaited[number // width]:
            # Messages between two ranks arrive in order: one acknowledges all before it.
            arrived = max(arrived, place.get(number + offset, 0))
    return known


def _targets(index: ActionIndex) -> list[int | None]:
    """For each row of a send, the rank that it sends to; None for all other rows."""
    peers = (index.peer(op, stage) if op in SENDS else None for op, stage in index.rows())
    return [None if peer is None else index.placement.rank_of(peer[1]) for peer in peers]


def _awaited_sends(index: ActionIndex) -> list[tuple[int, ...]]:
    """For each row, the offsets of the sends on other ranks that its actions wait for."""
    table = []
    for (op, stage), receives in zip(index.rows(), index.receives(), strict=True):
        first = index.id(op, stage)
        rows = ((first + offset) // index.num_microbatches for offset in receives)
        peers = (index.peer(*index.op_and_stage(row)) for row in rows)
        table.append(tuple(index.offset(op, stage, peer) for peer in peers if peer is not None))
    return table
