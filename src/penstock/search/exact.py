"""Exact search with OR-Tools CP-SAT: of a whole step, or of a window of an order.

    rank 0  F0 F1 | F2 I0 W0 F3 | I1 W1 I2 ...        before the window: unchanged
    rank 1  .. F0 | I0 F1 W0 I1 | F2 W1 I2 ...        in the window: any order
                                                      after it: the order stays, times follow

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

from penstock.schedule.action import Op
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
    window: tuple[float, float] | None = None,
    effort_s: float,
    clock_s: float,
    seed: int,
    at_least: float = 0.0,
    late_starts: bool = False,
) -> ExactAnswer:
    """Search for the best order that differs from ``start`` only inside the window.

    Args:
        problem: the search problem.
        start: the warm start.
        window: a start and an end time; only actions that start between them may be reordered. None
            for all.
        effort_s: the limit in deterministic seconds of CP-SAT.
        clock_s: the limit in wall-clock seconds.
        seed: the solver's seed.
        at_least: a known lower bound.
        late_starts: if True, ranks may delay their start, as a bound on the span requires.

    Raises:
        ImportError: OR-Tools is not installed.
    """
    found = _Model(problem, start, window, at_least, late_starts).solve(effort_s, clock_s, seed)
    if found.order is None:
        return found
    # After rounding, actions that take no time look as if they held no memory meanwhile.
    peaks = problem.peaks(problem.program(found.order, name="exact"))
    return found if max(peaks) <= problem.most else replace(found, order=None)


class _Model:
    """The CP-SAT model of one search."""

    def __init__(
        self,
        problem: SearchProblem,
        start: TimedOrder,
        window: tuple[float, float] | None,
        at_least: float,
        late_starts: bool,
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.problem = problem
        self.start = start
        self.low, self.high = (-math.inf, math.inf) if window is None else window
        self.late_starts = late_starts
        self.bounds_all = (
            window is None
            and (late_starts or problem.objective == "makespan")
            # An overlapped pair may be shorter than its actions in turn; a full backward may hold
            # less.
            and problem.costs.overlap is None
            and problem.splits
            and (math.isinf(problem.limit) or not any(problem.growths))
        )
        self.model = self.cp.CpModel()
        delays = [delay for needs in problem.needs for _, delay in needs]
        numbers = [*problem.durations, *delays, *problem.origins]
        self.unit = _unit(numbers, start.value)
        # Rounding down both ends of an interval can lose one unit.
        self.lost = int(late_starts and not _is_unit(self.unit, numbers))
        self.lengths = [self.ticks(length) for length in problem.durations]
        ends = [0.0] * problem.placement.num_ranks
        for rank, times in zip(problem.ranks, start.ends, strict=True):
            ends[rank] = max(ends[rank], *times)
        # A rank's first action depends on an action of a rank that started earlier.
        latest = len(ends) * (start.value + max(delays, default=0.0)) if late_starts else max(ends)
        self.horizon = self.ticks(latest) + 1
        # By kind, the start of each microbatch: a variable, or a number if fixed.
        self.starts: list[list[Any]] = [self.starts_of(kind) for kind in range(problem.num_kinds)]
        self.precede()
        self.exclude_each_other()
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

    def began(self, kind: int, microbatch: int) -> float:
        """The start of an action in the warm start."""
        return self.start.ends[kind][microbatch] - self.problem.durations[kind]

    def actions_of(self, kinds: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The (kind, microbatch) pairs of a rank."""
        return (divmod(each, self.problem.num_microbatches) for each in self.problem.ids(kinds))

    def starts_of(self, kind: int) -> list[Any]:
        """The start of each microbatch of a kind, as a variable or a fixed number."""
        found: list[Any] = []
        for microbatch in range(self.problem.num_microbatches):
            began = self.began(kind, microbatch)
            if began < self.low:
                found.append(self.ticks(began))
                continue
            variable = self.model.new_int_var(0, self.horizon, f"{kind}.{microbatch}")
            self.model.add_hint(variable, self.ticks(began))
            found.append(variable)
        return found

    def is_free(self, kind: int, microbatch: int) -> bool:
        """True if the start is a variable."""
        return not isinstance(self.starts[kind][microbatch], int)

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
        """Add the readiness rules, and the index order of each kind's microbatches."""
        for kind, starts in enumerate(self.starts):
            for microbatch, start in enumerate(starts):
                if not self.is_free(kind, microbatch):
                    continue
                for before, delay in self.problem.needs[kind]:
                    end = self.starts[before][microbatch] + self.lengths[before]
                    self.model.add(start >= end + self.ticks(delay))
                if microbatch:
                    self.model.add(start >= starts[microbatch - 1] + self.lengths[kind])

    def exclude_each_other(self) -> None:
        """Add no-overlap constraints for each rank, and the fixed order outside the window."""
        for kinds in self.start.order:
            before: Any = 0
            inside: list[Any] = []
            ends_inside: list[Any] = []
            after = False
            for kind, microbatch in self.actions_of(kinds):
                began = self.began(kind, microbatch)
                start, length = self.starts[kind][microbatch], self.lengths[kind]
                if began < self.low:
                    before = max(before, start + length)
                elif began < self.high and not after:
                    self.model.add(start >= before)
                    inside.append(
                        self.model.new_interval_var(start, length, start + length, f"i{kind}")
                    )
                    ends_inside.append(start + length)
                else:
                    # The first action after the window follows all actions inside; later ones
                    # follow in order.
                    for end in ends_inside if not after else ():
                        self.model.add(start >= end)
                    self.model.add(start >= before)
                    before = start + length
                    after = True
            if len(inside) > 1:
                self.model.add_no_overlap(inside)

    def keep_limits(self) -> None:
        """Add the memory limits: a stage holds an activation from F to W."""
        problem, size = self.problem, self.problem.placement.num_stages
        forwards, weights = problem.changes[:size], problem.changes[2 * size :]
        for rank in range(problem.placement.num_ranks):
            stages = problem.placement.stages_of(rank)
            most = sum(forwards[stage] + problem.growths[stage] for stage in stages)
            if problem.limit >= problem.num_microbatches * most:
                continue
            if len(stages) == 1 and forwards[stages[0]] == -weights[stages[0]]:
                self.keep_one(stages[0])
            else:
                held = {stage: (forwards[stage], -weights[stage]) for stage in stages}
                self.keep_many(held)

    def keep_one(self, stage: int) -> None:
        """Limit memory with one stage per rank: a forward starts after the weight gradient that
        frees its place."""
        number = int(self.problem.limit / self.problem.changes[stage] + 1e-9)
        last = self.problem.kind(Op.WEIGHT_GRAD, stage)
        for microbatch in range(number, self.problem.num_microbatches):
            if self.is_free(stage, microbatch):
                end = self.starts[last][microbatch - number] + self.lengths[last]
                self.model.add(self.starts[stage][microbatch] >= end)

    def keep_many(self, sizes: dict[int, tuple[float, float]]) -> None:
        """Limit memory with several stages per rank: bound the sum over all stages.

        Args:
            sizes: for each stage of a rank, its memory before the end of I and after it.
        """
        problem, limit = self.problem, self.problem.limit
        unit = _unit([size for both in zip(*sizes.values(), strict=True) for size in both], limit)
        held: list[Any] = []
        demands: list[int] = []
        for stage, (before, behind) in sizes.items():
            by_input, by_weight = (
                problem.kind(op, stage) for op in (Op.INPUT_GRAD, Op.WEIGHT_GRAD)
            )
            # One interval if the size is the same before and after I, else two.
            parts = [(stage, by_weight, before)]
            if before != behind:
                parts = [(stage, by_input, before), (by_input, by_weight, behind)]
            for first, last, size in parts:
                for microbatch in range(problem.num_microbatches):
                    start = self.starts[first][microbatch]
                    if first == by_input:
                        start += self.lengths[by_input]
                    end = self.starts[last][microbatch] + self.lengths[last]
                    if isinstance(end, int) and end <= self.ticks(max(0.0, self.low)):
                        continue
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
            for place, (kind, microbatch) in enumerate(self.actions_of(kinds)):
                start = self.starts[kind][microbatch]
                begins = start if isinstance(start, int) else solver.value(start)
                timed.append((begins, begins + self.lengths[kind], place, kind))
            ranks.append(tuple(kind for *_, kind in sorted(timed)))
        return tuple(ranks)


def _is_unit(unit: float, numbers: Sequence[float]) -> bool:
    """True if all numbers are multiples of the unit, up to floating-point error."""
    return all(abs(each / unit - round(each / unit)) <= 1e-6 for each in numbers)


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
