"""Periodic patterns: the actions of one microbatch, placed so that they fit again every period.

    P = 2, V = 2, period 6, forwards and input gradients of 1, gaps of 1 (V-Min):

    rank 0  F0 .. .. f0 i0 .. | F1 .. I0 f1 i1 .. | F2 .. I1 f2 i2 ..
    rank 1  .. F0 f0 .. .. i0 | I0 F1 f1 .. .. i1 | I1 F2 f2 .. .. i2

An action starts at the earliest time, not before its gap from the action before it, at which its
rank is free in every repetition: no other action takes the same time modulo the period. So ranks
never wait once the pipeline is full. The longer an activation lives from its forward to its
backward, divided by the period, the more of them its rank holds. Weight gradients need no slot of
their own: they take what the period leaves over.

A pattern leaves idle time in the warm-up and the cool-down, which ``list_schedule`` fills.

Source: arXiv:2405.15362, sec. 3 (building blocks).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from penstock.errors import ScheduleError
from penstock.schedule.placement import Placement

__all__ = ["PeriodicPattern", "PeriodicSlots", "chain_pattern"]

# The tolerance for equal times, as a share of the period.
_NEAR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicPattern:
    """For each kind (see ``list_schedule``), its start in microbatch 0, and the time from one
    microbatch to the next."""

    period: float
    starts: tuple[float, ...]

    def times(self, microbatches: int) -> list[list[float]]:
        """For each kind, the start of each microbatch."""
        shifts = [number * self.period for number in range(microbatches)]
        return [[start + shift for shift in shifts] for start in self.starts]

    def orders(self, placement: Placement, *, microbatches: int) -> list[list[int]]:
        """For each rank, its forwards and backwards in the order of their starts, as kinds."""
        times, stages = self.times(microbatches), placement.num_stages
        orders = []
        for rank in range(placement.num_ranks):
            own = [kind for s in placement.stages_of(rank) for kind in (s, s + stages)]
            orders.append(
                [kind for _, kind in sorted((t, kind) for kind in own for t in times[kind])]
            )
        return orders


class PeriodicSlots:
    """The busy intervals of a rank modulo a period: sorted (start, end) pairs; no two touch."""

    def __init__(self, period: float) -> None:
        self._period, self._near = period, _NEAR * period
        self.busy: list[tuple[float, float]] = []

    def fit(self, start: float, length: float) -> float | None:
        """The earliest time from ``start`` on at which ``length`` is free in every period."""
        busy, period = self.busy, self._period
        if not length or not busy:
            return start
        phase = start % period
        first = bisect_right(busy, phase + self._near, key=itemgetter(1))
        for place in range(first, first + len(busy) + 1):
            turns, number = divmod(place, len(busy))
            low, high = busy[number]
            if low + turns * period >= phase + length - self._near:
                return start
            start += high + turns * period - phase
            phase = high + turns * period
        return None

    def take(self, start: float, length: float) -> None:
        """Mark ``length`` from ``start`` on as busy in every period."""
        phase, busy = start % self._period, self.busy
        end = phase + length
        # An interval that exceeds the period wraps around.
        for low, high in ((phase, min(end, self._period)), (0, end - self._period)):
            if high > low + self._near:
                since = bisect_left(busy, low - self._near, key=itemgetter(1))
                until = bisect_right(busy, high + self._near, key=itemgetter(0))
                touched = [(low, high), *busy[since:until]]
                busy[since:until] = [(min(touched)[0], max(high for _, high in touched))]


def chain_pattern(
    placement: Placement, *, gaps: Sequence[int], period: int, full: bool = False
) -> PeriodicPattern:
    """A pattern for a microbatch that passes all stages and back, each action as early as possible.

    A forward and an input gradient take 1 each, a full backward takes 2. ``gaps`` are the least
    times from the start of each action (forwards of stages 0, 1, ..., then backwards of ..., 1, 0)
    to that of the next. A period too short for the actions of a rank is a ScheduleError.
    """
    stages = placement.num_stages
    busy = [[False] * period for _ in range(placement.num_ranks)]
    # The full backwards left to place on each rank; each needs two slots in a row.
    to_come = [len(placement.stages_of(rank)) * full for rank in range(placement.num_ranks)]
    starts: list[float] = [0] * (2 * stages)
    start = 0
    chain = (*range(stages), *range(2 * stages - 1, stages - 1, -1))
    for kind, gap in zip(chain, (0, *gaps), strict=True):
        rank = placement.rank_of(kind % stages)
        long = full and kind >= stages
        to_come[rank] -= long
        start = starts[kind] = _take(busy[rank], start + gap, 1 + long, to_come[rank])
    return PeriodicPattern(period=period, starts=tuple(starts))


def _take(busy: list[bool], start: int, length: int, pairs: int) -> int:
    """Take the first free ``length`` slots from ``start`` on that leave ``pairs`` of two slots."""
    period = len(busy)
    for time in range(start, start + period):
        wanted = {(time + unit) % period for unit in range(length)}
        if len(wanted) < length or any(busy[slot] for slot in wanted):
            continue
        text = "".join("x" if slot in wanted or busy[slot] else "." for slot in range(period))
        first = text.index("x")
        gaps = (text[first:] + text[:first]).split("x")
        if sum(len(gap) // 2 for gap in gaps) >= pairs:
            busy[:] = (each == "x" for each in text)
            return time
    raise ScheduleError(f"a period of {period} is too short for the actions of a rank")
