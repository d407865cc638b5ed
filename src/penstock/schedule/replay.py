"""Replays a fixed order: every step starts as soon as its queue is free and its needs are complete.

    queue 0   F0 ─► F1 ─► ·  ·  ·  B0       0 waits for the gradient of 1: it is parked, queue 1
    queue 1      ╲► F0 ─► B0 ─╱             goes on, and the end of B0 wakes queue 0 again

Queues are those of ranks, and of channels between them if the caller adds such. A time follows
from earlier times alone, and what can be reached does not depend on which queue goes first, so one
replay decides whether a program ends, in which order, and when. The checker, the passes, the
simulator and the search all replay with this class. It judges nothing and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from penstock.schedule.index import IndexedProgram, Offsets

__all__ = ["DependencyReplay", "RowNeeds", "replay_of"]

RowNeeds: TypeAlias = Sequence[Sequence[tuple[int, float]]]
"""For each row, the offset of each prerequisite, and the delay from its end to its arrival."""


def replay_of(
    program: IndexedProgram,
    required: Offsets,
    *,
    more: Mapping[int, Sequence[int]] | None = None,
    durations: Sequence[float] | None = None,
) -> DependencyReplay:
    """A replay of a program whose results are usable at once, yet to be played.

    Args:
        program: the program.
        required: by row, the offsets of the prerequisites; those between sequence chunks are
            added here.
        more: by id, further ids that must be complete before.
        durations: by row; None if nothing takes time.
    """
    width, fulfilled = program.index.num_microbatches, program.index.fulfilled()
    needs: list[tuple[tuple[int, float], ...]]
    needs = [tuple((offset, 0.0) for offset in row) for row in required]
    chunks = program.index.required_chunks()
    if more or chunks:
        # These requirements differ from microbatch to microbatch: each gets a row of its own.
        needs = [row for row in needs for _ in range(width)]
        fulfilled = [row for row in fulfilled for _ in range(width)]
        if durations is not None:
            durations = [duration for duration in durations for _ in range(width)]
        width = 1
        for number, other in chunks.items():
            needs[number] += ((other - number, 0.0),)
        for number, others in (more or {}).items():
            needs[number] += tuple((other - number, 0.0) for other in others)
    return DependencyReplay(
        program.queues,
        program.overlapped,
        num_ids=program.index.size,
        width=width,
        needs=needs,
        fulfilled=fulfilled,
        durations=durations,
    )


class DependencyReplay:
    """A replay of all queues against each other.

    Args:
        queues: for each queue the ids of its steps; ``~i`` stands for overlapped pair i.
        overlapped: for each overlapped pair the ids of its parts.
        num_ids: number of ids; every id lies below.
        width: ids per row.
        needs: by row, the prerequisites of an action.
        fulfilled: by row, the offsets of the ids that are complete when an action is.
        durations: by row; None if nothing takes time.
        overlap_durations: by row of a pair's first part, the time of the pair; None, or an entry
            of None, if a pair takes as long as its parts one after the other.
        parts_in_turn: whether the parts of a pair may fulfil each other's needs, as where they
            run one after the other.

    Attributes:
        done: by id, the end of the action; -1.0 as long as it is not complete.
        starts: for each queue the start of each action in turn, pairs taken apart.
        ends: likewise, the ends.
        positions: for each queue the place of its next step.
        awaits: for each queue the id that its next step waits for, or None.
        runs: steps taken without a break, as (queue, start, stop), in an order in which nothing
            waits.

    Example:
        >>> needs = [(), ((-2, 0.5),)]
        >>> replay = DependencyReplay(
        ...     [[0, 1], [2, 3]], [], num_ids=4, width=2, needs=needs, fulfilled=[(0,)] * 2,
        ...     durations=[1.0, 2.0],
        ... )
        >>> replay.play(), replay.ends
        (True, [[1.0, 2.0], [3.5, 5.5]])
    """

    __slots__ = (
        "_durations",
        "_fulfilled",
        "_needs",
        "_overlap_durations",
        "_overlapped",
        "_parts_in_turn",
        "_queues",
        "_ready",
        "_unfinished",
        "_waiting",
        "_width",
        "awaits",
        "done",
        "ends",
        "positions",
        "runs",
        "starts",
    )

    def __init__(
        self,
        queues: Sequence[Sequence[int]],
        overlapped: Sequence[Sequence[int]],
        *,
        num_ids: int,
        width: int,
        needs: RowNeeds,
        fulfilled: Sequence[Sequence[int]],
        durations: Sequence[float] | None = None,
        overlap_durations: Sequence[float | None] | None = None,
        parts_in_turn: bool = False,
    ) -> None:
        self._queues, self._overlapped, self._width = queues, overlapped, width
        self._needs, self._fulfilled = needs, fulfilled
        self._durations = [0.0] * len(fulfilled) if durations is None else durations
        self._overlap_durations = overlap_durations
        self._parts_in_turn = parts_in_turn
        # Id of a missing result → the queues that wait for it.
        self._waiting: dict[int, list[int]] = {}
        self._ready = deque(range(len(queues)))
        self._unfinished = len(queues)
        self.done = [-1.0] * num_ids
        self.starts: list[list[float]] = [[] for _ in queues]
        self.ends: list[list[float]] = [[] for _ in queues]
        self.positions = [0] * len(queues)
        self.awaits: list[int | None] = [None] * len(queues)
        self.runs: list[tuple[int, int, int]] = []

    def play(self) -> bool:
        """Runs each queue until it has ended or waits; True if all have ended."""
        # Locals and no calls: the loop below runs once per action.
        done, waiting, ready = self.done, self._waiting, self._ready
        width, needs, fulfilled = self._width, self._needs, self._fulfilled
        durations = self._durations
        while ready:
            number = ready.popleft()
            queue, starts, ends = self._queues[number], self.starts[number], self.ends[number]
            first = place = self.positions[number]
            stop, free = len(queue), ends[-1] if ends else 0.0
            missing: int | None = None
            while place < stop:
                step = queue[place]
                if step < 0:
                    missing = self._play_pair(number, ~step, free)
                    if missing is not None:
                        break
                    free = ends[-1]
                    place += 1
                    continue
                row = step // width
                start = free
                for offset, delay in needs[row]:
                    arrival = done[step + offset]
                    if arrival < 0.0:
                        missing = step + offset
                        break
                    if delay:
                        arrival += delay
                    if arrival > start:
                        start = arrival
                else:
                    # Without a duration no new number is made, of which a check keeps many.
                    duration = durations[row]
                    free = start + duration if duration else start
                    starts.append(start)
                    ends.append(free)
                    for offset in fulfilled[row]:
                        result = step + offset
                        done[result] = free
                        if result in waiting:
                            ready.extend(waiting.pop(result))
                    place += 1
                    continue
                break
            if missing is not None:
                waiting.setdefault(missing, []).append(number)
            if place > first:
                self.runs.append((number, first, place))
            self.positions[number] = place
            self.awaits[number] = missing
            self._unfinished -= missing is None
        return not self._unfinished

    def fulfil(self, step: int, time: float = 0.0) -> None:
        """Completes an action out of its turn, and wakes the queues that wait for it."""
        for offset in self._fulfilled[step // self._width]:
            result = step + offset
            self.done[result] = time
            if result in self._waiting:
                self._ready.extend(self._waiting.pop(result))

    def lacking(self, number: int) -> list[int]:
        """All ids that the next step of a queue waits for."""
        queue, place = self._queues[number], self.positions[number]
        return self._lacking(queue[place]) if place < len(queue) else []

    def _lacking(self, step: int) -> list[int]:
        parts = (step,) if step >= 0 else self._overlapped[~step]
        inner = self._inner(parts)
        needed = (part + offset for part in parts for offset, _ in self._needs[part // self._width])
        return [each for each in needed if self.done[each] < 0.0 and each not in inner]

    def _inner(self, parts: Sequence[int]) -> set[int]:
        """The ids that the parts of a pair give to each other."""
        if not self._parts_in_turn:
            return set()
        return {part + offset for part in parts for offset in self._fulfilled[part // self._width]}

    def _play_pair(self, number: int, pair: int, free: float) -> int | None:
        """Runs the parts of a pair together; returns an id that it lacks, if any."""
        parts, width, start = self._overlapped[pair], self._width, free
        needs, done = self._needs, self.done
        for part in parts:
            for offset, delay in needs[part // width]:
                arrival = done[part + offset]
                if arrival < 0.0:
                    if part + offset not in self._inner(parts):
                        return part + offset
                elif arrival + delay > start:
                    start = arrival + delay
        durations = [self._durations[part // width] for part in parts]
        serial, given = sum(durations), None
        if self._overlap_durations is not None:
            given = self._overlap_durations[parts[0] // width]
        length = serial if given is None else given
        end = start + length
        for duration in durations:
            # The time of the pair is shown in parts, in proportion to their own times.
            self.starts[number].append(start)
            start += (duration / serial if serial else 1 / len(parts)) * length
            self.ends[number].append(start)
        self.ends[number][-1] = end
        for part in parts:
            self.fulfil(part, end)
        return None
