"""Draws the smallest part of a program that shows why it can't be played.

    the shortest circle of waiting, the step that each rank is at in brackets:
      rank 0   0F0 0SEND_F0 0F1 [0SEND_F1] 0RECV_B0   waits for 1RECV_F1 of rank 1
      rank 1   1RECV_F0 1F0 1B0 [1SEND_B0] 1RECV_F1   waits for 0RECV_B0 of rank 0

Each row goes on to the step that the rank before it in the circle waits for, so that it can be
seen why it does not come. This module decides nothing: it is given a play that is stuck.
"""

from __future__ import annotations

from collections import deque

from penstock.schedule.action import Action
from penstock.schedule.coding import Coding, MessageOrders
from penstock.schedule.play import ProgramPlayer
from penstock.schedule.program import Program
from penstock.schedule.rules import COVERS

__all__ = ["circle_of", "disorder_of"]

# Steps shown before the one that a rank is at, and the most from there to the awaited one.
_BEFORE = 3
_BETWEEN = 4

_Waits = dict[int, dict[int, int]]


def circle_of(program: Program, player: ProgramPlayer, coding: Coding) -> str:
    """The shortest circle of ranks that wait for each other, a row for each.

    Args:
        program: the program.
        player: its play, stuck.
        coding: the numbering of the codes.
    """
    # For each stuck rank: a rank that it waits for → the code that it waits for.
    waits: _Waits = {}
    for rank in range(program.num_ranks):
        for code in player.lacking(rank):
            other = coding.placement.rank_of(coding.action(code).stage)
            waits.setdefault(rank, {}).setdefault(other, code)
    circle = min((_circle_from(rank, waits) for rank in waits), key=len)
    rows = []
    for place, rank in enumerate(circle):
        before, after = circle[place - 1], circle[(place + 1) % len(circle)]
        steps = _steps_to(program, player, rank, coding.action(waits[before][rank]))
        awaited, _ = _giver(program, player, after, coding.action(waits[rank][after]))
        whose = "its own" if after == rank else f"rank {after}"
        rows.append((f"rank {rank}", steps, f"waits for {awaited} of {whose}"))
    title = "\n  the shortest circle of waiting, the step that each rank is at in brackets:"
    return title + _aligned(rows)


def disorder_of(orders: MessageOrders, coding: Coding) -> str:
    """The messages of the first directed pair of ranks whose two ends have another order.

    Args:
        orders: of a program's messages.
        coding: the numbering of the codes.
    """
    for (source, target), (sent, posted) in sorted(orders.items()):
        differ = (k for k, (one, two) in enumerate(zip(sent, posted, strict=True)) if one != two)
        first = next(differ, None)
        if first is not None:
            shown = slice(first, first + _BETWEEN)
            rows = [
                (f"rank {rank} {verb}", " ".join(str(coding.action(c)) for c in codes[shown]), "")
                for rank, verb, codes in (
                    (source, "sends, for", sent),
                    (target, "posts", posted),
                )
            ]
            return f"\n  the messages, from number {first} on:" + _aligned(rows)
    return ""


def _circle_from(start: int, waits: _Waits) -> list[int]:
    """The shortest way of waiting from a rank back to itself; all ranks if there is none."""
    origin: dict[int, int] = {}
    ready = deque([start])
    while ready:
        rank = ready.popleft()
        for other in waits.get(rank, ()):
            if other == start:
                circle = [rank]
                while circle[-1] != start:
                    circle.append(origin[circle[-1]])
                return circle[::-1]
            if other not in origin:
                origin[other] = rank
                ready.append(other)
    return [*waits, start]


def _giver(
    program: Program, player: ProgramPlayer, rank: int, wanted: Action
) -> tuple[Action, int]:
    """What gives an awaited action on its rank, such as B where I is awaited, and at which step."""
    at = player.positions[rank]
    for index, step in enumerate(program.ranks[rank][at:], at):
        for part in step.parts:
            alike = (part.stage, part.microbatch) == (wanted.stage, wanted.microbatch)
            if alike and wanted.op in (part.op, *COVERS.get(part.op, ())):
                return part, index
    return wanted, at


def _steps_to(program: Program, player: ProgramPlayer, rank: int, wanted: Action) -> str:
    """The steps of a rank from a little before the one that it is at to an awaited one."""
    steps, at = program.ranks[rank], player.positions[rank]
    _, last = _giver(program, player, rank, wanted)
    begin = max(0, at - _BEFORE)
    words = ["…"] if begin else []
    words += [str(step) for step in steps[begin:at]]
    words.append(f"[{steps[at]}]")
    between = [str(step) for step in steps[at + 1 : last + 1]]
    if len(between) > _BETWEEN:
        between = [*between[: _BETWEEN - 2], "…", between[-1]]
    return " ".join(words + between)


def _aligned(rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = (f"    {a:{widths[0]}}   {b:{widths[1]}}   {c}".rstrip() for a, b, c in rows)
    return "".join(f"\n{line}" for line in lines)
