"""Plays a program over costs: a heap of events keyed (time, rank).

An event is a rank that comes to its next step. If all that the step needs is under way or done,
its start and end are known and the rank's next event is the end; otherwise the rank is parked at
the first result that is missing, and woken when that result's time is known.

    events     (0, rank 0) ─► 0F0 [0, 1] ─► (1, rank 0) ─► 0F1 [1, 2] ─► ...
                                │ wakes
    parked     rank 1 at 1F0 ───┴─────────► (1, rank 1) ─► 1F0 [1, 2] ─► ...

Ties in time go to the lower rank, so that a simulation is the same on every machine. This module
knows no family of schedules and nothing of real time.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import compress
from operator import sub
from typing import TypeAlias

from penstock.errors import ScheduleError, Where
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE
from penstock.simulate.channels import add_copies, add_jitter, add_messages
from penstock.simulate.costs import Costs, as_number
from penstock.simulate.pieces import join_pieces
from penstock.simulate.result import Simulation
from penstock.simulate.tables import Tables, tabulate

__all__ = ["simulate"]

_UNIT = Costs()
_Times: TypeAlias = tuple[tuple[float, ...], ...]


def simulate(
    program: Program, costs: Costs = _UNIT, *, jitter: float = 0.0, seed: int = 0
) -> Simulation:
    """Play ``program`` as ranks would that do nothing but wait for what each step needs.

    Results go to other ranks ``costs.latency`` after they are there, or later where the costs tell
    of a bandwidth, whether the program spells out its sends and receives or not; a send takes no
    compute time unless ``costs.transfers_overlap`` says so, and a posted receive blocks nothing
    but the action that needs its message. A block that overlaps a forward and a backward starts
    when all its parts can, and yields all their results at its end.

    Args:
        program: compute-only or with transfers.
        costs: what each kind of action costs; by default 1 each, and no latency.
        jitter: each computation takes longer by chance, evenly by up to this share of its cost.
        seed: of the jitter; the same seed gives the same times.

    Returns:
        The times of all actions, and the figures that follow from them.

    Raises:
        ScheduleError: the program can't go on (the message says who waits for what), or does
            something twice; or there are costs for another number of stages; or a jitter that is
            no number ≥ 0; or what is given is no program, or no costs.

    Example:
        >>> from penstock.schedule.registry import build
        >>> result = simulate(build("gpipe", ranks=4, microbatches=8))
        >>> result.makespan, result.peak_in_flight
        (33.0, (8, 8, 8, 8))
    """
    refuse_no_program(program, "simulate()")
    if not isinstance(costs, Costs):
        raise ScheduleError(
            f"simulate() takes costs, not {costs!r}; penstock.Costs(forward=..., "
            "input_grad=..., weight_grad=...) makes them"
        )
    share = as_number(jitter)
    if not 0 <= share < math.inf:
        raise ScheduleError(
            f"simulate: jitter={jitter!r} must be a finite number ≥ 0", parameter="jitter"
        )
    plain = tabulate(program, costs)
    tables = add_messages(add_copies(plain, program, costs), program, costs)
    tables = add_jitter(tables, share, seed) if share else tables
    engine = _Engine(join_pieces(tables, program))
    engine.play()
    if engine.parked or engine.posted:
        # Whether a program ends is no matter of times: told of steps alone, messages left out.
        engine = _Engine(join_pieces(plain, program))
        engine.play()
        raise engine.deadlock()
    return engine.result(program, costs)


class _Engine:
    """The state of one simulation."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        ranks = range(len(tables.entries))
        self.events = [(0.0, rank) for rank in ranks if tables.entries[rank]]
        # When the result of each slot is there for its own rank; None as long as not known.
        self.done: list[float | None] = [None] * tables.num_slots
        # Slot of a missing result → the ranks that wait for it.
        self.parked: dict[int, list[int]] = {}
        # Slot of a missing send → its receive, posted already: slot, rank, place in `ends`.
        self.posted: dict[int, tuple[int, int, int]] = {}
        self.position = [0 for _ in ranks]
        # Per rank, of each action in turn, blocks taken apart.
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]

    def play(self) -> None:
        """Take every rank through its steps, events in order of time and rank."""
        tables, done, events = self.tables, self.done, self.events
        # One name each, and no calls but the heap's: the loop below runs once per action.
        width, receives, needs = tables.width, tables.receives, tables.needs
        durations, fulfils = tables.durations, tables.fulfils
        entries, position, starts, ends = tables.entries, self.position, self.starts, self.ends
        parked, posted = self.parked, self.posted
        while events:
            start, rank = heappop(events)
            slot = entries[rank][position[rank]]
            if not isinstance(slot, int):
                self.play_block(start, rank, slot)
                continue
            row = slot // width
            if receives[row]:
                self.post(start, rank, slot, row)
                continue
            for offset, delay in needs[row]:
                ready = done[slot + offset]
                if ready is None:
                    parked.setdefault(slot + offset, []).append(rank)
                    break
                if ready + delay > start:
                    start = ready + delay
            else:
                end = start + durations[row]
                starts[rank].append(start)
                ends[rank].append(end)
                for offset in fulfils[row]:
                    result = slot + offset
                    if done[result] is not None or result in parked or result in posted:
                        self.settle(result, end)
                    else:
                        done[result] = end
                position[rank] += 1
                if position[rank] < len(entries[rank]):
                    heappush(events, (end, rank))

    def play_block(self, start: float, rank: int, slots: tuple[int, ...]) -> None:
        """Run the parts of a block together, if all can run."""
        tables = self.tables
        rows = [slot // tables.width for slot in slots]
        parts = list(zip(slots, rows, strict=True))
        inner = {slot + offset for slot, row in parts for offset in tables.fulfils[row]}
        for slot, row in parts:
            for offset, delay in tables.needs[row]:
                if slot + offset in inner:
                    continue
                ready = self.done[slot + offset]
                if ready is None:
                    self.parked.setdefault(slot + offset, []).append(rank)
                    return
                start = max(start, ready + delay)
        serial = sum(tables.durations[row] for row in rows)
        given = tables.overlaps[rows[0]]
        length = serial if given is None else given
        end = start + length
        for slot, row in parts:
            # Each part is given the share of the block's time that it would have alone.
            share = tables.durations[row] / serial if serial else 1 / len(parts)
            self.starts[rank].append(start)
            start += share * length
            self.ends[rank].append(start)
            self.finish(slot, row, end)
        self.ends[rank][-1] = end
        self.proceed(rank, end)

    def post(self, start: float, rank: int, slot: int, row: int) -> None:
        """Post a receive: it ends when the message is there, and the rank goes on at once."""
        ((offset, delay),) = self.tables.needs[row]
        sent = self.done[slot + offset]
        self.starts[rank].append(start)
        self.ends[rank].append(start if sent is None else max(start, sent + delay))
        if sent is None:
            self.posted[slot + offset] = (slot, rank, len(self.ends[rank]) - 1)
        else:
            self.finish(slot, row, self.ends[rank][-1])
        self.proceed(rank, start)

    def finish(self, slot: int, row: int, end: float) -> None:
        """Settle all that an action fulfils."""
        for offset in self.tables.fulfils[row]:
            self.settle(slot + offset, end)

    def settle(self, slot: int, end: float) -> None:
        """Note the time of a result, and wake who waits for it."""
        if self.done[slot] is not None:
            if slot < self.tables.coding.size:
                raise self.doubled(slot)
            return  # a message or a copy: what makes it comes twice, and is told of then
        self.done[slot] = end
        for rank in self.parked.pop(slot, ()):
            heappush(self.events, (end, rank))
        if slot in self.posted:
            receive, rank, place = self.posted.pop(slot)
            row = receive // self.tables.width
            ((_, delay),) = self.tables.needs[row]
            self.ends[rank][place] = end + delay
            self.finish(receive, row, end + delay)

    def proceed(self, rank: int, free: float) -> None:
        """Let the rank come to its next step, if it has one, at time ``free``."""
        self.position[rank] += 1
        if self.position[rank] < len(self.tables.entries[rank]):
            heappush(self.events, (free, rank))

    def doubled(self, slot: int) -> ScheduleError:
        """The error for what is done a second time."""
        act = self.tables.coding.action(slot)
        where = Where(stage=act.stage, microbatch=act.microbatch, action=str(act))
        return ScheduleError("done twice in the program; take one of the two out", where=where)

    def deadlock(self) -> ScheduleError:
        """The error for a program that can't go on: who waits for what."""
        tables, planned = self.tables, set[int]()
        for entry in (entry for steps in tables.entries for entry in steps):
            for slot in (entry,) if isinstance(entry, int) else entry:
                row = slot // tables.width
                planned.update(slot + offset for offset in tables.fulfils[row])
        waits = []
        for missing, ranks in self.parked.items():
            why = "comes only later" if missing in planned else "is not in the program"
            for rank in sorted(ranks):
                place, steps = self.position[rank], tables.entries[rank]
                entry = steps[place]
                slots = (entry,) if isinstance(entry, int) else entry
                at = ";".join(str(tables.coding.action(slot)) for slot in slots)
                waits.append(
                    f"rank {rank}, step {place} of {len(steps)} ({at}) waits for "
                    f"{tables.coding.action(missing)}, which {why}"
                )
        for missing, (receive, rank, _) in self.posted.items():
            waits.append(
                f"rank {rank} ({tables.coding.action(receive)}) waits for "
                f"{tables.coding.action(missing)}, to which its rank does not come"
            )
        return ScheduleError("the program can't go on:\n  " + "\n  ".join(sorted(waits)))

    def result(self, program: Program, costs: Costs) -> Simulation:
        """The figures, once all ranks are through."""
        starts, ends = self.times(program)
        firsts, lasts, busy = [], [], []
        for rank, steps in enumerate(program.ranks):
            begun, done = starts[rank], ends[rank]
            if not self.tables.computes_only:
                computes = [part.op in COMPUTE for step in steps for part in step.parts]
                begun, done = tuple(compress(begun, computes)), tuple(compress(done, computes))
            busy.append(float(sum(map(sub, done, begun))))
            if begun:
                firsts.append(begun[0])
                lasts.append(done[-1])
        return Simulation(
            program=program,
            costs=costs,
            starts=starts,
            ends=ends,
            makespan=max(lasts, default=0.0) - min(firsts, default=0.0),
            span=max((b - a for a, b in zip(firsts, lasts, strict=True)), default=0.0),
            busy_per_rank=tuple(busy),
        )

    def times(self, program: Program) -> tuple[_Times, _Times]:
        """Starts and ends of the ranks' actions; those of a copy are the copy's own."""
        starts, ends = self.starts[: program.num_ranks], self.ends[: program.num_ranks]
        tables = self.tables
        aside = {}
        for queue in range(program.num_ranks, len(tables.entries)):
            alone = (s for s in tables.entries[queue] if isinstance(s, int))
            for slot, start, end in zip(alone, self.starts[queue], self.ends[queue], strict=True):
                row, microbatch = divmod(slot, tables.width)
                if row in tables.shown_as:
                    aside[tables.shown_as[row] * tables.width + microbatch] = start, end
        if tables.extra_steps:
            num_actions = tables.coding.size
            for rank in range(program.num_ranks):
                entries = tables.entries[rank]
                slots = [s for e in entries for s in ((e,) if isinstance(e, int) else e)]
                times = zip(slots, starts[rank], ends[rank], strict=True)
                kept = [aside.get(slot, (a, b)) for slot, a, b in times if slot < num_actions]
                starts[rank], ends[rank] = [a for a, _ in kept], [b for _, b in kept]
        return tuple(map(tuple, starts)), tuple(map(tuple, ends))
