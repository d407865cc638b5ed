"""Places transfers where a pair of ranks has one channel for both directions.

Over such a channel (``Channels(per_pair=True)``) a receive that is posted holds up the sends after
it until its message is there. So both ends must have the messages of both directions in one
order, and no receive may stand before a send that its message depends on. One clock for all ranks
gives such an order: every step takes as long as it computes something (F, I and W one unit each),
starts as soon as it can, and a message stands, at both ends, where it is sent.

    rank 0   0F0 0F1 .   .   0B0 0B1     0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1   .   1F0 1B0 --- 1F1 1B1     1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

Whoever waits for a message waits for what is earlier by the clock alone, whatever the costs are
in truth: ranks can't wait in a circle, even where sends wait for receives.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import Op
from penstock.schedule.coding import Coded
from penstock.schedule.play import ProgramPlayer

__all__ = ["in_one_order"]

# By the clock: what is not computed takes no time, and sends nothing.
_UNITS = {
    Op.FORWARD: 1,
    Op.FULL_BACKWARD: 2,
    Op.INPUT_GRAD: 1,
    Op.WEIGHT_GRAD: 1,
    Op.RECOMPUTE: 1,
}


def in_one_order(
    computed: Coded, sends: Sequence[Sequence[tuple[int, int, int]]]
) -> list[list[int]]:
    """For each rank its codes with transfers, the messages of a pair in one order at both ends.

    Args:
        computed: a program without transfers that plays to its end.
        sends: by key of what is computed: the distance to each send, to its receive, and the
            rank that receives.
    """
    starts, ends = _clock(computed)
    # For each rank its transfers: time, what tells messages of one time apart, the transfer.
    transfers: list[list[tuple[int, int, int]]] = [[] for _ in computed.queues]
    width = computed.coding.num_microbatches
    for rank, queue in enumerate(computed.queues):
        for code, end in zip(queue, ends[rank], strict=True):
            for part in computed.parts(code):
                for to_send, to_receive, target in sends[part // width]:
                    message = part + to_receive
                    transfers[rank].append((end, message, part + to_send))
                    transfers[target].append((end, message, message))
    return [
        _merged(queue, starts[rank], sorted(transfers[rank]))
        for rank, queue in enumerate(computed.queues)
    ]


def _merged(
    queue: list[int], starts: list[int], transfers: list[tuple[int, int, int]]
) -> list[int]:
    """The steps of a rank, each with what is sent and received before it starts in front of it."""
    merged: list[int] = []
    placed = 0
    for code, start in zip(queue, starts, strict=True):
        while placed < len(transfers) and transfers[placed][0] <= start:
            merged.append(transfers[placed][2])
            placed += 1
        merged.append(code)
    return merged + [transfer for _, _, transfer in transfers[placed:]]


def _clock(computed: Coded) -> tuple[list[list[int]], list[list[int]]]:
    """When each step of each rank starts and ends."""
    coding = computed.coding
    width = coding.num_microbatches
    units = [_UNITS.get(op, 0) for op, _ in coding.entries()]
    needs, gives = coding.needs(transfers=False), coding.gives()
    in_sequence = coding.needs_in_sequence()
    done: dict[int, int] = {}
    starts: list[list[int]] = [[] for _ in computed.queues]
    ends: list[list[int]] = [[] for _ in computed.queues]
    player = ProgramPlayer(computed, needs)
    assert player.play(), "only what plays to its end is given transfers"
    for rank, first, stop in player.runs:
        for code in computed.queues[rank][first:stop]:
            time = ends[rank][-1] if ends[rank] else 0
            parts = computed.parts(code)
            for part in parts:
                for distance in needs[part // width]:
                    time = max(time, done[part + distance])
                if part in in_sequence:
                    time = max(time, done[in_sequence[part]])
            starts[rank].append(time)
            time += sum(units[part // width] for part in parts)
            ends[rank].append(time)
            for part in parts:
                for distance in gives[part // width]:
                    done[part + distance] = time
    return starts, ends
