"""What tables take up where costs ask for more than a delay: messages in turn, and jitter.

A message that has to wait for another one, or that holds up its rank, is a row of its own, after
those of the actions. The engine plays a channel between two ranks as it plays a rank:

    rank 0         F0   F1   F2                     one message at a time
    rank 0 → 1        ▬▬▬▬▬▬ ▬▬▬▬▬▬ ▬▬▬▬▬▬

    rank 0         F0 ▬▬▬▬▬▬ F1 ▬▬▬▬▬▬ F2 ▬▬▬▬▬▬    transfers that do not overlap

What uses a message needs its row then, and not the action that made it. Copies to the host and
back have two channels of each rank, out and back; the backward waits for what it needs of them:

    rank 0         F0 F1 F2 ·  B2 B1 B0
    out               ▬▬▬0
    back                    ▬▬▬0

These are functions from tables to tables; what costs do not ask for costs the engine nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from random import Random
from typing import TypeVar

from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, COPIES, INPUT_GRADS, RECEIVE_FOR
from penstock.simulate.costs import Costs
from penstock.simulate.tables import Entry, Tables

__all__ = ["add_copies", "add_jitter", "add_messages", "per_action"]

_COPIES = (Op.OFFLOAD, Op.RELOAD)
_T = TypeVar("_T")


def add_messages(tables: Tables, program: Program, costs: Costs) -> Tables:
    """Give messages their own time, where they wait for each other or hold up their rank.

    Args:
        tables: as ``tabulate`` makes them.
        program: the program of the tables.
        costs: the costs of the tables.

    Returns:
        Tables in which messages are rows, or in which sends take time; the same ones where
        messages are delays and nothing more.
    """
    inline = not costs.transfers_overlap
    if costs.bandwidth is None or not (inline or costs.one_message_at_a_time):
        return tables
    if inline and program.has_transfers:
        return _with_slow_sends(tables, program, costs)
    rows = tables
    feeds: dict[int, tuple[int, int]] = {}
    forward, backward = Op.FORWARD, Op.INPUT_GRAD
    if program.has_transfers:
        forward, backward = Op.SEND_F, Op.SEND_B
    for op, offset in ((forward, +1), (backward, -1)):
        rows = _with_rows_of_messages(rows, program, costs, op, offset, feeds)
    return replace(
        rows,
        entries=_entries(tables, feeds, inline, program.num_ranks),
        extra_steps=inline or tables.extra_steps,
    )


def _with_rows_of_messages(
    tables: Tables,
    program: Program,
    costs: Costs,
    op: Op,
    offset: int,
    feeds: dict[int, tuple[int, int]],
) -> Tables:
    """A row per stage for the message that ``op`` makes, which goes ``offset`` stages on.

    Args:
        tables: without these rows.
        program: the program of the tables.
        costs: the costs of the tables.
        op: what makes the message.
        offset: to which stage it goes.
        feeds: filled in: the row of an action that makes a message → the message's row, and the
            rank that it goes to.
    """
    size, width, placement = tables.num_stages, tables.width, program.placement
    key = tables.coding.row
    first = len(tables.durations)
    needs, durations = list(tables.needs), [0.0] * size
    for stage in range(size):
        row, message = key(op, stage), first + stage
        other = placement.neighbour(stage, offset)
        needs.append((((row - message) * width, 0.0),))
        if other is None or placement.same_rank(stage, other):
            continue
        durations[stage] = costs.transfer(stage, other, num_stages=size)
        latency = costs.latency_between(stage, other, num_stages=size)
        feeds[row] = message, placement.rank_of(other)
        if op is Op.INPUT_GRAD:
            feeds[key(Op.FULL_BACKWARD, stage)] = feeds[row]
        for user in (key(taker, other) for taker in _takers(op)):
            needs[user] = tuple(
                ((message - user) * width, latency)
                if user + distance // width == row
                else (distance, delay)
                for distance, delay in needs[user]
            )
    return _with_rows(replace(tables, needs=tuple(needs[:first])), needs[first:], durations)


def add_copies(tables: Tables, program: Program, costs: Costs) -> Tables:
    """Let copies run beside the compute, and backwards wait for those that they need.

    Args:
        tables: as ``tabulate`` makes them.
        program: the program of the tables.
        costs: the costs of the tables.

    Returns:
        Tables in which OFFLOAD and RELOAD only begin a copy; the same ones where there are none.
    """
    if tables.computes_only or not any(act.op in COPIES for act in program.actions()):
        return tables
    size, width, first = tables.num_stages, tables.width, len(tables.durations)
    out, back, ready = (range(first + n * size, first + (n + 1) * size) for n in range(3))
    offload, reload = costs.copies(num_stages=size)

    def after(row: int, before: int) -> tuple[int, float]:
        return (before - row) * width, 0.0

    stages = range(size)
    begins = [[tables.coding.row(op, stage) for stage in stages] for op in _COPIES]
    needs = [
        *[(after(out[s], begins[0][s]),) for s in stages],
        # A copy back waits for its copy out as well: they have channels of their own.
        *[(after(back[s], begins[1][s]), after(back[s], out[s])) for s in stages],
        *[(after(ready[s], back[s]),) for s in stages],
    ]
    return replace(
        _with_rows(tables, needs, [*offload, *reload, *[0.0] * size]),
        entries=_entries_with_copies(tables, program, out, back, ready),
        extra_steps=True,
        shown_as=dict(zip((*out, *back), (*begins[0], *begins[1]), strict=True)),
    )


def _entries_with_copies(
    tables: Tables, program: Program, out: range, back: range, ready: range
) -> tuple[list[Entry], ...]:
    """The ranks' steps, those that take back what is copied after it; then each rank's channels.

    Args:
        tables: without copies.
        program: the program of the tables.
        out: for each stage, the row of its copies to the host.
        back: likewise, of its copies back.
        ready: likewise, of steps that wait for a copy back.
    """
    width = tables.width
    reloaded = {(a.stage, a.microbatch) for a in program.actions() if a.op is Op.RELOAD}
    ranks: list[list[Entry]] = []
    channels: list[list[Entry]] = []
    for entries in tables.entries:
        steps: list[Entry] = []
        outwards: list[Entry] = []
        backwards: list[Entry] = []
        for entry in entries:
            for slot in (entry,) if isinstance(entry, int) else entry:
                row, microbatch = divmod(slot, width)
                op, stage = tables.coding.op_and_stage(row)
                if op is Op.OFFLOAD:
                    outwards.append(out[stage] * width + microbatch)
                elif op is Op.RELOAD:
                    backwards.append(back[stage] * width + microbatch)
                elif op in INPUT_GRADS and (stage, microbatch) in reloaded:
                    steps.append(ready[stage] * width + microbatch)
            steps.append(entry)
        ranks.append(steps)
        channels += outwards, backwards
    return (*ranks, *channels)


def add_jitter(tables: Tables, jitter: float, seed: int) -> Tables:
    """Let each computation take longer by chance: by up to ``jitter`` of its cost, evenly.

    Args:
        tables: any tables.
        jitter: the most by which an action gets longer, as a share of its cost.
        seed: the same seed gives the same times.

    Returns:
        Tables with a row for each action.
    """
    width, random = tables.width, Random(seed).random
    computing = {row for row, (op, _) in enumerate(tables.coding.rows()) if op in COMPUTE}
    # Rows after those of the ops are messages and copies, which keep their time.
    durations = tuple(
        cost * (1 + jitter * random()) if row in computing else cost
        for row, cost in enumerate(tables.durations)
        for _ in range(width)
    )
    overlaps = tuple(
        None if cost is None else cost * (1 + jitter * random())
        for cost in tables.overlaps
        for _ in range(width)
    )
    return replace(per_action(tables), durations=durations, overlaps=overlaps)


def per_action(tables: Tables) -> Tables:
    """The same tables with a row for each action.

    Args:
        tables: with rows for all microbatches.
    """
    width = tables.width

    def each(values: tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(chain.from_iterable(map(repeat, values, repeat(width))))

    return replace(
        tables,
        width=1,
        needs=each(tables.needs),
        fulfils=each(tables.fulfils),
        receives=each(tables.receives),
        durations=each(tables.durations),
        overlaps=each(tables.overlaps),
        shown_as={
            row * width + m: action * width + m
            for row, action in tables.shown_as.items()
            for m in range(width)
        },
    )


def _with_rows(
    tables: Tables, needs: Sequence[tuple[tuple[int, float], ...]], durations: Sequence[float]
) -> Tables:
    """Tables with more rows, none of them an action's."""
    new = len(needs)
    return replace(
        tables,
        needs=(*tables.needs, *needs),
        fulfils=(*tables.fulfils, *[(0,)] * new),
        durations=(*tables.durations, *durations),
        overlaps=(*tables.overlaps, *[None] * new),
        receives=(*tables.receives, *[False] * new),
    )


