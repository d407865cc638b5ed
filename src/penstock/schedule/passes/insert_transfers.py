"""Insert sends and receives into a program of computations.

    rank 0   0F0 0F1 0B0 0B1       0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1       1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

A send stands right after the step that makes the value. A receive is posted one computing step
ahead of the step that uses the value, so that the value travels while the step before computes:
``R(a2) a1 S(a1) R(a3) a2 S(a2)``. It is posted earlier only if necessary: to keep the same order at
both ends of a directed pair of ranks, or to prevent a deadlock of ranks that wait for each other's
receives. If a pair of ranks has one channel for both directions, no receive may be posted early,
and ``penstock.schedule.passes.pair_order`` places all transfers.

This module knows no times, so it does not optimize how early receives are posted.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

from penstock.errors import InternalError, ScheduleError
from penstock.schedule.action import Step, action
from penstock.schedule.channels import TWO_WAY, Channels, blocking_replay
from penstock.schedule.check import check
from penstock.schedule.index import ActionIndex, IndexedProgram, index_program
from penstock.schedule.passes.pair_order import in_one_order
from penstock.schedule.program import CheckedProgram, Program, refuse_no_program
from penstock.schedule.replay import DependencyReplay
from penstock.schedule.rules import COMPUTE, SEND_OF, TRANSFERS

__all__ = ["insert_transfers"]

# By row of computations: for each send, its offset, its receive's offset and the receiving rank.
_Sends: TypeAlias = list[list[tuple[int, int, int]]]


def insert_transfers(program: Program, *, channels: Channels = TWO_WAY) -> Program:
    """Insert a send and a receive for every value that crosses ranks.

    Keeps the order of all other steps. The result passes ``check``: it completes even if a send
    blocks until the matching receive is posted. A replay of the program finds deadlocks.
    Computations have no cycle, so some rank of a deadlock waits in a send; its receive is then
    posted at the current step of the receiving rank. With one channel per pair of ranks, the result
    passes ``check(..., channels)`` as well.

    Args:
        program: a program without transfers.
        channels: the channels of messages. A program for one channel per pair is valid over
            channels of any kind, but posts its receives later.

    Returns:
        The program with transfers.

    Raises:
        ScheduleError: the program already has transfers, or ``check`` finds problems.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(insert_transfers(parse_csv("0F0,0B0\\n1F0,1B0\\n"))), end="")
        0RECV_B0,0F0,0SEND_F0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
        >>> one = Channels(per_pair=True)
        >>> made = insert_transfers(parse_csv("0F0,0B0\\n1F0,1B0\\n"), channels=one)
        >>> print(format_csv(made), end="")
        0F0,0SEND_F0,0RECV_B0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
    """
    refuse_no_program(program, "insert_transfers()")
    if any(act.op in TRANSFERS for act in program.actions()):
        raise ScheduleError(
            f"program {program.name!r} has transfers already; take its sends and receives out, or "
            "leave this pass out"
        )
    if not isinstance(program, CheckedProgram):
        check(program)
    computed = index_program(program)
    index = computed.index
    sends = _sends_by_row(index)
    hoisted: list[dict[int, list[int]]] = [{} for _ in program.ranks]
    queues = (in_one_order if channels.per_pair else _placed)(computed, sends)
    placed = IndexedProgram(index=index, queues=queues, overlapped=computed.overlapped)
    if not channels.per_pair:
        hoisted = _hoists(placed)
    return program.with_ranks(
        tuple(
            _steps(steps, queues[rank], hoisted[rank], index)
            for rank, steps in enumerate(program.ranks)
        )
    )


def _placed(computed: IndexedProgram, sends: _Sends) -> list[list[int]]:
    """For each rank its ids with transfers, in their final places unless a rank deadlocks."""
    post_at, messages = _messages(computed, sends)
    arriving: list[list[int]] = [[] for _ in computed.queues]
    for (_, target), channel in messages.items():
        # No receive is posted later than receives of messages sent after it.
        earliest = post_at[channel[-1]]
        for receive in reversed(channel):
            earliest = post_at[receive] = min(earliest, post_at[receive])
        arriving[target] += channel
    queues = []
    for rank, receives in enumerate(arriving):
        # Stable, so that the order within a channel is kept.
        receives.sort(key=post_at.__getitem__)
        places = [post_at[receive] for receive in receives]
        queues.append(_merged(computed, rank, sends, receives, places))
    return queues


def _messages(
    computed: IndexedProgram, sends: _Sends
) -> tuple[dict[int, int], dict[tuple[int, int], list[int]]]:
    """The place of each receive as far as order alone demands, and the receives of each directed
    pair of ranks by order of their sends."""
    width = computed.index.num_microbatches
    receives = computed.index.receives()
    is_compute = [op in COMPUTE for op, _ in computed.index.rows()]
    post_at: dict[int, int] = {}
    messages: dict[tuple[int, int], list[int]] = {}
    for rank, queue in enumerate(computed.queues):
        outgoing: dict[int, list[int]] = {}
        ahead: int | None = None
        for place, step in enumerate(queue):
            for part in (step,) if step >= 0 else computed.parts(step):
                row = part // width
                for offset in receives[row]:
                    post_at[part + offset] = place if ahead is None else ahead
                for _, to_receive, target in sends[row]:
                    outgoing.setdefault(target, []).append(part + to_receive)
            if step < 0 or is_compute[step // width]:
                ahead = place
        messages.update({(rank, target): channel for target, channel in outgoing.items()})
    return post_at, messages


def _sends_by_row(index: ActionIndex) -> _Sends:
    table: _Sends = []
    for (op, stage), offsets in zip(index.rows(), index.sends(), strict=True):
        start = index.id(op, stage)
        row = []
        for offset in offsets:
            send = index.op_and_stage((start + offset) // index.num_microbatches)
            receive = index.peer(*send)
            assert receive is not None, "a send in the table has its receive"
            target = index.placement.rank_of(receive[1])
            row.append((offset, index.offset(op, stage, receive), target))
        table.append(row)
    return table


def _merged(
    computed: IndexedProgram,
    rank: int,
    sends: _Sends,
    receives: list[int],
    places: list[int],
) -> list[int]:
    """The ids of one rank, with sends, and with each receive before the step at its place."""
    width = computed.index.num_microbatches
    merged: list[int] = []
    posted = 0
    for place, step in enumerate(computed.queues[rank]):
        while posted < len(places) and places[posted] == place:
            merged.append(receives[posted])
            posted += 1
        merged.append(step)
        for part in (step,) if step >= 0 else computed.parts(step):
            for offset, _, _ in sends[part // width]:
                merged.append(part + offset)
    return merged


def _hoists(placed: IndexedProgram) -> list[dict[int, list[int]]]:
    """For each rank, a mapping from queue position to receives that must be posted by then.

    Of several ranks blocked in a send, the lowest is unblocked first, so that the result does not
    depend on the order of the replay. A rank is examined once each time it stops, so the cost is
    linear except for the heap.
    """
    index = placed.index
    # By row of receives, the rank that posts the receive.
    posts = [
        index.placement.rank_of(stage) if op in SEND_OF else None for op, stage in index.rows()
    ]
    replay = blocking_replay(placed, TWO_WAY, transfers=True)
    hoisted: list[dict[int, list[int]]] = [{} for _ in placed.queues]
    stopped: list[int] = []
    looked_at = 0
    while not replay.play():
        # A rank reaches a send by completing the previous step, so it appears in a run since the
        # last check.
        for rank in replay.turns[looked_at:]:
            heapq.heappush(stopped, rank)
        looked_at = len(replay.turns)
        receive, target = _unposted(replay, stopped, posts, index.num_microbatches)
        hoisted[target].setdefault(replay.positions[target], []).append(receive)
        replay.fulfil(receive)
    return hoisted


def _unposted(
    replay: DependencyReplay, stopped: list[int], posts: list[int | None], width: int
) -> tuple[int, int]:
    """The receive awaited by the lowest rank blocked in a send, and the rank that posts it."""
    while stopped:
        missing = replay.awaits[heapq.heappop(stopped)]
        target = None if missing is None else posts[missing // width]
        if missing is not None and target is not None:
            return missing, target
    raise InternalError("a program that can be computed is stuck, and no rank waits in a send")


def _steps(
    computed: tuple[Step, ...], queue: list[int], hoisted: dict[int, list[int]], index: ActionIndex
) -> tuple[Step, ...]:
    """The steps of one rank: the computed steps, with transfers in between."""
    width = index.num_microbatches
    transfers = [(op, stage) if op in TRANSFERS else None for op, stage in index.rows()]
    early = {number for numbers in hoisted.values() for number in numbers}
    kept = iter(computed)
    steps: list[Step] = []
    for position, number in enumerate(queue):
        if position in hoisted:
            steps += map(index.action, hoisted[position])
        transfer = None if number < 0 else transfers[number // width]
        if transfer is None:
            steps.append(next(kept))
        elif number not in early:
            op, stage = transfer
            steps.append(action(stage, op, number % width))
    return tuple(steps)
