"""Building blocks: one microbatch's actions laid out in time, repeated with a period.

P = 2, V = 1, period 3: the block of a microbatch, and the program of its repetitions

    rank 0  F . . I W .           F0 .. .. F1 I0 W0 F2 I1 W1 ..
    rank 1  . F I W . .           .. F0 I0 W0 F1 I1 W1 F2 I2 ..

A rank's actions may lie anywhere, but no two at the same place of the period. How long a block is
says how many microbatches a stage holds at once: delays between its actions buy memory for time,
and the other way round. Blocks serve as urgencies for list scheduling, which closes the gaps of
warm-up and cool-down.

Source: arXiv:2405.15362, sec. 3 (building blocks and their lifespans).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import ceil

from penstock.schedule.action import Op
from penstock.search.problem import SearchProblem

__all__ = ["BuildingBlock", "Guise", "Knobs", "lay_block", "legs"]

_NEAR = 1e-9


class Guise(Enum):
    """The costs for which an order is made; what it comes to is told by the true ones.

    Ranks that wait for nothing but what their order says go on more evenly than ranks that take
    whatever is ready, where memory is tight and stages differ.
    """

    OWN = "own"
    MEAN = "mean"
    UNIT = "unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What a block is made from: few numbers, whatever the number of ranks.

    Args:
        stretch: for each leg (see ``legs``), what is added to each action of the chain before the
            next one may come, as a share of its own time; above -1.
        weight_delay: how long a weight gradient waits, in periods.
        weight_slope: how much longer it waits on the last rank than on the first, in periods.
        packed: whether actions avoid each other within the period; where not, offsets are wishes.
        longer: the period, as a multiple of the busiest rank's work on a microbatch.
        width: what stages may hold, as a multiple of what the block holds; None where the memory
            limit alone counts.
        extra: what they may hold beyond that.
        guise: the costs for which the order is made.
        patience: how long a rank waits for a more urgent action, in mean actions.
    """

    stretch: tuple[float, ...]
    weight_delay: float = 0.0
    weight_slope: float = 0.0
    packed: bool = False
    longer: float = 1.0
    guise: Guise = Guise.OWN
    width: float | None = None
    extra: int = 0
    patience: float = 0.0


# Not slotted: windows are kept in the dictionary.
@dataclass(frozen=True, kw_only=True)
class BuildingBlock:
    """The offsets of one microbatch's actions.

    Args:
        problem: whose kinds they are.
        period: the time from one microbatch to the next.
        offsets: for each kind, its start in the first microbatch.
    """

    problem: SearchProblem
    period: float
    offsets: tuple[float, ...]

    def priorities(self, microbatches: int) -> list[list[float]]:
        """For each kind, the start of each microbatch."""
        times = [number * self.period for number in range(microbatches)]
        return [[offset + time for time in times] for offset in self.offsets]

    @cached_property
    def held(self) -> tuple[int, ...]:
        """For each stage, how many microbatches it holds at once, from F to W."""
        problem, found = self.problem, []
        for stage in range(problem.placement.num_stages):
            last = problem.kind(Op.WEIGHT_GRAD, stage)
            life = self.offsets[last] + problem.durations[last] - self.offsets[stage]
            found.append(max(1, ceil(life / self.period - _NEAR)) if self.period else 1)
        return tuple(found)

    def windows(self, width: float, extra: int) -> tuple[int, ...]:
        """``held`` times ``width``, rounded, and ``extra``."""
        return tuple(max(1, int(number * width + 0.5)) + extra for number in self.held)


def legs(problem: SearchProblem) -> tuple[int, ...]:
    """For each stage which of its rank's stages it is, counted from the first."""
    count = [0] * problem.placement.num_ranks
    found = []
    for rank in problem.placement.stage_ranks:
        found.append(count[rank])
        count[rank] += 1
    return tuple(found)


def lay_block(problem: SearchProblem, knobs: Knobs) -> BuildingBlock:
    """The block that these knobs give.

    Args:
        problem: the kinds, what they cost and what they need.
        knobs: how to lay them; ``stretch`` has a number for each forward leg, then one for each
            backward leg.

    Returns:
        The block. Actions of uneven length may overlap in it where none of the gaps between the
        others is long enough.
    """
    placement = problem.placement
    stages, ranks = placement.num_stages, range(placement.num_ranks)
    durations = problem.durations
    work = [sum(d for d, r in zip(durations, problem.ranks, strict=True) if r == k) for k in ranks]
    period = max(work) * knobs.longer
    leg_of = legs(problem)
    num_legs = max(leg_of) + 1
    busy: list[list[tuple[float, float]]] = [[] for _ in ranks]
    offsets = [0.0] * problem.num_kinds
    weights = range(problem.num_kinds - 1, 2 * stages - 1, -1)
    for kind in (*range(stages), *range(2 * stages - 1, stages - 1, -1), *weights):
        start = 0.0
        stage = kind % stages
        for before, delay in problem.needs[kind]:
            leg = leg_of[before % stages] + (num_legs if before >= stages else 0)
            stretch = knobs.stretch[leg] if kind < 2 * stages else 0.0
            start = max(start, offsets[before] + durations[before] * (1 + stretch) + delay)
        if kind >= 2 * stages:
            share = placement.rank_of(stage) / max(1, placement.num_ranks - 1)
            start += period * (knobs.weight_delay + knobs.weight_slope * share)
        if knobs.packed and period:
            fitted = _fit(busy[problem.ranks[kind]], start, durations[kind], period)
            # What finds no room in one piece stays a wish.
            if fitted is not None:
                start = fitted
                _occupy(busy[problem.ranks[kind]], start % period, durations[kind], period)
        offsets[kind] = start
    return BuildingBlock(problem=problem, period=period, offsets=tuple(offsets))


def _fit(
    busy: Sequence[tuple[float, float]], start: float, length: float, period: float
) -> float | None:
    """The first time from ``start`` on at which ``length`` is free in every period.

    ``busy`` holds the pieces of the period that are taken, in order, no two of which touch.
    """
    if not length or not busy:
        return start
    phase = start % period
    ahead = bisect_right(busy, phase + _NEAR, key=_end)
    for place in range(ahead, ahead + len(busy) + 1):
        turns, index = divmod(place, len(busy))
        low, high = busy[index]
        if low + turns * period >= phase + length - _NEAR:
            return start
        start += high + turns * period - phase
        phase = high + turns * period
    return None


def _occupy(busy: list[tuple[float, float]], phase: float, length: float, period: float) -> None:
    """Take a piece of the period, and what of it goes on in the next from its beginning."""
    end = phase + length
    for low, high in ((phase, min(end, period)), (0.0, end - period)):
        if high > low + _NEAR:
            since = bisect_left(busy, low - _NEAR, key=_end)
            until = bisect_right(busy, high + _NEAR, key=_start)
            touched = [(low, high), *busy[since:until]]
            busy[since:until] = [(min(map(_start, touched)), max(map(_end, touched)))]


def _start(piece: tuple[float, float]) -> float:
    return piece[0]


def _end(piece: tuple[float, float]) -> float:
    return piece[1]
