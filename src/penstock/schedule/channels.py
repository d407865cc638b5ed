"""Channels between ranks: message orders, deadlocks and implicit acknowledgements.

    one channel per direction        one channel per pair of ranks (Channels(per_pair=True))
    rank 0  ══ F0 F1 ══►  rank 1     rank 0  ══ F0 B0 F1 B1 ══  rank 1
            ◄══ B0 B1 ══             what is posted first goes first, either way

A send blocks until the matching receive is posted. Posting a receive never blocks; the action that
uses the message does. With one channel per pair, such as an NCCL communicator that runs operations
in order, a send also waits for all receives posted earlier on the same channel by its own rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from penstock.errors import ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.index import IndexedProgram, index_program
from penstock.schedule.program import Program
from penstock.schedule.replay import DependencyReplay, replay_of
from penstock.schedule.rules import SENDS

__all__ = [
    "TWO_WAY",
    "Channels",
    "acknowledgements",
    "blocking_replay",
    "message_orders",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The channels that messages between ranks travel over.

    Args:
        per_pair: True if a pair of ranks shares one in-order channel for both directions; False for
            one channel per direction.
    """

    per_pair: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.per_pair, bool):
            raise ScheduleError(f"Channels(per_pair={self.per_pair!r}): expected True or False")


TWO_WAY = Channels()
"""The runtime's requirement: no buffering of messages, and no common order for both directions."""


def blocking_replay(
    program: IndexedProgram, channels: Channels, *, transfers: bool
) -> DependencyReplay:
    """A replay, not played yet, in which sends block if the program has ``transfers``."""
    if not transfers:
        return replay_of(program, program.required())
    more = _earlier_receives(program) if channels.per_pair else None
    return replay_of(program, program.blocking(), more=more)


def _earlier_receives(program: IndexedProgram) -> dict[int, tuple[int, ...]]:
    """For each send, the message of the last receive before it on the same pair of ranks."""
    transfers, width = program.transfers(), program.num_microbatches
    found: dict[int, tuple[int, ...]] = {}
    # By rank and peer, the message of the last receive.
    awaited: dict[tuple[int, int], int] = {}
    for number in filter((0).__le__, chain(*program.queues)):
        transfer = transfers[number // width]
        if transfer is not None:
            pair = transfer.rank, transfer.peer
            if not transfer.is_send:
                awaited[pair] = number + transfer.offset
            elif pair in awaited:
                found[number] = (awaited[pair],)
    return found


def message_orders(program: IndexedProgram) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
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
