"""What a channel between two ranks does to those that send over it: the model of a proof.

    capacity   0        a send waits until the matching receive is posted (rendezvous)
               k        up to k messages wait at the receiver; the next send waits
               None     a send never waits

    one channel per direction        one channel per pair of ranks
    rank 0  ══ F0 F1 ══►  rank 1     rank 0  ══ F0 B0 F1 B1 ══  rank 1
            ◄══ B0 B1 ══             what is posted first goes first, either way

Over a channel per pair, such as a communicator of NCCL that runs what it is given in order, a
send also waits until the receives that its rank has posted before over the same channel have
their messages. Posting a receive never waits: what uses the message does. This module plays
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.coding import Coded, Distances
from penstock.schedule.rules import RECEIVE_FOR

__all__ = ["TWO_WAY", "Channels", "waits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """How messages between ranks travel.

    Args:
        capacity: how many messages may be sent before their receives are posted, over each
            channel and direction: 0 for a rendezvous, None for any number.
        per_pair: whether a pair of ranks has one channel for both directions, which keeps the
            order in which either end uses it; if not, one for each direction.

    Raises:
        ScheduleError: a capacity below 0, or one that is no whole number; ``per_pair`` is neither
            True nor False.

    Example:
        >>> Channels() == Channels(capacity=0, per_pair=False)
        True
    """

    capacity: int | None = 0
    per_pair: bool = False

    def __post_init__(self) -> None:
        given = self.capacity
        is_number = isinstance(given, int) and not isinstance(given, bool)
        if given is not None and not (is_number and given >= 0):
            raise ScheduleError(
                f"Channels(capacity={given!r}): expected a whole number from 0 on, or None"
            )
        if not isinstance(self.per_pair, bool):
            raise ScheduleError(f"Channels(per_pair={self.per_pair!r}): expected True or False")


TWO_WAY = Channels()
"""What the runtime needs: it counts neither on room for messages nor on one order for both ways."""


def waits(coded: Coded, channels: Channels) -> tuple[Distances, dict[int, list[int]]]:
    """What steps of a program with transfers wait for.

    Args:
        coded: the program.
        channels: how messages travel.

    Returns:
        By key, what must be done before an action (as ``Coding.needs``); and for single codes,
        the codes that must be done beside that.
    """
    coding = coded.coding
    needs = coding.needs(transfers=True)
    more: dict[int, list[int]] = {}
    if channels.capacity != 0:
        _free_sends(coded, needs)
        _use_after_posting(coded, more)
        if channels.capacity is not None:
            _limit(coded, channels.capacity, more)
    if channels.per_pair:
        _take_turns(coded, more)
    return needs, more


def _free_sends(coded: Coded, needs: Distances) -> None:
    """Let no send wait for its receive."""
    coding, size = coded.coding, coded.coding.num_microbatches
    receives = RECEIVE_FOR.values()
    for key, (op, stage) in enumerate(coding.entries()):
        partner = coding.partner(op, stage)
        if partner is not None and op not in receives:
            posted = coding.code(*partner) - key * size
            needs[key] = tuple(distance for distance in needs[key] if distance != posted)


def _use_after_posting(coded: Coded, more: dict[int, list[int]]) -> None:
    """Let what uses a message wait for its receive: that it was sent says nothing of that."""
    size, receives = coded.coding.num_microbatches, coded.coding.receives()
    for queue in coded.queues:
        for code in queue:
            for part in coded.parts(code):
                for distance in receives[part // size]:
                    more.setdefault(part, []).append(part + distance)


def _limit(coded: Coded, capacity: int, more: dict[int, list[int]]) -> None:
    """Let each send wait for the receive of the message ``capacity`` before its own."""
    for sends, receives in _directions(coded).values():
        for send, posted in zip(sends[capacity:], receives, strict=False):
            more.setdefault(send, []).append(posted)


def _take_turns(coded: Coded, more: dict[int, list[int]]) -> None:
    """Let each send wait for the message of the last receive before it over the same pair."""
    size, ends = coded.coding.num_microbatches, _ends(coded)
    for queue in coded.queues:
        awaited: dict[int, int] = {}
        for code in queue:
            end = ends[code // size] if code >= 0 else None
            if end is None:
                continue
            peer, distance, sends = end
            if not sends:
                awaited[peer] = code + distance
            elif peer in awaited:
                more.setdefault(code, []).append(awaited[peer])


def _directions(coded: Coded) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """For each directed pair of ranks, its sends and its receives, each by order."""
    size, ends = coded.coding.num_microbatches, _ends(coded)
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for rank, queue in enumerate(coded.queues):
        for code in queue:
            end = ends[code // size] if code >= 0 else None
            if end is not None:
                peer, _, sends = end
                pair = (rank, peer) if sends else (peer, rank)
                found.setdefault(pair, ([], []))[not sends].append(code)
    return found


def _ends(coded: Coded) -> list[tuple[int, int, bool] | None]:
    """By key of a transfer: the other rank, the distance to the other end, and if it sends."""
    coding, size = coded.coding, coded.coding.num_microbatches
    found: list[tuple[int, int, bool] | None] = []
    for key, transfer in enumerate(coding.transfers_by_key()):
        partner = None if transfer is None else coding.partner(*transfer)
        if transfer is None or partner is None:
            found.append(None)
            continue
        peer = coding.placement.rank_of(partner[1])
        distance = coding.code(*partner) - key * size
        found.append((peer, distance, transfer[0] not in RECEIVE_FOR.values()))
    return found
