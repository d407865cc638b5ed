"""Puts the sends and receives into a program that says only what is computed.

    rank 0   0F0 0F1 0B0 0B1       0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1       1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

A send stands right after the step that makes the value. A receive is posted one computing step
ahead of the step that uses the value, so that the value travels while the step before computes:
``R(a2) a1 S(a1) R(a3) a2 S(a2)``. It stands earlier only where it must: to keep one order at both
ends of a directed pair of ranks, and where otherwise ranks would wait for each other's receives.
Where a pair of ranks has one channel for both directions, no receive may stand early: then
``penstock.schedule.passes.pair_order`` places all.

This module knows no times: how early is best for given costs is not asked here.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

from penstock.errors import InternalError, ScheduleError
from penstock.schedule.action import Action, Step, action
from penstock.schedule.channels import TWO_WAY, Channels
from penstock.schedule.check import check
from penstock.schedule.coding import Coded, Coding
from penstock.schedule.encoding import encode
from penstock.schedule.passes.pair_order import in_one_order
from penstock.schedule.play import ProgramPlayer
from penstock.schedule.program import CheckedProgram, Program, refuse_no_program
from penstock.schedule.rules import COMPUTE, RECEIVE_FOR, TRANSFERS

__all__ = ["insert_transfers"]

# By key of what is computed: the distance to each send, to its receive, and the receiving rank.
_Sends: TypeAlias = list[list[tuple[int, int, int]]]


def insert_transfers(program: Program, *, channels: Channels = TWO_WAY) -> Program:
    """Add a send and a receive for every value that crosses ranks.

    Keeps the order of all other steps. The result passes ``check``: it ends even where a send
    waits until the matching receive is posted. For it is played that way as it is made; where all
    ranks are stuck, one of them waits in a send (what is computed has no cycle), and its receive
    is posted where the receiving rank then stands. With one channel per pair of ranks, it passes
    ``check(..., channels)`` as well.

    Args:
        program: a program without transfers.
        channels: how messages travel. What is placed for one channel per pair is right over
            channels of any kind, but receives are posted later.

    Returns:
        The program with transfers.

    Raises:
        ScheduleError: it has transfers already, or ``check`` finds problems.

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
            f"program {program.name!r} has transfers already; remove_transfers takes them out"
        )
    if not isinstance(program, CheckedProgram):
        check(program)
    computed = encode(program)
    coding = computed.coding
    sends = _sends_by_key(coding)
    hoisted: list[dict[int, list[int]]] = [{} for _ in program.ranks]
    if channels.per_pair:
        queues = in_one_order(computed, sends)
        planned = Coded(coding=coding, queues=queues, blocks=computed.blocks)
    else:
        queues = _planned(computed, sends)
        planned = Coded(coding=coding, queues=queues, blocks=computed.blocks)
        hoisted = _hoists(planned)
    return program.with_ranks(
        tuple(
            _steps(steps, planned.queues[rank], hoisted[rank], coding)
            for rank, steps in enumerate(program.ranks)
        )
    )


def _planned(computed: Coded, sends: _Sends) -> list[list[int]]:
    """For each rank its codes with transfers where they stand if nobody gets stuck."""
    post_at, messages = _messages(computed, sends)
    arriving: list[list[int]] = [[] for _ in computed.queues]
    for (_, target), channel in messages.items():
        _keep_order(channel, post_at)
        arriving[target] += channel
    queues = []
    for rank, receives in enumerate(arriving):
        # Stable, so that the order within a channel is kept.
        receives.sort(key=post_at.__getitem__)
        places = [post_at[receive] for receive in receives]
        queues.append(_merged(computed, rank, sends, receives, places))
    return queues


