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
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import ceil, inf
from operator import itemgetter
from typing import Any, NamedTuple

from penstock.schedule.families.periodic import PeriodicPattern, PeriodicSlots
from penstock.schedule.list_schedule import ListScheduler
from penstock.search.problem import SearchProblem, TimedOrder

__all__ = ["PatternParams", "PatternSearch", "few_microbatches", "in_flight", "lay_pattern"]
__all__ += ["run_pattern", "schedule_by_priority"]

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
    # The period is the busiest rank's work per microbatch.
    period = max(work)
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
        patience=params.patience * sum(problem.durations) / problem.num_kinds,
    )


def few_microbatches(problem: SearchProblem) -> int:
    """The number of microbatches that shows the steady state; all if that is not much less."""
    few = max(24, 5 * problem.placement.num_ranks // 2)
    return few if 2 * problem.num_microbatches > 3 * few else problem.num_microbatches


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
        self._problem = replace(problem, num_microbatches=few_microbatches(problem))
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
            return PatternParams(**{name: draw(values) for name, values in _CHOICES.items()})
        name = draw(list(_CHOICES))
        return draw(self.best)[1]._replace(**{name: draw(_CHOICES[name])})


def schedule_by_priority(
    problem: SearchProblem,
    priorities: Sequence[Sequence[float]],
    *,
    windows: Sequence[int] | None = None,
    patience: float = 0.0,
) -> TimedOrder:
    """Build an order in which ranks always run their most urgent ready action.

    Args:
        problem: the search problem.
        priorities: for each kind the priority of each microbatch; the lowest goes first.
        windows: for each stage the most microbatches that it may hold, at least 1; None for the
            memory limit alone.
        patience: the time that a rank idles for a more urgent action that will become ready.
    """
    scheduler = ListScheduler(
        ranks=problem.ranks,
        needs=problem.needs,
        durations=problem.durations,
        totals=[problem.num_microbatches] * problem.num_kinds,
    )
    windows = windows or [problem.num_microbatches] * problem.placement.num_stages
    scheduler.run(_ByPriority(scheduler, problem, priorities, windows, patience))
    assert all(len(done) == problem.num_microbatches for done in scheduler.ends), "it finishes"
    return TimedOrder(
        order=tuple(map(tuple, scheduler.order)),
        value=problem.value(scheduler.free),
        ends=tuple(map(tuple, scheduler.ends)),
    )


class _ByPriority:
    """A list-scheduling policy by priority and memory.

    A forward may start only if the microbatches in flight could still be finished one by one, in
    their order, within the limit on every rank: so no choice can lead to a dead end.
    """

    def __init__(
        self,
        scheduler: ListScheduler,
        problem: SearchProblem,
        priorities: Sequence[Sequence[float]],
        windows: Sequence[int],
        patience: float,
    ) -> None:
        self.ends, self.ready = scheduler.ends, scheduler.ready
        self.priorities, self.windows, self.patience = priorities, windows, patience
        self.users = [[user for user, _ in users] for users in problem.users]
        self.num_stages, self.ranks = problem.placement.num_stages, problem.ranks
        self.limit, self.changes = problem.most, problem.changes
        ranks = range(problem.placement.num_ranks)
        self.stages = [problem.placement.stages_of(rank) for rank in ranks]
        self.held = [0.0 for _ in ranks]
        # Per rank, heaps of its ready kinds: future ones by time, runnable ones by priority.
        self.coming: list[list[tuple[float, int]]] = [[] for _ in ranks]
        self.urgent: list[list[tuple[float, int]]] = [[] for _ in ranks]
        for kind, time in enumerate(self.ready):
            if time < inf:
                heappush(self.coming[self.ranks[kind]], (time, kind))

    def choose(self, rank: int, now: float, *, last: bool) -> tuple[int | None, float]:
        """The most urgent kind that can run now; or None, and the time of the next kind."""
        coming, urgent = self.coming[rank], self.urgent[rank]
        while coming and coming[0][0] <= now:
            kind = heappop(coming)[1]
            heappush(urgent, (self.priority(kind), kind))
        without_room = []
        while urgent and not self.has_room(urgent[0][1], rank):
            without_room.append(heappop(urgent))
        urgency, chosen = urgent[0] if urgent else (inf, None)
        wake = coming[0][0] if coming else inf
        until = now + self.patience
        # A rank waits for the first action that is more urgent.
        if wake <= until and (
            waits := [at for at, kind in coming if at <= until and self.priority(kind) < urgency]
        ):
            chosen, wake = None, min(waits)
        elif urgent:
            heappop(urgent)
        for each in without_room:
            heappush(urgent, each)
        return chosen, wake

    def started(self, kind: int, rank: int, now: float, end: float) -> None:
        """Update the memory in use, and queue kinds that become ready."""
        self.held[rank] += self.changes[kind]
        ends, ready = self.ends, self.ready
        number = len(ends[kind])
        if ready[kind] < inf:
            heappush(self.coming[rank], (ready[kind], kind))
        for user in self.users[kind]:
            # Only a user that waits for this microbatch becomes ready.
            if len(ends[user]) == number - 1 and ready[user] < inf:
                heappush(self.coming[self.ranks[user]], (ready[user], user))

    def priority(self, kind: int) -> float:
        """The priority of the next microbatch of a kind."""
        return self.priorities[kind][len(self.ends[kind])]

    def has_room(self, kind: int, rank: int) -> bool:
        """True if a kind may start; only forwards take memory, and are numbered like stages."""
        if kind >= self.num_stages:
            return True
        in_flight = len(self.ends[kind]) - len(self.ends[kind + 2 * self.num_stages])
        if in_flight >= self.windows[kind]:
            return False
        return self.limit == inf or self._can_finish(kind, rank)

    def _can_finish(self, chosen: int, rank: int) -> bool:
        """True if all microbatches fit one by one after one more forward of a stage."""
        changes, stages, limit = self.changes, self.stages[rank], self.limit
        if self.held[rank] + changes[chosen] > limit:
            return False
        first = len(self.ends[stages[0]]) + (chosen == stages[0])
        # Held by microbatches that have passed the stages so far; what one holds on these stages.
        held, passed = changes[chosen], 0.0
        rest = sum(changes[stage] for stage in stages)
        ahead = True
        for stage in stages:
            # Later stages of the rank never have more forwards, so the loop can stop.
            done = len(self.ends[stage])
            # The first microbatch that still needs this stage and those after it: all before it
            # can be finished, and what they hold comes free; those from it on hold the stages
            # that they have passed. Up to the chosen stage this forward adds nothing to that.
            if not ahead and done < first and rest + held - done * passed > limit:
                return False
            if not ahead and not done:
                break
            ahead = ahead and stage != chosen
            held += done * changes[stage]
            passed += changes[stage]
            rest -= changes[stage]
        return True
