"""Periodic patterns: one microbatch's actions laid out in time, repeated with a period.

P = 2, V = 1, period 3: the pattern of a microbatch, and the program of its repetitions

    rank 0  F . . I W .           F0 .. .. F1 I0 W0 F2 I1 W1 ..
    rank 1  . F I W . .           .. F0 I0 W0 F1 I1 W1 F2 I2 ..

A rank's actions may start at any time, as long as no two overlap modulo the period. The length of a
pattern decides how many microbatches a stage holds at once: delays between its actions trade memory
for time. Its start times serve as priorities of list scheduling, which closes the gaps of warm-up
and cool-down. For many microbatches the search simulates fewer: the steady state repeats the
pattern, so a period extends to any number.

Source: arXiv:2405.15362, sec. 3 (building blocks and their lifespans).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any, NamedTuple

from penstock.schedule.families.periodic import PeriodicPattern, PeriodicSlots
from penstock.search.priority_schedule import schedule_by_priority
from penstock.search.problem import SearchProblem, TimedOrder
from penstock.simulate.costs import Costs

__all__ = ["PatternParams", "PatternSearch", "TriedPattern", "few_microbatches", "in_flight"]
__all__ += ["lay_pattern", "local_stage_index", "run_pattern"]

_NEAR = 1e-9
_POOL = 8
# Candidate values for random parameters; repeated values are drawn more often.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "stretch": (-1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 2.0),
    "weight_delay": (0.0, 0.0, 0.5, 1.0, 2.0, 4.0),
    "weight_slope": (0.0, 0.0, 1.0, 2.0, 4.0, 16.0),
    "packed": (True, False),
    "period_factor": (1.0, 1.0, 1.0, 1.05, 1.1, 1.2),
    "use_mean_costs": (True, False),
    "width": (None, 1.0, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0),
    "extra": (0, 0, 0, 1, 2),
    "patience": (0.0, 0.0, 0.0, 0.5, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternParams:
    """The parameters of a pattern, a few numbers for any number of ranks.

    Args:
        stretch: for each local stage (see ``local_stage_index``), forwards then backwards, the
            delay after each action of the chain, as a fraction of the action's time; at least -1.
        weight_delay: the delay of weight gradients, in periods.
        weight_slope: the additional delay on the last rank compared with the first, in periods.
        packed: if True, actions must not overlap within the period; if False, they may.
        period_factor: the period, as a multiple of the busiest rank's work per microbatch.
        use_mean_costs: if True, the order is chosen at the mean costs of all stages: with tight
            memory, ranks that follow a fixed order run more evenly than ranks that run any ready
            action.
        width: the number of microbatches that stages may hold, as a multiple of the pattern's; None
            for the memory limit alone.
        extra: the number of microbatches allowed on top of ``width``.
        patience: the time that a rank idles for a more urgent action, in mean actions.
    """

    stretch: tuple[float, ...]
    weight_delay: float = 0.0
    weight_slope: float = 0.0
    packed: bool = False
    period_factor: float = 1.0
    use_mean_costs: bool = False
    width: float | None = None
    extra: int = 0
    patience: float = 0.0


def in_flight(problem: SearchProblem, pattern: PeriodicPattern) -> tuple[int, ...]:
    """For each stage, the number of microbatches in flight from F to W."""
    found = []
    for stage in range(problem.placement.num_stages):
        last = stage + 2 * problem.placement.num_stages
        life = pattern.starts[last] + problem.durations[last] - pattern.starts[stage]
        found.append(max(1, ceil(life / pattern.period - _NEAR)) if pattern.period else 1)
    return tuple(found)


def local_stage_index(problem: SearchProblem) -> tuple[int, ...]:
    """For each stage, its index among the stages of its rank."""
    ranks = problem.placement.stage_ranks
    return tuple(ranks[:stage].count(rank) for stage, rank in enumerate(ranks))


def lay_pattern(problem: SearchProblem, params: PatternParams) -> PeriodicPattern:
    """The pattern with these parameters; actions of uneven length that fit no gap may overlap."""
    placement, durations = problem.placement, problem.durations
    stages, num_ranks = placement.num_stages, placement.num_ranks
    work = [0.0] * num_ranks
    for rank, duration in zip(problem.ranks, durations, strict=True):
        work[rank] += duration
    period = max(work) * params.period_factor
    leg_of = local_stage_index(problem)
    num_legs = max(leg_of) + 1
    slots = [PeriodicSlots(period) for _ in range(num_ranks)]
    starts = [0.0] * problem.num_kinds
    weights = range(problem.num_kinds - 1, 2 * stages - 1, -1)
    for kind in (*range(stages), *range(2 * stages - 1, stages - 1, -1), *weights):
        start, rank = 0.0, problem.ranks[kind]
        for before, delay in problem.needs[kind]:
            leg = leg_of[before % stages] + (num_legs if before >= stages else 0)
            stretch = params.stretch[leg] if kind < 2 * stages else 0.0
            start = max(start, starts[before] + durations[before] * (1 + stretch) + delay)
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
    """The order given by the pattern with these parameters, at the true costs."""
    seen, windows = (
        replace(problem, costs=_mean(problem)) if params.use_mean_costs else problem,
        None,
    )
    pattern = lay_pattern(seen, params)
    if params.width is not None:
        scaled = (int(number * params.width + 0.5) for number in in_flight(seen, pattern))
        windows = [max(1, number) + params.extra for number in scaled]
    found = schedule_by_priority(
        seen,
        pattern.times(seen.num_microbatches),
        windows=windows,
        patience=params.patience * sum(seen.durations) / seen.num_kinds,
    )
    if params.use_mean_costs:
        replayed = problem.replay(found.order)
        assert replayed is not None, "an order that runs at some costs runs at all"
        found = replayed
    return found


def _mean(problem: SearchProblem) -> Costs:
    """The mean of each cost over the stages, and of delays over the messages between ranks."""
    stages = problem.placement.num_stages
    forward, input_grad, weight_grad = (
        sum(problem.durations[first : first + stages]) / stages
        for first in range(0, 3 * stages, stages)
    )
    delays = [
        delay
        for kind, users in enumerate(problem.users)
        for user, delay in users
        if problem.ranks[user] != problem.ranks[kind]
    ]
    return Costs(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        latency=sum(delays) / len(delays) if delays else 0.0,
    )


def few_microbatches(problem: SearchProblem) -> int:
    """The number of microbatches that shows the steady state; all if that is not much less."""
    few = max(24, 5 * problem.placement.num_ranks // 2)
    return few if 2 * problem.num_microbatches > 3 * few else problem.num_microbatches


class TriedPattern(NamedTuple):
    """Parameters, and their estimated objective with all microbatches."""

    params: PatternParams
    estimate: float


class PatternSearch:
    """A search for pattern parameters: known good ones, random ones, mutations of the best.

    Attributes:
        whole: the problem, with all microbatches.
        best: the best patterns so far, best first, without duplicates.
        placed: the number of placed actions.
        tried: the number of tried patterns.
        stale: the number of patterns since the last improvement.
    """

    def __init__(self, problem: SearchProblem, *, seed: int) -> None:
        self.whole = problem
        self._problem = problem.resized(few_microbatches(problem))
        self._random = random.Random(seed)
        self._legs = max(local_stage_index(problem)) + 1
        uneven = len(set(problem.durations)) > 1
        self._choices = {**_CHOICES, "use_mean_costs": (True, False) if uneven else (False,)}
        self._seen: set[PatternParams] = set()
        self._firsts = self._known()
        self.best: list[TriedPattern] = []
        self.tried = self.placed = self.stale = 0

    def step(self) -> None:
        """Try one more pattern."""
        # Known parameters alternate with others, so that short searches see both.
        params = next(self._firsts, None) if self.tried % 2 == 0 or self.tried < 12 else None
        self.tried += 1
        self.stale += 1
        if params is None:
            params = self._random_params() if self.tried % 3 == 0 else self._changed()
        if params in self._seen:
            self.placed += self._problem.num_kinds
            return
        self._seen.add(params)
        self.placed += self._problem.size
        estimate = self._estimate(run_pattern(self._problem, params))
        if not self.best or estimate < self.best[0].estimate * (1 - _NEAR):
            self.stale = 0
        self.best.append(TriedPattern(params, estimate))
        self.best.sort(key=lambda tried: tried.estimate)
        del self.best[_POOL:]

    def _estimate(self, found: TimedOrder) -> float:
        few, more = self._problem.num_microbatches, self.whole.num_microbatches
        # The middle third shows the steady state.
        low, high = few // 3, 2 * few // 3
        periods = [(ends[high] - ends[low]) / max(1, high - low) for ends in found.ends]
        return found.value + max(periods) * (more - few)

    def _known(self) -> Iterator[PatternParams]:
        """Known good parameters: tight or loose, weight gradients early or late."""
        for width, packed, (delay, slope), back, use_mean_costs in product(
            (1.0, None, 1.5),
            (True, False),
            ((0.0, 0.0), (0.0, 4.0), (1.0, 16.0), (2.0, 2.0)),
            (0.0, 1.0),
            self._choices["use_mean_costs"],
        ):
            yield PatternParams(
                stretch=(0.0,) * self._legs + (back,) * self._legs,
                weight_delay=delay,
                weight_slope=slope,
                packed=packed,
                width=width,
                use_mean_costs=use_mean_costs,
            )

    def _random_params(self) -> PatternParams:
        drawn = {name: self._random.choice(values) for name, values in self._choices.items()}
        stretches = self._random.choices(self._choices["stretch"], k=2 * self._legs)
        return PatternParams(**{**drawn, "stretch": tuple(stretches)})

    def _changed(self) -> PatternParams:
        """Mutate one parameter of one of the best patterns."""
        if not self.best:
            return self._random_params()
        params, other = self._random.choice(self.best).params, self._random_params()
        name = self._random.choice(list(self._choices))
        changed = getattr(other, name)
        if name == "stretch":
            leg = self._random.randrange(2 * self._legs)
            changed = (*params.stretch[:leg], other.stretch[leg], *params.stretch[leg + 1 :])
        return replace(params, **{name: changed})
