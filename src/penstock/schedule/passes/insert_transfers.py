"""Insert sends and receives into a program of computations.

    rank 0   0F0 0F1 0B0 0B1       0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1       1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

A send stands right after the step that makes the value. A receive is posted one computing step
ahead of the step that uses the value, so that the value travels while the step before computes, or
earlier: to keep the same order at both ends of a directed pair of ranks, or to prevent a deadlock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace
from itertools import chain

from penstock.errors import InternalError
from penstock.schedule.action import Action, action
from penstock.schedule.check import check
from penstock.schedule.index import IndexedProgram, index_program
from penstock.schedule.program import CheckedProgram, Program, refuse_present
from penstock.schedule.replay import blocking_replay
from penstock.schedule.rules import COMPUTE, TRANSFERS

__all__ = ["insert_transfers"]


def insert_transfers(program: Program) -> Program:
    """Insert a send and a receive for every value that crosses ranks.

    Keeps the order of all other steps. The result passes ``check``: it completes even if a send
    blocks until the matching receive is posted.

    Args:
        program: a program without transfers.

    Raises:
        ScheduleError: the program already has transfers, or ``check`` finds problems.

    Examples:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(insert_transfers(parse_csv("0F0,0B0\\n1F0,1B0\\n"))), end="")
        0RECV_B0,0F0,0SEND_F0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
    """
    refuse_present(program, TRANSFERS, "insert_transfers()")
    if not isinstance(program, CheckedProgram):
        check(program)
    computed = index_program(program)
    width = program.num_microbatches
    # By id, the action of a transfer; None for other ids and, counted from the end, for pairs.
    made: list[Action | None] = [None] * computed.size
    for row, transfer in enumerate(computed.transfers()):
        if transfer is not None:
            op, stage = computed.op_and_stage(row)
            made[row * width : (row + 1) * width] = [action(stage, op, m) for m in range(width)]
    ranks = []
    for steps, queue in zip(program.ranks, _just_ahead(computed), strict=True):
        kept = iter(steps)
        ranks.append([made[number] or next(kept) for number in queue])
    return program.with_ranks(ranks)


def _just_ahead(computed: IndexedProgram) -> list[list[int]]:
    """For each rank its ids, with each receive one step ahead, or earlier if necessary."""
    width, receives, sends = computed.num_microbatches, computed.receives(), computed.sends()
    computes = [op in COMPUTE for op, _ in computed.rows()]
    # The place of each receive, and the receives of directed pairs of ranks by order of sending.
    post_at: dict[int, int] = {}
    messages: dict[tuple[int, int], list[int]] = {}
    for rank, queue in enumerate(computed.queues):
        ahead: int | None = None
        outgoing: defaultdict[int, list[int]] = defaultdict(list)
        for place, step in enumerate(queue):
            for part in (step,) if step >= 0 else computed.parts(step):
                row = part // width
                for offset in receives[row]:
                    post_at[part + offset] = place if ahead is None else ahead
                if (send := sends[row]) is not None:
                    outgoing[send[2]].append(part + send[1])
            if step < 0 or computes[step // width]:
                ahead = place
        messages.update({(rank, target): channel for target, channel in outgoing.items()})
    # By rank its receives; without a container per place, for the garbage collector's sake.
    arriving: list[list[int]] = [[] for _ in computed.queues]
    for (_, target), channel in messages.items():
        # No receive is posted later than receives of messages sent after it.
        earliest = post_at[channel[-1]]
        for receive in reversed(channel):
            earliest = post_at[receive] = min(earliest, post_at[receive])
        arriving[target] += channel
    queues = []
    for queue, receives_here in zip(computed.queues, arriving, strict=True):
        merged: list[int] = []
        # From the last to the first, to be popped; those of one place by rank of origin.
        unposted = sorted(receives_here, key=post_at.__getitem__)[::-1]
        for place, step in enumerate(queue):
            while unposted and post_at[unposted[-1]] == place:
                merged.append(unposted.pop())
            merged.append(step)
            for part in (step,) if step >= 0 else computed.parts(step):
                if (send := sends[part // width]) is not None:
                    merged.append(part + send[0])
        queues.append(merged)
    return _without_deadlock(replace(computed, queues=queues))


def _without_deadlock(placed: IndexedProgram) -> list[list[int]]:
    """The queues, with receives moved ahead where ranks would wait for each other.

    Computations have no cycle, so some rank of a deadlock waits in a send; its receive is posted at
    the current step of the receiving rank. The lowest blocked rank is unblocked first, so that the
    result does not depend on the order of the replay.
    """
    width = placed.num_microbatches
    # By row of receives, the rank that posts the receive.
    posts = [None if each is None or each.is_send else each.rank for each in placed.transfers()]
    replay = blocking_replay(placed, transfers=True)
    # By rank and place in its queue, the receives moved there.
    moved: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    stopped: list[int] = []
    looked_at = 0
    while not replay.play():
        # A rank reaches a send by completing the previous step, so it has had a turn since the
        # last check.
        for rank in replay.turns[looked_at:]:
            heapq.heappush(stopped, rank)
        looked_at = len(replay.turns)
        receive = target = None
        while target is None:
            if not stopped:
                raise InternalError("a valid program is stuck, and no rank waits in a send")
            receive = replay.awaits[heapq.heappop(stopped)]
            target = None if receive is None else posts[receive // width]
        assert receive is not None
        moved[target][replay.positions[target]].append(receive)
        replay.fulfil(receive)
    queues = list(placed.queues)
    for rank, by_place in moved.items():
        early = set(chain(*by_place.values()))
        queues[rank] = [
            number
            for place, step in enumerate(queues[rank])
            for number in (*by_place.get(place, ()), *(() if step in early else (step,)))
        ]
    return queues
