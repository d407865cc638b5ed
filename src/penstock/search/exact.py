"""Exact search with OR-Tools CP-SAT: of a whole step, or of a window of an order.

    rank 0  F0 F1 | F2 I0 W0 F3 | I1 W1 I2 ...        before the window: unchanged
    rank 1  .. F0 | I0 F1 W0 I1 | F2 W1 I2 ...        in the window: any order
                                                      after it: the order stays, times follow

CP-SAT counts in integers. Without a common unit, costs are rounded down, so its bound still holds;
the objective of an order is never taken from CP-SAT, but from a replay.

A rank's span counts from its own first start, so it may gain by starting late:

    rank 0  F0 F1 ..        rank 0  F0 F1 ..
    rank 1  .. F0 F1 ..     rank 1  .. .. F1 F0 ..

Kinds that run microbatches in index order, and ranks that start as soon as they can, lose such
programs. So a bound on the span has a search of its own, in which ranks start when they like: sort
the times of any program kind by kind, and they are among those that are left.

CP-SAT runs interleaved workers with a fixed seed and a limit of deterministic time, so it answers
alike on every machine; the clock is a second limit. Only this module knows OR-Tools, and imports it
when used.
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
    """The answer of CP-SAT.

    Args:
        order: an order at least as good as the start; None if none was found in time.
        bound: a lower bound on the objective; 0 if not all programs were searched among.
        proven: whether the order is optimal among the programs that were searched.
        used_s: the deterministic time that it took.
        cut_short: whether the clock ended it.
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
    """The best order that differs from ``start`` in the window alone.

    Args:
        problem: what to run.
        start: the warm start.
        window: the order is free for actions that start from the first time on and before the
            second; None for all.
        effort_s: limit in deterministic seconds of CP-SAT.
        clock_s: limit in seconds.
        seed: of the solver.
        at_least: a bound that is known already.
        late_starts: whether ranks may start later than they can: for a bound on the span.

    Raises:
        ImportError: OR-Tools is not installed.
    """
    found = _Model(problem, start, window, at_least, late_starts).solve(effort_s, clock_s, seed)
    if found.order is None:
        return found
    # Sizes were rounded, and actions that take no time seemed to hold nothing meanwhile.
    peaks = problem.peaks(problem.program(found.order, name="exact"))
    return found if max(peaks) <= problem.most else replace(found, order=None)


class _Model:
    """The constraints of one search."""

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
            # Overlapped pairs may take less time than their parts, full backwards hold less.
            and problem.costs.overlap is None
            and problem.splits
            and (math.isinf(problem.limit) or not any(problem.growths))
        )
        self.model = self.cp.CpModel()
        delays = [delay for needs in problem.needs for _, delay in needs]
        numbers = [*problem.durations, *delays, *problem.origins]
        self.unit = _unit(numbers, start.value)
        # Of a time between two others that are rounded down, one unit may be lost.
        self.lost = int(late_starts and not _is_unit(self.unit, numbers))
        self.lengths = [self.ticks(length) for length in problem.durations]
        ends = [0.0] * problem.placement.num_ranks
        for rank, times in zip(problem.ranks, start.ends, strict=True):
            ends[rank] = max(ends[rank], *times)
        # A rank's first action follows one of a rank that started before it.
        latest = len(ends) * (start.value + max(delays, default=0.0)) if late_starts else max(ends)
        self.horizon = self.ticks(latest) + 1
        # Per kind, the start of each microbatch; a number if it is not to be changed.
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
        """A time in units, rounded down up to the error of floats."""
        return int(time / self.unit + 1e-6)

    def began(self, kind: int, microbatch: int) -> float:
        """The start of an action in the warm start."""
        return self.start.ends[kind][microbatch] - self.problem.durations[kind]

    def actions_of(self, kinds: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The kind and the microbatch of each action of a rank."""
        return (divmod(each, self.problem.num_microbatches) for each in self.problem.ids(kinds))

    def starts_of(self, kind: int) -> list[Any]:
        """The start of each microbatch of a kind, as a variable or a number."""
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
        """Whether the start is a variable."""
        return not isinstance(self.starts[kind][microbatch], int)

    def count_from_origins(self) -> None:
        """The objective is no less than any rank's last end, from its origin on."""
        problem = self.problem
        for kind, starts in enumerate(self.starts):
            rank = problem.ranks[kind]
            origin: Any = math.ceil(problem.origins[rank] / self.unit - 1e-9)
            if self.late_starts:
                # Nothing on a rank comes before the first forward of its first stage.
                origin = self.starts[min(problem.placement.stages_of(rank))][0]
            self.model.add(self.objective >= starts[-1] + self.lengths[kind] - origin - self.lost)
        if self.late_starts:
            self.model.add(self.starts[0][0] == 0)

    def precede(self) -> None:
        """The readiness rules, and the index order of each kind's microbatches."""
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
        """A rank runs one action at a time; outside of the window, in the order that it has."""
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
                    # The first after the window comes after all of it, the others in turn.
                    for end in ends_inside if not after else ():
                        self.model.add(start >= end)
                    self.model.add(start >= before)
                    before = start + length
                    after = True
            if len(inside) > 1:
                self.model.add_no_overlap(inside)

    def keep_limits(self) -> None:
        """Activations are held from F to W, within the limit."""
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
        """With one stage per rank: a forward after the weight gradient that makes room for it."""
        number = int(self.problem.limit / self.problem.changes[stage] + 1e-9)
        last = self.problem.kind(Op.WEIGHT_GRAD, stage)
        for microbatch in range(number, self.problem.num_microbatches):
            if self.is_free(stage, microbatch):
                end = self.starts[last][microbatch - number] + self.lengths[last]
                self.model.add(self.starts[stage][microbatch] >= end)

    def keep_many(self, sizes: dict[int, tuple[float, float]]) -> None:
        """With several: all that is held at a time, together.

        Args:
            sizes: for each stage of a rank, what it holds before the end of I and after.
        """
        problem, limit = self.problem, self.problem.limit
        unit = _unit([size for both in zip(*sizes.values(), strict=True) for size in both], limit)
        held: list[Any] = []
        demands: list[int] = []
        for stage, (before, behind) in sizes.items():
            by_input, by_weight = (
                problem.kind(op, stage) for op in (Op.INPUT_GRAD, Op.WEIGHT_GRAD)
            )
            # Alike before and after I: one interval; else one up to its end, and one from there.
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
        """Runs CP-SAT within both limits."""
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
        """Each rank's kinds by start; ties of actions that take no time keep their order."""
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
    """Whether all numbers are multiples of the unit, up to the error of floats."""
    return all(abs(each / unit - round(each / unit)) <= 1e-6 for each in numbers)


def _unit(numbers: Sequence[float], whole: float) -> float:
    """A unit of which all numbers are multiples, or else a small part of the whole."""
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
