"""Exact search of a whole step with OR-Tools CP-SAT.

CP-SAT counts in integers. Without a common unit, costs are rounded down, so its bound still holds;
a replay gives the objective of an order, never CP-SAT.

A rank's span counts from its own first start, so it may gain by starting late:

    rank 0  F0 F1 ..        rank 0  F0 F1 ..
    rank 1  .. F0 F1 ..     rank 1  .. .. F1 F0 ..

If kinds run microbatches in index order and ranks start as early as possible, such programs are
lost. For the span, ranks therefore choose their start. Sorting the times of any program kind by
kind gives a solution of that model, so its bound holds for all programs.

CP-SAT runs one interleaved worker with a fixed seed and a limit of deterministic time, so results
are the same on every machine; wall-clock time is a second limit. With two workers, and with probing
before the search, the optima of small steps take several times longer. Only this module uses
OR-Tools, and imports it lazily.

Steps that are too large for a proof are improved window by window: the order outside of a stretch
of time stays, and CP-SAT chooses the order within. Source: Shaw, Using constraint programming and
local search methods to solve vehicle routing problems, 1998 (large neighbourhood search).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

from penstock.search.problem import Order, SearchProblem, TimedOrder

__all__ = ["ExactAnswer", "improve", "improve_windows"]

_FINE = 20_000
# The first window's share of the step; its factor after a proof, and without one; the effort of a
# window at most, and the effort that it counts for at least, both in deterministic seconds.
_WINDOW, _WIDER, _NARROWER, _WINDOW_S, _LEAST_S = 0.4, 1.05, 0.9, 0.4, 0.01


class ExactAnswer(NamedTuple):
    """The result of CP-SAT."""

    # An order no worse than the start; None if CP-SAT found none in time.
    order: Order | None
    # A lower bound on the objective; 0 if the search excluded some programs.
    bound: float
    # True if CP-SAT ended with a proof.
    proven: bool
    # True if the wall-clock limit ended the search.
    cut_short: bool


def improve(
    problem: SearchProblem,
    start: TimedOrder,
    *,
    effort_s: float,
    clock_s: float,
    seed: int,
    at_least: float = 0.0,
) -> ExactAnswer:
    """Search for the best order.

    Args:
        problem: the search problem.
        start: the warm start.
        effort_s: the limit in deterministic seconds of CP-SAT.
        clock_s: the limit in wall-clock seconds.
        seed: the random seed.
        at_least: a known lower bound.

    Raises:
        ImportError: OR-Tools is not installed.
    """
    from ortools.sat.python import cp_model

    model = _Model(cp_model.CpModel(), problem, start, at_least)
    solver = _solver(cp_model.CpSolver(), effort_s, seed)
    solver.parameters.interleave_search = True
    solver.parameters.max_time_in_seconds = clock_s
    status = solver.solve(model.cp)
    proven, used_s = status == cp_model.OPTIMAL, solver.response_proto.deterministic_time
    # An overlapped pair may be shorter than its actions in turn.
    bounds_all = problem.splits and problem.costs.overlap is None
    found = ExactAnswer(
        order=model.order(solver) if proven or status == cp_model.FEASIBLE else None,
        bound=solver.best_objective_bound * model.unit if bounds_all else 0.0,
        proven=proven,
        cut_short=not proven and used_s < effort_s and solver.wall_time >= 0.95 * clock_s,
    )
    if found.order is None or _no_worse(problem, found.order, start):
        return found
    return found._replace(order=None)


def improve_windows(
    problem: SearchProblem,
    start: TimedOrder,
    *,
    effort_s: float,
    seed: int,
    is_over: Callable[[float], bool],
) -> tuple[float, Order]:
    """Improve an order, window by window.

        rank 0  F0 F1 F2 | F3 I0 W0 F4 | I1 ...      a random stretch of time, of all ranks or all
        rank 1  .. F0 F1 | F2 I0 F3 I1 | W0 ...      but one; its actions are placed anew

    A window grows if CP-SAT proved the last one optimal within its effort, else it shrinks.

    Args:
        problem: the search problem.
        start: the initial order.
        effort_s: the total work, in deterministic seconds of CP-SAT.
        seed: the random seed.
        is_over: takes the best objective so far; True ends the search.

    Returns:
        The best objective, and its order.
    """
    from ortools.sat.python import cp_model

    random, share, used_s = Random(seed), _WINDOW, 0.0
    ranks = range(problem.placement.num_ranks)
    while used_s < effort_s and not is_over(start.value):
        length = max(map(max, start.ends))
        begin = random.uniform(-share / 2, 1 - share / 2) * length
        fixed = random.choice([*ranks, *(None for _ in ranks)])
        model = _Model(cp_model.CpModel(), problem, start, 0.0)
        model.keep_order(start, (begin, begin + share * length), fixed)
        effort = min(_WINDOW_S, effort_s - used_s)
        solver = _solver(cp_model.CpSolver(), effort, random.randrange(1 << 30))
        solver.parameters.linearization_level = 0
        status = solver.solve(model.cp)
        used_s += max(_LEAST_S, solver.response_proto.deterministic_time)
        share = min(1.0, share * (_WIDER if status == cp_model.OPTIMAL else _NARROWER))
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            # An equally good order may lead to a better one.
            start = _no_worse(problem, model.order(solver), start) or start
    return start.value, start.order


def _solver(solver: Any, effort_s: float, seed: int) -> Any:
    """A solver with one worker, whose results are the same on every machine."""
    solver.parameters.num_workers = 1
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.random_seed = seed % (1 << 31)
    solver.parameters.max_deterministic_time = effort_s
    return solver


def _no_worse(problem: SearchProblem, order: Order, start: TimedOrder) -> TimedOrder | None:
    """The times of an order of CP-SAT; None if it is worse than the start.

    After rounding, actions that take no time look as if they held no memory meanwhile. An order may
    take longer if ranks start as early as possible.
    """
    if max(problem.peaks(problem.program(order, name="exact"))) > problem.most:
        return None
    played = problem.replay(order)
    return played if played and played.value <= start.value else None


class _Model:
    """The CP-SAT model of one search: by kind, the start of each microbatch."""

    def __init__(
        self, model: Any, problem: SearchProblem, start: TimedOrder, at_least: float
    ) -> None:
        self.cp, self.problem, self.kinds = model, problem, start.order
        delays = [delay for needs in problem.needs for _, delay in needs]
        numbers = [*problem.durations, *delays]
        self.unit = _unit(numbers, start.value)
        self.lengths = [self.ticks(length) for length in problem.durations]
        is_span, latest = problem.objective == "span", start.value
        if is_span:
            # A rank's first action depends on an action of a rank that started earlier.
            latest = problem.placement.num_ranks * (latest + max(delays, default=0.0))
        self.horizon = self.ticks(latest) + 1
        self.starts: list[list[Any]] = []
        for kind, ends in enumerate(start.ends):
            times = [model.new_int_var(0, self.horizon, f"{kind}.{n}") for n in range(len(ends))]
            self.starts.append(times)
            for variable, end in zip(times, ends, strict=True):
                model.add_hint(variable, self.ticks(end - problem.durations[kind]))
        self.precede()
        self.keep_limits()
        most = max(1, math.ceil(start.value / self.unit))
        objective = model.new_int_var(max(0, self.ticks(at_least)), most, "goal")
        # Rounding down both ends of an interval can lose one unit.
        multiples = all(abs(n / self.unit - round(n / self.unit)) <= 1e-6 for n in numbers)
        lost = int(is_span and not multiples)
        for kind, times in enumerate(self.starts):
            # The first forward of a rank's first stage precedes all its other actions.
            first = min(problem.placement.stages_of(problem.ranks[kind]))
            origin = self.starts[first][0] if is_span else 0
            model.add(objective >= times[-1] + self.lengths[kind] - origin - lost)
        if is_span:
            model.add(self.starts[0][0] == 0)
        model.minimize(objective)

    def ticks(self, time: float) -> int:
        """A time in units, rounded down except for floating-point error."""
        return int(time / self.unit + 1e-6)

    def actions_of(self, kinds: Sequence[int]) -> list[tuple[int, Any]]:
        """The kind and the start of each action of a rank."""
        acts = [divmod(act, self.problem.num_microbatches) for act in self.problem.ids(kinds)]
        return [(kind, self.starts[kind][microbatch]) for kind, microbatch in acts]

    def precede(self) -> None:
        """Add the readiness rules, the index order of microbatches, and one action at a time."""
        for kind, times in enumerate(self.starts):
            for before, delay in self.problem.needs[kind]:
                length = self.lengths[before] + self.ticks(delay)
                for start, needed in zip(times, self.starts[before], strict=True):
                    self.cp.add(start >= needed + length)
            for one, two in pairwise(times):
                self.cp.add(two >= one + self.lengths[kind])
        for kinds in self.kinds:
            self.cp.add_no_overlap(
                self.cp.new_interval_var(start, length, start + length, f"i{number}")
                for number, (kind, start) in enumerate(self.actions_of(kinds))
                for length in [self.lengths[kind]]
            )

    def keep_limits(self) -> None:
        """Limit the sum of what the stages of each rank hold: from F to W, or, if that changes, up
        to the end of I and from there on."""
        problem, changes, limit = self.problem, self.problem.changes, self.problem.limit
        stages = problem.placement.num_stages
        self.keep_room()
        for rank in range(problem.placement.num_ranks):
            # The first kind, the last kind, and the size that is held from one to the other.
            parts: list[tuple[int, int, float]] = []
            for stage in problem.placement.stages_of(rank):
                by_input, by_weight = stage + stages, stage + 2 * stages
                before, after = changes[stage], -changes[by_weight]
                if before == after:
                    parts.append((stage, by_weight, before))
                else:
                    parts += (stage, by_input, before), (by_input, by_weight, after)
            if limit >= problem.num_microbatches * sum(size for *_, size in parts):
                continue
            if len(parts) == 1:
                # A forward starts after the weight gradient that frees its place: a tighter model.
                first, last, size = parts[0]
                places = int(limit / size + 1e-9)
                for two, one in zip(self.starts[first][places:], self.starts[last], strict=False):
                    self.cp.add(two >= one + self.lengths[last])
                continue
            unit = _unit([size for *_, size in parts], limit)
            held: list[Any] = []
            demands: list[int] = []
            for first, last, size in parts:
                skipped = self.lengths[first] if first >= stages else 0
                for n, (one, two) in enumerate(
                    zip(self.starts[first], self.starts[last], strict=True)
                ):
                    begin, end = one + skipped, two + self.lengths[last]
                    length = self.cp.new_int_var(0, self.horizon, f"h{first}.{n}")
                    self.cp.add(length == end - begin)
                    held.append(self.cp.new_interval_var(begin, length, end, f"h{first}.{n}"))
                    demands.append(int(size / unit + 1e-6))
            self.cp.add_cumulative(held, demands, int(limit / unit + 1e-6))

    def keep_room(self) -> None:
        """Exclude dead ends early: a microbatch may enter a stage only if the first one that has
        not come back to the rank's last stage can still hold all of the rank's stages."""
        problem, most = self.problem, self.problem.most
        for rank in range(problem.placement.num_ranks):
            of_rank = problem.placement.stages_of(rank)
            whole, passed = sum(problem.changes[stage] for stage in of_rank), 0.0
            back = of_rank[-1] + problem.placement.num_stages
            for stage in of_rank:
                passed += problem.changes[stage]
                if most - whole < passed * problem.num_microbatches:
                    others = int((most - whole) / passed) + 1
                    late = self.starts[stage][others:]
                    for two, one in zip(late, self.starts[back], strict=False):
                        self.cp.add(two >= one + self.lengths[back])

    def keep_order(self, start: TimedOrder, window: tuple[float, float], fixed: int | None) -> None:
        """Keep the order of all actions of the fixed rank, and of those outside of a stretch of
        time. The others may also leave that stretch."""
        durations, width = self.problem.durations, self.problem.num_microbatches
        for rank, kinds in enumerate(start.order):
            kept = []
            for act in self.problem.ids(kinds):
                kind, microbatch = divmod(act, width)
                end = start.ends[kind][microbatch]
                if rank == fixed or end <= window[0] or end - durations[kind] >= window[1]:
                    kept.append((kind, microbatch))
            for (one, first), (two, second) in pairwise(kept):
                end_of_one = self.starts[one][first] + self.lengths[one]
                self.cp.add(self.starts[two][second] >= end_of_one)

    def order(self, solver: Any) -> Order:
        """Sort each rank's kinds by start; zero-length actions that tie keep their order."""
        ranks = []
        for kinds in self.kinds:
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