def _takers(op: Op) -> tuple[Op, ...]:
    """The ops that wait for a message which ``op`` makes."""
    match op:
        case Op.FORWARD:
            return (Op.FORWARD,)
        case Op.INPUT_GRAD:
            return (Op.INPUT_GRAD, Op.FULL_BACKWARD)
        case _:
            return tuple(RECEIVE_FOR.values())


def _entries(
    tables: Tables, feeds: dict[int, tuple[int, int]], inline: bool, num_ranks: int
) -> tuple[list[Entry], ...]:
    """The steps of all ranks with their messages: among them, or in queues of their own."""
    width = tables.width
    ranks: list[list[Entry]] = []
    channels: dict[tuple[int, int], list[Entry]] = {}
    for rank, entries in enumerate(tables.entries[:num_ranks]):
        steps: list[Entry] = []
        for entry in entries:
            steps.append(entry)
            for slot in (entry,) if isinstance(entry, int) else entry:
                row, microbatch = divmod(slot, width)
                if row in feeds:
                    message, target = feeds[row]
                    place = steps if inline else channels.setdefault((rank, target), [])
                    place.append(message * width + microbatch)
        ranks.append(steps)
    others = tables.entries[num_ranks:]
    return (*ranks, *others, *(channels[pair] for pair in sorted(channels)))


def _with_slow_sends(tables: Tables, program: Program, costs: Costs) -> Tables:
    """Sends that are steps of their rank take the transfer's time; its receive, the latency."""
    size, placement, key = tables.num_stages, program.placement, tables.coding.row
    needs, durations = list(tables.needs), list(tables.durations)
    for receive, send, offset in ((Op.RECV_F, Op.SEND_F, -1), (Op.RECV_B, Op.SEND_B, +1)):
        for stage in range(size):
            row, source = key(receive, stage), placement.neighbour(stage, offset)
            if source is not None:
                latency = costs.latency_between(source, stage, num_stages=size)
                needs[row] = tuple((distance, latency) for distance, _ in needs[row])
                sending = costs.transfer(source, stage, num_stages=size)
                durations[key(send, source)] = sending
    return replace(tables, needs=tuple(needs), durations=tuple(durations))
