"""Replay a fixed order: each step starts once its queue is free and its needs are complete.

    queue 0   F0 ─► F1 ─► ·  ·  ·  B0       0 waits for the gradient of 1: it is parked, queue 1
    queue 1      ╲► F0 ─► B0 ─╱             goes on, and the end of B0 wakes queue 0 again

Each rank has a queue, and so has each channel between ranks if the caller adds it. The times do not
depend on the order in which queues advance, so one replay finds deadlocks, the order of steps and
their times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from penstock.schedule.index import IndexedProgram, Offsets

__all__ = ["DependencyReplay", "RowNeeds", "blocking_replay", "needed_results"]

RowNeeds: TypeAlias = Sequence[Sequence[tuple[int, float]]]
"""By row, the offset of each prerequisite, and the delay from its end to its arrival."""


def needed_results(
    fulfilled: Offsets, needs: RowNeeds, width: int, more: Iterable[int] = ()
) -> Offsets:
    """``fulfilled`` without the results that no action needs, and that need no record.

    ``more`` gives further ids that are needed.
    """
    needed = {row + offset // width for row, each in enumerate(needs) for offset, _ in each}
    needed.update(number // width for number in more)
    return [
        tuple(offset for offset in offsets if row + offset // width in needed)
        for row, offsets in enumerate(fulfilled)
    ]


def blocking_replay(program: IndexedProgram, *, transfers: bool) -> DependencyReplay:
    """A replay without times, not played yet; each send of a program with ``transfers`` blocks
    until the matching receive is posted."""
    required = program.blocking() if transfers else program.required()
    chunks = program.required_chunks()
    width = program.num_microbatches
    needs = [tuple((offset, 0.0) for offset in row) for row in required]
    fulfilled = needed_results(program.fulfilled(), needs, width, chunks.values())
    # The ids in reach of those that occur: most programs have no use for most ids.
    last = max(program.ids(), default=0) // width
    reach = (max((0, *required[row], *fulfilled[row])) // width + row for row in range(last + 1))
    return DependencyReplay(
        program.queues,
        program.overlapped,
        num_ids=(1 + max(reach)) * width,
        width=width,
        needs=needs,
        fulfilled=fulfilled,
        more=chunks,
    )


class DependencyReplay:
    """A replay of several queues with dependencies between them.

    Args:
        queues: for each queue the ids of its steps; ``~i`` stands for overlapped pair i.
        overlapped: for each overlapped pair the ids of its actions.
        num_ids: number of ids; every id is smaller.
        width: ids per row.
        needs: by row, the prerequisites of an action.
        fulfilled: by row, the offsets of the ids that are complete when an action is.
        more: by id, further ids that must be complete before; their results arrive at once.
        durations: by row; None if nothing takes time.
        overlap_durations: by row of a pair's first action, the time of the pair; None for the sum
            of both times.

    Attributes:
        done: by id, the end of the action; -1.0 while incomplete.
        starts: for each queue the starts of its actions in order, with pairs taken apart; empty
            without durations.
        ends: for each queue the ends of its actions.
        positions: for each queue the position of its next step.
        awaits: for each queue the id that its next step waits for, or None.
        turns: the queues in the order in which they advanced, with repetitions.
    """

    def __init__(
        self,
        queues: Sequence[Sequence[int]],
        overlapped: Sequence[Sequence[int]],
        *,
        num_ids: int,
        width: int,
        needs: RowNeeds,
        fulfilled: Sequence[Sequence[int]],
        more: Mapping[int, int] | None = None,
        durations: Sequence[float] | None = None,
        overlap_durations: Sequence[float] | None = None,
    ) -> None:
        self._queues, self._overlapped, self._width = queues, overlapped, width
        self._timed, self._more = durations is not None, more or {}
        durations = durations or [0.0] * len(fulfilled)
        self._rows = list(zip(needs, durations, fulfilled, strict=True))
        self._overlap_durations = overlap_durations
        # By id of a missing result, the queues that wait for it.
        self._waiting: dict[int, list[int]] = {}
        self._ready = deque(range(len(queues)))
        self.done = [-1.0] * num_ids
        self.starts: list[list[float]] = [[] for _ in queues]
        self.ends: list[list[float]] = [[] for _ in queues]
        self.positions = [0] * len(queues)
        self.awaits: list[int | None] = [None] * len(queues)
        self.turns: list[int] = []
        self._stops: list[int] = []
        self._running = [self._advance(number) for number in range(len(queues))]

    def play(self) -> bool:
        """Run each queue until it ends or waits; return True if all queues have ended."""
        ready, running, positions = self._ready, self._running, self.positions
        waiting, awaits, turns, stops = self._waiting, self.awaits, self.turns, self._stops
        while ready:
            number = ready.popleft()
            first = positions[number]
            missing = awaits[number] = next(running[number], None)
            if missing is not None:
                waiting.setdefault(missing, []).append(number)
            if positions[number] > first:
                # Integers, not tuples: the garbage collector would track thousands of those.
                turns.append(number)
                stops.append(positions[number])
        return not waiting

    def _advance(self, number: int) -> Iterator[int]:
        """Run a queue to its end; yield each missing id that it waits for."""
        # Local variables and few calls, since the loop below runs once per action.
        queue, starts, ends = self._queues[number], self.starts[number], self.ends[number]
        done, waiting, ready, positions = self.done, self._waiting, self._ready, self.positions
        rows, width, more, timed = self._rows, self._width, self._more, self._timed
        free = 0.0
        for place, step in enumerate(queue):
            start = free
            if step < 0:
                parts = self._overlapped[~step]
                for missing, delay in self._needs_of(parts):
                    while done[missing] < 0.0:
                        positions[number] = place
                        yield missing
                    start = max(start, done[missing] + delay)
                free = self._play_pair(number, parts, start)
                continue
            needs, duration, fulfilled = rows[step // width]
            if more and step in more:
                needs = (*needs, (more[step] - step, 0.0))
            for offset, delay in needs:
                arrival = done[step + offset]
                while arrival < 0.0:
                    positions[number] = place
                    yield step + offset
                    arrival = done[step + offset]
                if timed and arrival + delay > start:
                    start = arrival + delay
            if timed:
                free = start + duration
                starts.append(start)
                ends.append(free)
            for offset in fulfilled:
                result = step + offset
                done[result] = free
                if result in waiting:
                    ready.extend(waiting.pop(result))
        positions[number] = len(queue)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Uninterrupted runs of steps, as (queue, start, stop), in a valid sequential order."""
        reached = [0] * len(self._queues)
        for number, stop in zip(self.turns, self._stops, strict=True):
            yield number, reached[number], stop
            reached[number] = stop

    def fulfil(self, step: int, time: float = 0.0) -> None:
        """Complete an action out of order, and wake the queues that wait for it."""
        for offset in self._rows[step // self._width][2]:
            result = step + offset
            self.done[result] = time
            if result in self._waiting:
                self._ready.extend(self._waiting.pop(result))

    def _needs_of(self, parts: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The prerequisites of a pair, and the delays of their results."""
        for part in parts:
            for offset, delay in self._rows[part // self._width][0]:
                yield part + offset, delay
            if part in self._more:
                yield self._more[part], 0.0

    def _play_pair(self, number: int, parts: Sequence[int], start: float) -> float:
        """Run the actions of a pair together; return their end."""
        durations = [self._rows[part // self._width][1] for part in parts]
        serial = length = sum(durations)
        if self._overlap_durations is not None:
            length = self._overlap_durations[parts[0] // self._width]
        end = start + length
        if self._timed:
            for duration in durations:
                # The time of the pair is divided in proportion to its actions' own times.
                self.starts[number].append(start)
                start += (duration / serial if serial else 1 / len(parts)) * length
                self.ends[number].append(start)
            self.ends[number][-1] = end
        for part in parts:
            self.fulfil(part, end)
        return end
