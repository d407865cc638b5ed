"""The timeline kernel: replays all ranks of a program in their fixed orders.

    rank 0   F0 F1 .  .  B0 B1         each rank runs its queue from the front, and stops at a step
    rank 1   .  F0 B0 F1 B1            whose requirements are not complete yet; the action that
                                       completes them lets the rank go on

A queue is first in, first out, so the time of every step follows from the steps before it: no heap
of events is needed, and the order in which ranks are looked at changes no time. With durations of
zero the replay decides whether a program ends. The checker, the passes, the simulator and the
search all stand on it. This module knows no costs, and judges nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from itertools import repeat as again
from math import inf
from typing import TypeVar

from penstock.schedule.index import ActionIndex, IndexedProgram, Offsets

__all__ = ["DependencyReplay", "Timing", "timing_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The requirements and durations of actions, in tables by row.

    Args:
        width: ids per row: as many as microbatches, or 1 where each action has its own row.
        required: for each row, the offset of each requirement, and the delay from its completion
            until its result is usable.
        fulfilled: for each row, the offsets of all actions that are complete with this one.
        durations: for each row, the duration.
        pair_durations: for each overlapped pair, the duration; None for the sum of its parts.
    """

    width: int
    required: Sequence[tuple[tuple[int, float], ...]]
    fulfilled: Sequence[tuple[int, ...]]
    durations: Sequence[float]
    pair_durations: Sequence[float] | None = None

    def per_action(self) -> Timing:
        """The same timing with a row for each action."""
        if self.width == 1:
            return self

        def each(rows: Sequence[T]) -> tuple[T, ...]:
            return tuple(chain.from_iterable(map(again, rows, again(self.width))))

        return replace(
            self,
            width=1,
            required=each(self.required),
            fulfilled=each(self.fulfilled),
            durations=each(self.durations),
        )

    def with_required(self, more: Mapping[int, Sequence[int]]) -> Timing:
        """The same timing with further requirements, without delay.

        Args:
            more: by id, the ids that must be complete before; those that the tables hold aside.
        """
        if not more:
            return self
        expanded = self.per_action()
        required = list(expanded.required)
        for number, others in more.items():
            required[number] += tuple((other - number, 0.0) for other in others)
        return replace(expanded, required=required)


def timing_of(
    index: ActionIndex, required: Offsets, *, durations: Sequence[float] | None = None
) -> Timing:
    """The timing of actions whose results are usable at once, sequence chunks included.

    Args:
        index: the ids.
        required: for each row, the offsets of its requirements.
        durations: for each row, the duration; None for zero.
    """
    timing = Timing(
        width=index.num_microbatches,
        required=[tuple((offset, 0.0) for offset in row) for row in required],
        fulfilled=index.fulfilled(),
        durations=[0.0] * len(required) if durations is None else durations,
    )
    chunks = index.required_chunks()
    return timing.with_required({number: (other,) for number, other in chunks.items()})


class DependencyReplay:
    """A replay of all ranks. ``run`` takes it on until each rank has ended or is stuck.

    Args:
        program: the queues; those of further channels may follow those of the ranks.
        timing: the requirements and durations.
        size: number of ids; None for those of the program's index.

    Attributes:
        starts: by id, the start of each action that has run; inf before.
        ends: by id, the completion of each action, also of those covered by another; inf before.
        clocks: for each queue, the end of its last step.
        positions: for each queue, the index of its next step.
        missing: for each queue, the id that it waits for, or None.
        runs: steps taken without a break, as (queue, first, stop), in an order without waits.
    """

    __slots__ = (
        "_overlapped",
        "_queues",
        "_ready",
        "_timing",
        "_waiting",
        "clocks",
        "ends",
        "missing",
        "positions",
        "runs",
        "starts",
    )

    def __init__(self, program: IndexedProgram, timing: Timing, size: int | None = None) -> None:
        queues = range(len(program.queues))
        size = program.index.size if size is None else size
        self._queues, self._overlapped, self._timing = program.queues, program.overlapped, timing
        self._waiting: dict[int, list[int]] = {}
        self._ready = deque(queues)
        self.starts = [inf] * size
        self.ends = [inf] * size
        self.clocks = [0.0 for _ in queues]
        self.positions = [0 for _ in queues]
        self.missing: list[int | None] = [None for _ in queues]
        self.runs: list[tuple[int, int, int]] = []

    def run(self) -> bool:
        """Let all queues go on until each has ended or is stuck; True once all have ended."""
        # The one hot loop of checking, planning and simulating: locals, and no calls for an
        # action that is ready.
        timing, ready, waiting = self._timing, self._ready, self._waiting
        starts, ends, width = self.starts, self.ends, timing.width
        required, fulfilled, durations = timing.required, timing.fulfilled, timing.durations
        while ready:
            number = ready.popleft()
            queue = self._queues[number]
            first = place = self.positions[number]
            stop, now = len(queue), self.clocks[number]
            missing: int | None = None
            while place < stop:
                step = queue[place]
                if step < 0:
                    missing, now = self._run_pair(~step, now)
                    if missing is not None:
                        break
                    place += 1
                    continue
                row = step // width
                start = now
                for offset, delay in required[row]:
                    usable = ends[step + offset] + delay
                    if usable > start:
                        if usable == inf:
                            missing = step + offset
                            break
                        start = usable
                else:
                    starts[step] = start
                    now = start + durations[row]
                    for offset in fulfilled[row]:
                        done = step + offset
                        ends[done] = now
                        if done in waiting:
                            ready.extend(waiting.pop(done))
                    place += 1
                    continue
                break
            if missing is not None:
                waiting.setdefault(missing, []).append(number)
            if place > first:
                self.runs.append((number, first, place))
            self.positions[number], self.clocks[number] = place, now
            self.missing[number] = missing
        return all(missing is None for missing in self.missing)

    def complete(self, number: int, time: float = 0.0) -> None:
        """Complete an action out of its turn, and let the queues that wait for it go on."""
        for offset in self._timing.fulfilled[number // self._timing.width]:
            done = number + offset
            self.ends[done] = time
            self._ready.extend(self._waiting.pop(done, ()))

    def lacking(self, queue: int) -> list[int]:
        """All ids that the next step of a queue still waits for."""
        steps, place = self._queues[queue], self.positions[queue]
        if place == len(steps):
            return []
        step = steps[place]
        return [
            part + offset
            for part in ((step,) if step >= 0 else self._overlapped[~step])
            for offset, _ in self._timing.required[part // self._timing.width]
            if self.ends[part + offset] == inf
        ]

    def _run_pair(self, pair: int, now: float) -> tuple[int | None, float]:
        """Run an overlapped pair, or name an id that it lacks.

        Its parts may run side by side: none of them completes a requirement of another.
        """
        timing, parts, start = self._timing, self._overlapped[pair], now
        rows = [part // timing.width for part in parts]
        for part, row in zip(parts, rows, strict=True):
            for offset, delay in timing.required[row]:
                usable = self.ends[part + offset] + delay
                if usable == inf:
                    return part + offset, now
                start = max(start, usable)
        if timing.pair_durations is None:
            end = start + sum(timing.durations[row] for row in rows)
        else:
            end = start + timing.pair_durations[pair]
        for part in parts:
            self.starts[part] = start
            self.complete(part, end)
        return None, end