def _messages(
    computed: Coded, sends: _Sends
) -> tuple[dict[int, int], dict[tuple[int, int], list[int]]]:
    """Where each receive is posted if order asks for no more, and the receives of each directed
    pair of ranks by order of their sends."""
    coding = computed.coding
    num_microbatches = coding.num_microbatches
    receives = coding.receives()
    is_compute = [op in COMPUTE for op, _ in coding.entries()]
    post_at: dict[int, int] = {}
    messages: dict[tuple[int, int], list[int]] = {}
    for rank, queue in enumerate(computed.queues):
        outgoing: dict[int, list[int]] = {}
        ahead: int | None = None
        for index, code in enumerate(queue):
            for part in (code,) if code >= 0 else computed.parts(code):
                key = part // num_microbatches
                for distance in receives[key]:
                    post_at[part + distance] = index if ahead is None else ahead
                for _, to_receive, target in sends[key]:
                    outgoing.setdefault(target, []).append(part + to_receive)
            if code < 0 or is_compute[code // num_microbatches]:
                ahead = index
        messages.update({(rank, target): channel for target, channel in outgoing.items()})
    return post_at, messages


def _sends_by_key(coding: Coding) -> _Sends:
    table: _Sends = []
    for (op, stage), distances in zip(coding.entries(), coding.sends(), strict=True):
        start = coding.code(op, stage)
        row = []
        for distance in distances:
            send = coding.op_and_stage((start + distance) // coding.num_microbatches)
            receive = coding.partner(*send)
            assert receive is not None, "a send in the table has its receive"
            target = coding.placement.rank_of(receive[1])
            row.append((distance, coding.code(*receive) - start, target))
        table.append(row)
    return table


def _keep_order(channel: list[int], post_at: dict[int, int]) -> None:
    """Post no receive later than those of messages sent after it."""
    earliest = post_at[channel[-1]]
    for receive in reversed(channel):
        earliest = min(earliest, post_at[receive])
        post_at[receive] = earliest


def _merged(
    computed: Coded,
    rank: int,
    sends: _Sends,
    receives: list[int],
    places: list[int],
) -> list[int]:
    """The codes of one rank, with each receive before the step at its place, and the sends."""
    num_microbatches = computed.coding.num_microbatches
    merged: list[int] = []
    posted = 0
    for index, code in enumerate(computed.queues[rank]):
        while posted < len(places) and places[posted] == index:
            merged.append(receives[posted])
            posted += 1
        merged.append(code)
        for part in (code,) if code >= 0 else computed.parts(code):
            for distance, _, _ in sends[part // num_microbatches]:
                merged.append(part + distance)
    return merged


def _hoists(planned: Coded) -> list[dict[int, list[int]]]:
    """For each rank: position in its queue → receives that must be posted there already.

    Of several ranks stuck in a send, the lowest is freed first, so that the result does not hang
    on the order of play. A rank is looked at once each time it stops: linear but for the heap.
    """
    coding = planned.coding
    player = ProgramPlayer(planned, coding.needs(transfers=True))
    hoisted: list[dict[int, list[int]]] = [{} for _ in planned.queues]
    stopped: list[int] = []
    looked_at = 0
    while not player.play():
        # A rank comes to a send by taking the step before, so it is in a run since last time.
        for rank, _, _ in player.runs[looked_at:]:
            heapq.heappush(stopped, rank)
        looked_at = len(player.runs)
        receive = _unposted(player, stopped, coding)
        target = coding.placement.rank_of(receive.stage)
        code = coding.code(receive.op, receive.stage, receive.microbatch or 0)
        hoisted[target].setdefault(player.positions[target], []).append(code)
        player.do(code)
    return hoisted


def _unposted(player: ProgramPlayer, stopped: list[int], coding: Coding) -> Action:
    """The receive that the lowest rank stuck in a send waits for."""
    while stopped:
        awaited = player.awaits[heapq.heappop(stopped)]
        if awaited is not None:
            wanted = coding.action(awaited)
            if wanted.op in RECEIVE_FOR.values():
                return wanted
    raise InternalError("a program that can be computed is stuck, and no rank waits in a send")


def _steps(
    computed: tuple[Step, ...], queue: list[int], hoisted: dict[int, list[int]], coding: Coding
) -> tuple[Step, ...]:
    """The steps of one rank: the computed ones as they are, transfers put between them."""
    num_microbatches = coding.num_microbatches
    transfers = coding.transfers_by_key()
    early = {code for codes in hoisted.values() for code in codes}
    kept = iter(computed)
    steps: list[Step] = []
    for position, code in enumerate(queue):
        if position in hoisted:
            steps += [coding.action(receive) for receive in hoisted[position]]
        transfer = None if code < 0 else transfers[code // num_microbatches]
        if transfer is None:
            steps.append(next(kept))
        elif code not in early:
            op, stage = transfer
            steps.append(action(stage, op, code % num_microbatches))
    return tuple(steps)
