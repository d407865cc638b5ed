"""Channels between ranks: message orders, deadlocks and implicit acknowledgements.

    one channel per direction        one channel per pair of ranks (Channels(per_pair=True))
    rank 0  ══ F0 F1 ══►  rank 1     rank 0  ══ F0 B0 F1 B1 ══  rank 1
            ◄══ B0 B1 ══             what is posted first goes first, either way

A send blocks until the matching receive is posted. Posting a receive never blocks; the action that
uses the message does. With one channel per pair, such as an NCCL communicator that runs operations
in order, a send also waits for all receives posted earlier on the same channel by its own rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, action
from penstock.schedule.index import ActionIndex, IndexedProgram, index_program
from penstock.schedule.messages import Problem
from penstock.schedule.program import Program
from penstock.schedule.replay import DependencyReplay, replay_of
from penstock.schedule.rules import COVERS, SEND_OF, SENDS, TRANSFERS, prerequisites

__all__ = [
    "TWO_WAY",
    "Channels",
    "MessageOrders",
    "acknowledgements",
    "blocking_replay",
    "message_orders",
    "order_problems",
    "places_of",
    "problem_at",
    "stuck_problems",
]

MessageOrders: TypeAlias = dict[tuple[int, int], tuple[list[int], list[int]]]
"""By directed pair of ranks (from, to), the ids of its receives, once in the order of their sends
and once in the order of posting."""

StepPlace: TypeAlias = tuple[int, int]
"""A rank and the index of one of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The channels that messages between ranks travel over.

    Args:
        per_pair: True if a pair of ranks shares one in-order channel for both directions; False for
            one channel per direction.

    Raises:
        ScheduleError: ``per_pair`` is neither True nor False.
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
    """A replay of a program in which sends block; not played yet.

    Args:
        program: the program.
        channels: the channels of messages.
        transfers: True if the program has explicit sends and receives.
    """
    if not transfers:
        return replay_of(program, program.index.required())
    more = _turns(program) if channels.per_pair else None
    return replay_of(program, program.index.blocking(), more=more)


