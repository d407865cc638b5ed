"""Periodic patterns: one microbatch's actions laid out in time, repeated with a period.

P = 2, V = 1, period 3: the pattern of a microbatch, and the program of its repetitions

    rank 0  F . . I W .           F0 .. .. F1 I0 W0 F2 I1 W1 ..
    rank 1  . F I W . .           .. F0 I0 W0 F1 I1 W1 F2 I2 ..

A rank's actions may start at any time, as long as no two overlap modulo the period. The length of a
pattern decides how many microbatches a stage holds at once: delays between its actions trade memory
for time. Its start times serve as priorities of list scheduling, which closes the gaps of warm-up
and cool-down.

The search tries known good parameters, then random ones, then mutations of the best. For many
microbatches it simulates fewer: the steady state repeats the pattern, so a period extends to any
number.

Source: arXiv:2405.15362, sec. 3 (building blocks and their lifespans).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import ceil
from typing import Any, assert_never

from penstock.schedule.action import Op
from penstock.schedule.families.periodic import PeriodicPattern, PeriodicSlots
from penstock.search.list_schedule import schedule_by_priority
from penstock.search.problem import SearchProblem, TimedOrder
from penstock.simulate.costs import Costs

__all__ = ["CostView", "PatternParams", "PatternSearch", "few_microbatches", "in_flight"]
__all__ += ["lay_pattern", "legs", "run_pattern"]

_NEAR = 1e-9
_POOL = 8
# Candidate values for random parameters; repeated values are drawn more often.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "stretch": (-1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 2.0),
    "weight_delay": (0.0, 0.0, 0.5, 1.0, 2.0, 4.0),
    "weight_slope": (0.0, 0.0, 1.0, 2.0, 4.0, 16.0),
    "packed": (True, False),
    "longer": (1.0, 1.0, 1.0, 1.05, 1.1, 1.2),
    "cost_view": (),
    "width": (None, 1.0, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0),
    "extra": (0, 0, 0, 1, 2),
    "patience": (0.0, 0.0, 0.0, 0.5, 1.0),
}


class CostView(Enum):
    """The costs used to choose an order; its times always follow from the true costs.

    With tight memory and uneven stages, ranks that follow a fixed order run more evenly than ranks
    that run any ready action.
    """

    OWN = "own"
    MEAN = "mean"
    UNIT = "unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternParams:
    """The parameters of a pattern, a few numbers for any number of ranks.

    Args:
        stretch: for each leg (see ``legs``), the delay after each action of the chain, as a
            fraction of the action's time; above -1.
        weight_delay: the delay of weight gradients, in periods.
        weight_slope: the additional delay on the last rank compared with the first, in periods.
        packed: if True, actions must not overlap within the period; if False, they may.
        longer: the period, as a multiple of the busiest rank's work per microbatch.
        width: the number of microbatches that stages may hold, as a multiple of the pattern's; None
            for the memory limit alone.
        extra: the number of microbatches allowed on top of ``width``.
        cost_view: the costs used to choose the order.
        patience: the time that a rank idles for a more urgent action, in mean actions.
    """

    stretch: tuple[float, ...]
    weight_delay: float = 0.0
    weight_slope: float = 0.0
    packed: bool = False
    longer: float = 1.0
    cost_view: CostView = CostView.OWN
    width: float | None = None
    extra: int = 0
    patience: float = 0.0


def in_flight(problem: SearchProblem, pattern: PeriodicPattern) -> tuple[int, ...]:
    """For each stage, the number of microbatches in flight from F to W."""
    found = []
    for stage in range(problem.placement.num_stages):
        last = problem.kind(Op.WEIGHT_GRAD, stage)
        life = pattern.starts[last] + problem.durations[last] - pattern.starts[stage]
        found.append(max(1, ceil(life / pattern.period - _NEAR)) if pattern.period else 1)
    return tuple(found)


def legs(problem: SearchProblem) -> tuple[int, ...]:
    """For each stage, its index among the stages of its rank."""
    count = [0] * problem.placement.num_ranks
    found = []
    for rank in problem.placement.stage_ranks:
        found.append(count[rank])
        count[rank] += 1
    return tuple(found)


def lay_pattern(problem: SearchProblem, params: PatternParams) -> PeriodicPattern:
    """The pattern with these parameters.

    Actions of uneven length may overlap if no gap is long enough.

    Args:
        problem: the kinds, their durations and needs.
        params: the parameters; ``stretch`` holds the forward legs, then the backward legs.
    """
    placement, durations = problem.placement, problem.durations
    stages, num_ranks = placement.num_stages, placement.num_ranks
    work = [0.0] * num_ranks
    for rank, duration in zip(problem.ranks, durations, strict=True):
        work[rank] += duration
    period = max(work) * params.longer
    leg_of = legs(problem)
    num_legs = max(leg_of) + 1
    slots = [PeriodicSlots(period) for _ in range(num_ranks)]
    offsets = [0.0] * problem.num_kinds
    weights = range(problem.num_kinds - 1, 2 * stages - 1, -1)
    for kind in (*range(stages), *range(2 * stages - 1, stages - 1, -1), *weights):
        start, rank = 0.0, problem.ranks[kind]
        for before, delay in problem.needs[kind]:
            leg = leg_of[before % stages] + (num_legs if before >= stages else 0)
            stretch = params.stretch[leg] if kind < 2 * stages else 0.0
            start = max(start, offsets[before] + durations[before] * (1 + stretch) + delay)
        if kind >= 2 * stages:
            share = rank / max(1, num_ranks - 1)
            start += period * (params.weight_delay + params.weight_slope * share)
        if params.packed and period:
            fitted = slots[rank].fit(start, durations[kind])
            # An action that fits no gap keeps its preferred time.
            if fitted is not None:
                start = fitted
                slots[rank].take(start, durations[kind])
        offsets[kind] = start
    return PeriodicPattern(period=period, starts=tuple(offsets))


def run_pattern(problem: SearchProblem, params: PatternParams) -> TimedOrder:
    """The order given by the pattern with these parameters."""
    match params.cost_view:
        case CostView.OWN:
            return _run(problem, params)
        case CostView.MEAN:
            seen = problem.costing(_mean(problem))
        case CostView.UNIT:
            seen = problem.costing(Costs())
        case _:
            assert_never(params.cost_view)
    replayed = problem.replay(_run(seen, params).order)
    assert replayed is not None, "an order that runs at some costs runs at all"
    return replayed


def _run(problem: SearchProblem, params: PatternParams) -> TimedOrder:
    pattern, windows = lay_pattern(problem, params), None
    if params.width is not None:
        scaled = (int(number * params.width + 0.5) for number in in_flight(problem, pattern))
        windows = [max(1, number) + params.extra for number in scaled]
    return schedule_by_priority(
        problem,
        pattern.times(problem.num_microbatches),
        windows=windows,
        patience=params.patience * sum(problem.durations) / problem.num_kinds,
    )


def _mean(problem: SearchProblem) -> Costs:
    """The mean of each cost over the stages, and of delays over the messages between ranks."""
    stages = problem.placement.num_stages
    means = [sum(problem.durations[n : n + stages]) / stages for n in (0, stages, 2 * stages)]
    delays = [
        delay
        for kind, users in enumerate(problem.users)
        for user, delay in users
        if problem.ranks[user] != problem.ranks[kind]
    ]
    latency = sum(delays) / len(delays) if delays else 0.0
    forward, input_grad, weight_grad = means
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)


def few_microbatches(problem: SearchProblem) -> int:
    """The number of microbatches that shows the steady state; all if that is not much less."""
    few = max(24, 5 * problem.placement.num_ranks // 2)
    return few if 2 * problem.num_microbatches > 3 * few else problem.num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPattern:
    """Parameters, and their estimated objective with all microbatches."""

    params: PatternParams
    estimate: float


class PatternSearch:
    """A search for pattern parameters, one step at a time.

    Args:
        problem: the search problem with all microbatches.
        seed: the random seed.

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
        self._legs = max(legs(problem)) + 1
        self._views = tuple(CostView) if len(set(problem.durations)) > 1 else (CostView.OWN,)
        self._seen: set[PatternParams] = set()
        self._firsts = self._known()
        self.tried = 0
        self.best: list[TriedPattern] = []
        self.placed = 0
        self.stale = 0

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
        if not self.best or estimate < self.best[0].estimate * (1 - 1e-9):
            self.stale = 0
        self.best.append(TriedPattern(params=params, estimate=estimate))
        self.best.sort(key=lambda tried: tried.estimate)
        del self.best[_POOL:]

    def _estimate(self, found: TimedOrder) -> float:
        few, all_of_them = self._problem.num_microbatches, self.whole.num_microbatches
        if few == all_of_them:
            return found.value
        # The middle third shows the steady state.
        low, high = few // 3, 2 * few // 3
        periods = [(ends[high] - ends[low]) / (high - low) for ends in found.ends]
        return found.value + max(periods) * (all_of_them - few)

    def _known(self) -> Iterator[PatternParams]:
        """Known good parameters: tight or loose, weight gradients early or late."""
        for width, packed, (delay, slope), back, view in product(
            (1.0, None, 1.5),
            (True, False),
            ((0.0, 0.0), (0.0, 4.0), (1.0, 16.0), (2.0, 2.0)),
            (0.0, 1.0),
            reversed(self._views),
        ):
            yield PatternParams(
                stretch=(0.0,) * self._legs + (back,) * self._legs,
                weight_delay=delay,
                weight_slope=slope,
                packed=packed,
                width=width,
                cost_view=view,
            )

    def _random_params(self) -> PatternParams:
        choice, choices = self._random.choice, {**_CHOICES, "cost_view": self._views}
        stretches = choices.pop("stretch")
        stretch = tuple(choice(stretches) for _ in range(2 * self._legs))
        drawn = {name: choice(values) for name, values in choices.items()}
        return PatternParams(stretch=stretch, **drawn)

    def _changed(self) -> PatternParams:
        """Mutate one parameter of one of the best patterns."""
        if not self.best:
            return self._random_params()
        params, other = self._random.choice(self.best).params, self._random_params()
        turned = self._random.randrange(8)
        if turned >= len(_TURNED):
            leg = self._random.randrange(2 * self._legs)
            stretch = list(params.stretch)
            stretch[leg] = other.stretch[leg]
            return replace(params, stretch=tuple(stretch))
        changes: dict[str, Any] = {name: getattr(other, name) for name in _TURNED[turned]}
        return replace(params, **changes)


# Parameters that change together.
_TURNED = (
    ("weight_delay",),
    ("weight_slope",),
    ("packed", "longer"),
    ("width", "extra"),
    ("patience",),
    ("cost_view",),
)
