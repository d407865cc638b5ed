"""Place transfers if a pair of ranks has one channel for both directions.

On such a channel (``Channels(per_pair=True)``) a posted receive blocks later sends until its
message arrives. So both ends must have the messages of both directions in the same order, and no
receive may precede a send that its message depends on. A replay of the program gives such an order.
F, I and W take one unit each, every step starts as soon as possible, and both ends order messages
by the time of sending.

    rank 0   0F0 0F1 .   .   0B0 0B1     0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1   .   1F0 1B0 --- 1F1 1B1     1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

A rank that waits for a message waits for an earlier action of the replay, whatever the true costs.
So there is no deadlock, even if sends wait for receives.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import Op
from penstock.schedule.index import IndexedProgram
from penstock.schedule.replay import replay_of

__all__ = ["in_one_order"]

# Other ops take no time in the replay, and send nothing.
_UNITS = {
    Op.FORWARD: 1,
    Op.FULL_BACKWARD: 2,
    Op.INPUT_GRAD: 1,
    Op.WEIGHT_GRAD: 1,
    Op.RECOMPUTE: 1,
}


def in_one_order(
    computed: IndexedProgram, sends: Sequence[Sequence[tuple[int, int, int]]]
) -> list[list[int]]:
    """For each rank its ids with transfers, in the same order at both ends of each pair of ranks.

    Args:
        computed: a program without transfers and deadlocks.
        sends: by row of computations: for each send, its offset, its receive's offset and the
            receiving rank.
    """
    index, width = computed.index, computed.index.num_microbatches
    units = [_UNITS.get(op, 0) for op, _ in index.rows()]
    replay = replay_of(computed, index.required(), durations=units)
    ended = replay.play()
    assert ended, "only a program that runs to its end is given transfers"
    # For each rank its transfers: the time, the message (to break ties), the transfer.
    transfers: list[list[tuple[float, int, int]]] = [[] for _ in computed.queues]
    for rank, queue in enumerate(computed.queues):
        for step in queue:
            for part in computed.parts(step):
                for to_send, to_receive, target in sends[part // width]:
                    end, message = replay.done[part], part + to_receive
                    transfers[rank].append((end, message, part + to_send))
                    transfers[target].append((end, message, message))
    return [
        _merged(computed, queue, replay.starts[rank], sorted(transfers[rank]))
        for rank, queue in enumerate(computed.queues)
    ]


def _merged(
    computed: IndexedProgram,
    queue: list[int],
    starts: list[float],
    transfers: list[tuple[float, int, int]],
) -> list[int]:
    """The steps of a rank, each after the transfers of messages sent before its start."""
    merged: list[int] = []
    placed = 0
    first = 0
    for step in queue:
        start = starts[first]
        first += len(computed.parts(step))
        while placed < len(transfers) and transfers[placed][0] <= start:
            merged.append(transfers[placed][2])
            placed += 1
        merged.append(step)
    return merged + [transfer for _, _, transfer in transfers[placed:]]
