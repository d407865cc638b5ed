"""Builders for given costs: the best of several orders, from cheap to dear.

The best order has the shortest span of a rank, then the shortest makespan. It depends on the costs
alone; ``penstock.search`` takes more time, and finds more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from numbers import Real
from typing import Any, TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.list_schedule import PerStage, kind_needs, list_schedule
from penstock.schedule.placement import Placement
from penstock.schedule.workload import Order, Workload, schedule_by_priority

__all__ = ["StageCost", "CostedStep"]

StageCost: TypeAlias = float | Sequence[float]
"""One number for all stages, or one per stage."""

_NEAR = 1e-9


class CostedStep:
    """The step of a schedule under costs, and the best order tried so far.

    Args:
        name: the schedule, for errors.
        placement: the rank of every stage.
        microbatches: microbatches per step.
        limit: the most activations that a rank may hold.
        forward, input_grad, weight_grad: the cost of each kind of action.
        latency: the travel time of a result to another rank; one per stage holds between it and
            the next.
        full: True for full backwards, without weight gradients.

    Attributes:
        order: the best order.
        span: its span.

    Raises:
        ScheduleError: a cost is not a finite number from 0 on, or for another number of stages.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        microbatches: int,
        limit: int,
        *,
        forward: StageCost = 1.0,
        input_grad: StageCost = 1.0,
        weight_grad: StageCost = 1.0,
        latency: StageCost = 0.0,
        full: bool = False,
    ) -> None:
        self._placement, self._limit, self._full = placement, limit, full
        stages = placement.num_stages
        self._costs = (
            _per_stage(name, "forward", forward, stages),
            _per_stage(name, "input_grad", input_grad, stages),
            _per_stage(name, "weight_grad", weight_grad, stages),
        )
        self._delay = _delay(name, latency, placement)
        self.work = self._work(microbatches, weight_share=1.0)
        self.order: Order = ()
        self.span = self._makespan = inf
        work = [0.0] * placement.num_ranks
        for rank, duration in zip(self.work.ranks, self.work.durations, strict=True):
            work[rank] += microbatches * duration
        self._least = max(work)

    def _work(self, microbatches: int, *, weight_share: float) -> Workload:
        stages = self._placement.num_stages
        changes = (1.0, weight_share - 1, -weight_share)
        forward, input_grad, weight_grad = self._costs
        if self._full:
            changes, pairs = (1.0, -1.0, 0.0), zip(input_grad, weight_grad, strict=True)
            input_grad, weight_grad = [i + w for i, w in pairs], [0.0] * stages
        return Workload(
            placement=self._placement,
            num_microbatches=microbatches,
            durations=(*forward, *input_grad, *weight_grad),
            needs=kind_needs(self._placement, self._delay),
            changes=tuple(change for change in changes for _ in range(stages)),
            limit=self._limit,
        )

    @property
    def is_done(self) -> bool:
        """True if some rank never idles in its span, so that no order has a shorter one."""
        return self.span <= self._least * (1 + _NEAR)

    def add(self, order: Sequence[Sequence[int]]) -> None:
        """Keep an order if it is better; of equal ones the first stays.

        For full backwards, weight gradients take no time, and may be left out.
        """
        played = self.work.play([self.work.ids(kinds) for kinds in order])
        if played is None:
            return
        spans = (
            done[-1] - begun[0] for begun, done in zip(played.starts, played.ends, strict=True)
        )
        span, makespan = max(spans), max(done[-1] for done in played.ends)
        shorter, longer = span < self.span * (1 - _NEAR), span > self.span * (1 + _NEAR)
        if shorter or (not longer and makespan < self._makespan * (1 - _NEAR)):
            self.order = tuple(map(tuple, order))
            self.span, self._makespan = span, makespan

    def add_filled(
        self, orders: Sequence[Sequence[int]], *, spare: int | None = None, overtake: bool = False
    ) -> None:
        """Add orders of forwards and backwards, with weight gradients in their idle time.

        ``spare`` and ``overtake`` as for ``list_schedule``.
        """
        found = list_schedule(
            self._placement,
            orders,
            limit=self._limit,
            full=self._full,
            spare=spare,
            overtake=overtake,
            costs=self._costs,
            delay=self._delay,
        )
        self.add(found)

    def add_urgent(self, *, forwards: float, weights: float, weight_share: float = 1.0) -> None:
        """Add an order by list scheduling: input gradients first, then forwards, weights last.

        A rank runs no forward that would delay its first input gradient. Later it waits for an
        input gradient that comes within the share ``forwards`` of the forward, or ``weights`` of
        the weight gradient, that it could run. ``weight_share`` is the share of an activation that
        is held for a weight gradient.

        Source: arXiv:2401.10241, sec. 3.1.
        """
        work = self._work(self.work.num_microbatches, weight_share=weight_share)
        stages = self._placement.num_stages
        by_op = [[float(urgency)] * work.num_microbatches for urgency in (1, 0, 2)]
        by_kind = zip((forwards, 0.0, weights), self._costs, strict=True)
        waits = [share * cost for share, costs in by_kind for cost in costs]
        priorities = [of_op for of_op in by_op for _ in range(stages)]
        self.add(schedule_by_priority(work, priorities, patience=waits, first_patience=inf).order)


def _per_stage(name: str, kind: str, given: StageCost, stages: int) -> PerStage:
    numbers: tuple[Any, ...] = (given,) * stages
    if isinstance(given, Sequence) and not isinstance(given, str):
        numbers = tuple(given)
    if len(numbers) != stages:
        raise ScheduleError(
            f"{name}: {kind} has {len(numbers)} numbers for {stages} stages; give one number for "
            "all, or one per stage"
        )
    for each in numbers:
        if isinstance(each, bool) or not (isinstance(each, Real) and 0 <= float(each) < inf):
            raise ScheduleError(f"{name}: {kind}={each!r} must be a finite number from 0 on")
    return tuple(map(float, numbers))


def _delay(name: str, latency: StageCost, placement: Placement) -> Callable[[int, int], float]:
    """The travel time from one stage to a neighbour; 0 on the same rank."""
    edges = _per_stage(name, "latency", latency, placement.num_stages)
    return lambda stage, to: 0.0 if placement.same_rank(stage, to) else edges[min(stage, to)]