def _turns(program: IndexedProgram) -> dict[int, tuple[int, ...]]:
    """For each send, the message of the last receive before it on the same pair of ranks."""
    transfers, width = _transfers(program.index), program.index.num_microbatches
    found: dict[int, tuple[int, ...]] = {}
    for queue in program.queues:
        awaited: dict[int, int] = {}
        for number in queue:
            transfer = transfers[number // width] if number >= 0 else None
            if transfer is not None:
                peer, offset, sends = transfer
                if not sends:
                    awaited[peer] = number + offset
                elif peer in awaited:
                    found[number] = (awaited[peer],)
    return found


def message_orders(program: IndexedProgram) -> MessageOrders:
    """The messages of each directed pair of ranks, in the order of each end."""
    index, width = program.index, program.index.num_microbatches
    orders: MessageOrders = {}
    # By row of transfers: the list for its ids, and the offset to the receive.
    lists: list[tuple[list[int], int] | None] = []
    for (_, stage), transfer in zip(index.rows(), _transfers(index), strict=True):
        if transfer is None:
            lists.append(None)
            continue
        here, (there, offset, sends) = index.placement.rank_of(stage), transfer
        pair = (here, there) if sends else (there, here)
        found = orders.setdefault(pair, ([], []))
        lists.append((found[0], offset) if sends else (found[1], 0))
    for queue in program.queues:
        for number in queue:
            target = lists[number // width] if number >= 0 else None
            if target is not None:
                target[0].append(number + target[1])
    return orders


def _transfers(index: ActionIndex) -> list[tuple[int, int, bool] | None]:
    """By row of transfers: the peer's rank, the offset to the peer's id, and True for sends."""
    found: list[tuple[int, int, bool] | None] = []
    for op, stage in index.rows():
        peer = index.peer(op, stage)
        if peer is None:
            found.append(None)
        else:
            rank = index.placement.rank_of(peer[1])
            found.append((rank, index.offset(op, stage, peer), op in SENDS))
    return found


def order_problems(
    program: Program, orders: MessageOrders, index: ActionIndex
) -> Iterator[Problem]:
    """The first order mismatch between the two ends of each directed pair of ranks."""
    places = dict(places_of(program))
    for (source, target), (sent, posted) in sorted(orders.items()):
        for k, (by_send, by_post) in enumerate(zip(sent, posted, strict=True)):
            if by_send != by_post:
                receive, expected = index.action(by_post), index.action(by_send)
                send = prerequisites(expected, program.placement, transfers=True)[0]
                message = (
                    f"{receive} is posted as number {k} of the messages from rank {source}, "
                    f"which sends {send} (its step {places[send][1]}) as number {k}; post "
                    f"{expected} here, so that both ends have the same order"
                )
                yield problem_at(program, (target, places[receive][1]), message)
                break


def stuck_problems(
    program: Program, replay: DependencyReplay, index: ActionIndex
) -> Iterator[Problem]:
    """The actions that precede a prerequisite on their own rank, followed by the waits of ranks.

    Args:
        program: the program.
        replay: its deadlocked replay.
        index: the ids of its actions.
    """
    # By action: the action that completes it (itself, or B for I and W), and its position.
    providers: dict[Action, tuple[Action, StepPlace]] = {}
    for act, place in places_of(program):
        providers[act] = act, place
        for op in COVERS.get(act.op, ()):
            providers[action(act.stage, op, act.microbatch)] = act, place
    told = set()
    for place, message in _too_early(program, providers):
        told.add(place)
        yield problem_at(program, place, message)
    for rank, awaited in enumerate(replay.awaits):
        place = rank, replay.positions[rank]
        if awaited is None or place in told:
            continue
        wanted, (other, there) = providers[index.action(awaited)]
        reached = replay.positions[other]
        verb = "post" if wanted.op in SEND_OF else "do"
        message = (
            f"deadlock: waits for rank {other} to {verb} {wanted} (its step {there}), and "
            f"rank {other} is stuck at step {reached} ({program.ranks[other][reached]})"
        )
        yield problem_at(program, place, message)


def _too_early(
    program: Program, providers: dict[Action, tuple[Action, StepPlace]]
) -> Iterator[tuple[StepPlace, str]]:
    transfers = any(act.op in TRANSFERS for act in providers)
    for act, (rank, step) in places_of(program):
        for needed in prerequisites(
            act, program.placement, transfers=transfers, num_splits=program.num_splits
        ):
            if needed not in providers:
                yield (rank, step), f"{act} needs {needed}, which is not in the program"
                continue
            provider, (other, there) = providers[needed]
            if other == rank and there >= step:
                late = "is in the same pair" if there == step else f"comes only at step {there}"
                yield (rank, step), f"{act} needs {provider}, which {late}"


def places_of(program: Program) -> Iterator[tuple[Action, StepPlace]]:
    """Every action with its rank and step, rank by rank."""
    for rank, steps in enumerate(program.ranks):
        for number, step in enumerate(steps):
            for act in step.parts:
                yield act, (rank, number)


def problem_at(program: Program, place: StepPlace, message: str) -> Problem:
    """A problem at a place."""
    rank, step = place
    return Problem(rank=rank, step=step, action=str(program.ranks[rank][step]), message=message)


def acknowledgements(program: Program, rank: int) -> dict[Action, int]:
    """The number of sends that each received message acknowledges.

        rank 0   F0 S F1 S F2 S      B0 ◄─ when the gradient for B0 is here, F0's message arrived:
        rank 1         F0 B0 S ─────┘      rank 1 has computed on it before it sent

    A rank keeps a sent tensor until it has arrived. Every rank knows the program, so a received
    message implies which messages its sender had received before. No extra communication is needed.

    Args:
        program: a checked program with its transfers.
        rank: the rank that sends and receives.

    Returns:
        For each computation of ``rank`` that waits for a message: the number of this rank's sends
        to the message's sender, from the step's start, that are known to have arrived.

    Example:
        >>> from penstock.schedule.passes import lower
        >>> from penstock.schedule.registry import build
        >>> program = lower(build("1f1b", ranks=2, microbatches=3))
        >>> {str(a): n for a, n in acknowledgements(program, 0).items()}
        {'0B0': 1, '0B1': 2, '0B2': 3}
    """
    indexed = index_program(program)
    index, width = indexed.index, program.num_microbatches
    ops = [op for op, _ in index.rows()]
    # By row: the receiving rank of a send, and the offsets of the sends that an action waits for.
    target = [t[0] if t is not None and t[2] else None for t in _transfers(index)]
    awaited = [
        [offset for offset in offsets if ops[(row * width + offset) // width] in SENDS]
        for row, offsets in enumerate(index.blocking())
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
        index.action(number): arrived.get(number + offset, 0)
        for number in orders[rank]
        for offset in awaited[number // width]
    }
