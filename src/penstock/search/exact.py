"""Exact search of a whole step with OR-Tools CP-SAT.

CP-SAT counts in integers. Without a common unit, costs are rounded down, so its bound still holds;
a replay gives the objective of an order, never CP-SAT.

A rank's span counts from its own first start, so it may gain by starting late:

    rank 0  F0 F1 ..        rank 0  F0 F1 ..
    rank 1  .. F0 F1 ..     rank 1  .. .. F1 F0 ..

If kinds run microbatches in index order and ranks start as early as possible, such programs are
lost. A bound on the span therefore takes a separate search with free start times. Sorting the times
of any program kind by kind gives a program of that search, so its bound holds for all programs.

CP-SAT runs interleaved workers with a fixed seed and a limit of deterministic time, so results are
the same on every machine; wall-clock time is a second limit. Only this module uses OR-Tools, and
imports it lazily.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any

from penstock.search.problem import Order, SearchProblem, TimedOrder

__all__ = ["ExactAnswer", "improve"]

_WORKERS = 2
_FINE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAnswer:
    """The result of CP-SAT.

    Args:
        order: an order no worse than the start; None if CP-SAT found none in time.
        bound: a lower bound on the objective; 0 if the search excluded some programs.
        proven: True if the order is optimal among the searched programs.
        used_s: the deterministic time used.
        cut_short: True if the wall-clock limit ended the search.
    """

    order: Order | None
    bound: float
    proven: bool
    used_s: float
    cut_short: bool


def improve(
    problem: SearchProblem,
    start: TimedOrder,
    *,
    effort_s: float,
    clock_s: float,
    seed: int,
    at_least: float = 0.0,
    late_starts: bool = False,
) -> ExactAnswer:
    """Search for the best order.

    Args:
        problem: the search problem.
        start: the warm start.
        effort_s: the limit in deterministic seconds of CP-SAT.
        clock_s: the limit in wall-clock seconds.
        seed: the random seed.
        at_least: a known lower bound.
        late_starts: if True, ranks may delay their start, as a bound on the span requires.

    Raises:
        ImportError: OR-Tools is not installed.
    """
    found = _Model(problem, start, at_least, late_starts).solve(effort_s, clock_s, seed)
    if found.order is None:
        return found
    # After rounding, actions that take no time look as if they held no memory meanwhile.
    peaks = problem.peaks(problem.program(found.order, name="exact"))
    return found if max(peaks) <= problem.most else replace(found, order=None)


class _Model:
    """The CP-SAT model of one search."""

    def __init__(
        self, problem: SearchProblem, start: TimedOrder, at_least: float, late_starts: bool
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.problem, self.start, self.late_starts = problem, start, late_starts
        self.stages = problem.placement.num_stages
        # An overlapped pair may be shorter than its actions in turn.
        bounds_all = late_starts or problem.objective == "makespan"
        self.bounds_all = bounds_all and problem.splits and problem.costs.overlap is None
        self.model = self.cp.CpModel()
        delays = [delay for needs in problem.needs for _, delay in needs]
        numbers = [*problem.durations, *delays, *problem.origins]
        self.unit = _unit(numbers, start.value)
        # Rounding down both ends of an interval can lose one unit.
        multiples = all(abs(n / self.unit - round(n / self.unit)) <= 1e-6 for n in numbers)
        self.lost = int(late_starts and not multiples)
        self.lengths = [self.ticks(length) for length in problem.durations]
        ends = [0.0] * problem.placement.num_ranks
        for rank, times in zip(problem.ranks, start.ends, strict=True):
            ends[rank] = max(ends[rank], *times)
        # A rank's first action depends on an action of a rank that started earlier.
        latest = len(ends) * (start.value + max(delays, default=0.0)) if late_starts else max(ends)
        self.horizon = self.ticks(latest) + 1
        # By kind, the start of each microbatch.
        self.starts: list[list[Any]] = [self.starts_of(kind) for kind in range(problem.num_kinds)]
        self.precede()
        self.keep_limits()
        most = start.value if late_starts else problem.value(ends)
        self.objective = self.model.new_int_var(
            max(0, self.ticks(at_least)), max(1, math.ceil(most / self.unit)), "goal"
        )
        self.count_from_origins()
        self.model.minimize(self.objective)

    def ticks(self, time: float) -> int:
        """A time in units, rounded down except for floating-point error."""
        return int(time / self.unit + 1e-6)

    def actions_of(self, kinds: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The kind and the start of each action of a rank."""
        for act in self.problem.ids(kinds):
            kind, microbatch = divmod(act, self.problem.num_microbatches)
            yield kind, self.starts[kind][microbatch]

    def starts_of(self, kind: int) -> list[Any]:
        """The variables of a kind's starts, with those of the warm start as hints."""
        found = []
        for microbatch, end in enumerate(self.start.ends[kind]):
            variable = self.model.new_int_var(0, self.horizon, f"{kind}.{microbatch}")
            self.model.add_hint(variable, self.ticks(end - self.problem.durations[kind]))
            found.append(variable)
        return found

    def count_from_origins(self) -> None:
        """Bound the objective from below by every rank's last end, counted from its origin."""
        problem = self.problem
        for kind, starts in enumerate(self.starts):
            rank = problem.ranks[kind]
            origin: Any = math.ceil(problem.origins[rank] / self.unit - 1e-9)
            if self.late_starts:
                # The first forward of a rank's first stage precedes all its other actions.
                origin = self.starts[min(problem.placement.stages_of(rank))][0]
            self.model.add(self.objective >= starts[-1] + self.lengths[kind] - origin - self.lost)
        if self.late_starts:
            self.model.add(self.starts[0][0] == 0)

    def precede(self) -> None:
        """Add the readiness rules, the index order of microbatches, and one action at a time."""
        for kind, starts in enumerate(self.starts):
            for microbatch, start in enumerate(starts):
                for before, delay in self.problem.needs[kind]:
                    end = self.starts[before][microbatch] + self.lengths[before]
                    self.model.add(start >= end + self.ticks(delay))
                if microbatch:
                    self.model.add(start >= starts[microbatch - 1] + self.lengths[kind])
        for kinds in self.start.order:
            timed = [(start, self.lengths[kind]) for kind, start in self.actions_of(kinds)]
            self.model.add_no_overlap(
                self.model.new_interval_var(start, length, start + length, f"i{number}")
                for number, (start, length) in enumerate(timed)
            )

    def keep_limits(self) -> None:
        """Add the memory limits: a stage holds an activation from F to W."""
        problem, changes = self.problem, self.problem.changes
        for rank in range(problem.placement.num_ranks):
            stages = problem.placement.stages_of(rank)
            if problem.limit >= problem.num_microbatches * sum(changes[s] for s in stages):
                continue
            last = 2 * self.stages + stages[0]
            if len(stages) == 1 and changes[stages[0]] == -changes[last]:
                # A forward starts after the weight gradient that frees its place.
                number = int(problem.limit / changes[stages[0]] + 1e-9)
                for microbatch in range(number, problem.num_microbatches):
                    end = self.starts[last][microbatch - number] + self.lengths[last]
                    self.model.add(self.starts[stages[0]][microbatch] >= end)
            else:
                self.keep_sum(stages)

    def keep_sum(self, stages: Sequence[int]) -> None:
        """Limit the sum of what all stages of a rank hold, before the end of I and after it."""
        problem, changes, limit = self.problem, self.problem.changes, self.problem.limit
        # The first kind, the last kind, and the size that is held from one to the other.
        parts: list[tuple[int, int, float]] = []
        for stage in stages:
            by_input, by_weight = stage + self.stages, stage + 2 * self.stages
            before, after = changes[stage], -changes[by_weight]
            if before == after:
                parts.append((stage, by_weight, before))
            else:
                parts += (stage, by_input, before), (by_input, by_weight, after)
        unit = _unit([size for *_, size in parts], limit)
        held: list[Any] = []
        demands: list[int] = []
        for first, last, size in parts:
            for microbatch in range(problem.num_microbatches):
                start = self.starts[first][microbatch]
                if first >= self.stages:
                    start += self.lengths[first]
                end = self.starts[last][microbatch] + self.lengths[last]
                name = f"h{first}.{microbatch}"
                length = self.model.new_int_var(0, self.horizon, name)
                self.model.add(length == end - start)
                held.append(self.model.new_interval_var(start, length, end, name))
                demands.append(int(size / unit + 1e-6))
        self.model.add_cumulative(held, demands, int(limit / unit + 1e-6))

    def solve(self, effort_s: float, clock_s: float, seed: int) -> ExactAnswer:
        """Run CP-SAT within both limits."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = _WORKERS
        solver.parameters.interleave_search = True
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = effort_s
        solver.parameters.max_time_in_seconds = clock_s
        status = solver.solve(self.model)
        used = solver.response_proto.deterministic_time
        proven = status == self.cp.OPTIMAL
        return ExactAnswer(
            order=self.order(solver) if status in (self.cp.OPTIMAL, self.cp.FEASIBLE) else None,
            bound=solver.best_objective_bound * self.unit if self.bounds_all else 0.0,
            proven=proven,
            used_s=used,
            cut_short=not proven and used < effort_s and solver.wall_time >= 0.95 * clock_s,
        )

    def order(self, solver: Any) -> Order:
        """Sort each rank's kinds by start; zero-length actions that tie keep their order."""
        ranks = []
        for kinds in self.start.order:
            timed = []
            for place, (kind, start) in enumerate(self.actions_of(kinds)):
                begins = solver.value(start)
                timed.append((begins, begins + self.lengths[kind], place, kind))
            ranks.append(tuple(kind for *_, kind in sorted(timed)))
        return tuple(ranks)


def _unit(numbers: Sequence[float], whole: float) -> float:
    """A common divisor of all numbers, or else a small fraction of the whole."""
    numbers = [number for number in numbers if number]
    fractions = [Fraction(number).limit_denominator(1000) for number in numbers]
    pairs = zip(fractions, numbers, strict=True)
    near = all(abs(float(fraction) - number) <= 1e-12 * number for fraction, number in pairs)
    if fractions and near:
        common = reduce(math.lcm, (f.denominator for f in fractions))
        unit = reduce(math.gcd, (int(f * common) for f in fractions)) / common
        if whole / unit <= 100 * _FINE:
            return unit
    return (whole or 1.0) / _FINE
