"""Orders from list scheduling, by the start times of a periodic pattern.

P = 2, V = 1, period 3: the pattern of a microbatch, and the program of its repetitions

    rank 0  F . . I W .           F0 .. .. F1 I0 W0 F2 I1 W1 ..
    rank 1  . F I W . .           .. F0 I0 W0 F1 I1 W1 F2 I2 ..

Delays between a pattern's actions trade memory for time: its length decides how many microbatches a
stage holds at once. Its start times serve as priorities of list scheduling, which closes the gaps
of warm-up and cool-down. The search schedules few of many microbatches: the steady state repeats.

Source: arXiv:2405.15362, sec. 3 (building blocks and their lifespans).
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

from penstock.schedule.families.periodic import PeriodicPattern, PeriodicSlots
from penstock.schedule.workload import TimedOrder, schedule_by_priority
from penstock.search.problem import SearchProblem

__all__ = ["PatternParams", "PatternSearch", "in_flight", "lay_pattern", "run_pattern"]

_NEAR = 1e-9
_POOL = 8
# Candidate values for random parameters; repeated values are drawn more often.
_STRETCHES = (-1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 2.0)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "forward_stretch": _STRETCHES,
    "backward_stretch": _STRETCHES,
    "weight_delay": (0.0, 0.0, 0.5, 1.0, 2.0, 4.0),
    "weight_slope": (0.0, 0.0, 1.0, 2.0, 4.0, 16.0),
    "packed": (True, False),
    "width": (None, 1.0, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0),
    "patience": (0.0, 0.0, 0.0, 0.5, 1.0),
}
_WITH_LONGER = _CHOICES | {"longer": (1.0, 1.0, 1.0, 1.05, 1.1, 1.2)}


class PatternParams(NamedTuple):
    """The parameters of a pattern, a few numbers for any number of ranks."""

    # The delay after each forward and input gradient, as a fraction of its time; at least -1.
    forward_stretch: float = 0.0
    backward_stretch: float = 0.0
    # The delay of weight gradients in periods, and how much longer it is on the last rank.
    weight_delay: float = 0.0
    weight_slope: float = 0.0
    # If True, actions must not overlap within the period.
    packed: bool = True
    # The period, as a multiple of the busiest rank's work per microbatch.
    longer: float = 1.0
    # The number of microbatches that stages may hold, as a multiple of the pattern's; None for the
    # memory limit alone.
    width: float | None = 1.0
    # The time that a rank idles for a more urgent action, in mean actions.
    patience: float = 0.0


def in_flight(problem: SearchProblem, pattern: PeriodicPattern) -> tuple[int, ...]:
    """For each stage, the number of microbatches in flight from F to W."""
    found = []
    for stage in range(problem.placement.num_stages):
        last = stage + 2 * problem.placement.num_stages
        life = pattern.starts[last] + problem.durations[last] - pattern.starts[stage]
        found.append(max(1, ceil(life / pattern.period - _NEAR)) if pattern.period else 1)
    return tuple(found)


def lay_pattern(problem: SearchProblem, params: PatternParams) -> PeriodicPattern:
    """The pattern with these parameters; actions of uneven length that fit no gap may overlap."""
    placement, durations = problem.placement, problem.durations
    stages, num_ranks = placement.num_stages, placement.num_ranks
    work = [0.0] * num_ranks
    for rank, duration in zip(problem.ranks, durations, strict=True):
        work[rank] += duration
    period = max(work) * params.longer
    slots = [PeriodicSlots(period) for _ in range(num_ranks)]
    starts = [0.0] * problem.num_kinds
    weights = range(problem.num_kinds - 1, 2 * stages - 1, -1)
    for kind in (*range(stages), *range(2 * stages - 1, stages - 1, -1), *weights):
        start, rank = 0.0, problem.ranks[kind]
        for before, delay in problem.needs[kind]:
            stretch = params.forward_stretch if before < stages else params.backward_stretch
            length = durations[before] * (1 + (stretch if kind < 2 * stages else 0.0))
            start = max(start, starts[before] + length + delay)
        if kind >= 2 * stages:
            share = rank / max(1, num_ranks - 1)
            start += period * (params.weight_delay + params.weight_slope * share)
        if params.packed and period:
            fitted = slots[rank].fit(start, durations[kind])
            if fitted is not None:
                start = fitted
                slots[rank].take(start, durations[kind])
        starts[kind] = start
    return PeriodicPattern(period=period, starts=tuple(starts))


def run_pattern(problem: SearchProblem, params: PatternParams) -> TimedOrder:
    """The order given by the pattern with these parameters."""
    pattern, windows = lay_pattern(problem, params), None
    if params.width is not None:
        windows = [max(1, int(n * params.width + 0.5)) for n in in_flight(problem, pattern)]
    return schedule_by_priority(
        problem,
        pattern.times(problem.num_microbatches),
        windows=windows,
        patience=[params.patience * sum(problem.durations) / problem.num_kinds] * problem.num_kinds,
    )


class PatternSearch:
    """A search for pattern parameters: random ones, and mutations of the best.

    Attributes:
        whole: the problem, with all microbatches.
        best: the best patterns so far, best first, without duplicates: the estimated objective with
            all microbatches, and the parameters.
        placed: the number of placed actions.
        stale: the number of patterns since the last improvement.
    """

    def __init__(self, problem: SearchProblem, *, seed: int) -> None:
        self.whole = problem
        # The number of microbatches that shows the steady state; all if that is not much less.
        few, num = max(24, 5 * problem.placement.num_ranks // 2), problem.num_microbatches
        self._choices = _WITH_LONGER if (is_long := 2 * num > 3 * few) else _CHOICES
        self._problem = replace(problem, num_microbatches=few if is_long else num)
        self._random = random.Random(seed)
        self._seen: set[PatternParams] = set()
        self.best: list[tuple[float, PatternParams]] = []
        self.placed = self.stale = 0

    def step(self) -> None:
        """Try one more pattern."""
        params = self._next()
        self.stale += 1
        if params in self._seen:
            self.placed += self._problem.num_kinds
            return
        self._seen.add(params)
        self.placed += self._problem.size
        estimate = self._estimate(run_pattern(self._problem, params))
        if not self.best or estimate < self.best[0][0] * (1 - _NEAR):
            self.stale = 0
        self.best = sorted([*self.best, (estimate, params)], key=itemgetter(0))[:_POOL]

    def _estimate(self, found: TimedOrder) -> float:
        few, more = self._problem.num_microbatches, self.whole.num_microbatches
        # The middle third shows the steady state.
        low, high = few // 3, 2 * few // 3
        periods = [(ends[high] - ends[low]) / max(1, high - low) for ends in found.ends]
        return found.value + max(periods) * (more - few)

    def _next(self) -> PatternParams:
        """Every third time all parameters at random, else one of one of the best patterns."""
        draw = self._random.choice
        if not self.best:
            return PatternParams()
        if draw((True, False, False)):
            return PatternParams(**{name: draw(values) for name, values in self._choices.items()})
        name = draw(list(self._choices))
        return draw(self.best)[1]._replace(**{name: draw(self._choices[name])})
