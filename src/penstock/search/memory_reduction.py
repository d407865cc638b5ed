"""Memory reduction: stages recompute or offload until a program fits a memory limit.

    0F0 0F1 0F2 0I0 0W0 ...               rank 0 holds 3, the limit is 2
    0F0 0F1 0F2 0RECOMPUTE0 0I0 0W0 ...   rank 0 holds what one microbatch needs

On each rank over the limit as few stages as possible recompute or offload, the largest first. The
programs come from a search without a limit or under a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.families.common import with_weight_grads
from penstock.schedule.passes import offload, recompute
from penstock.schedule.program import Program
from penstock.schedule.workload import schedule_by_priority
from penstock.search.problem import Order, SearchProblem
from penstock.search.state import Point, SearchState
from penstock.simulate.simulation import simulate

__all__ = ["reduce_memory", "refuse_infeasible"]

# The pass that reduces the memory of some stages, by the argument of ``search`` that allows it.
_PASSES = {"recompute": recompute, "offload": offload}
# The number of programs tried for each placement.
_TRIED = 8


def refuse_infeasible(problems: Sequence[SearchProblem], allowed: Sequence[str]) -> None:
    """Refuse a limit that no program meets, on any placement.

    Raises:
        ScheduleError: the limit is infeasible; the message gives the smallest feasible one.
    """
    some = problems[0]
    least = min(problem.least_memory for problem in problems)
    least = min([least, *(_least_reduced(problems, way) for way in allowed)])
    if least > some.most:
        raise ScheduleError(
            f"search: no program meets memory_limit={some.limit:.12g}: one microbatch alone holds "
            f"{least:.12g} on some rank; raise the limit"
            + ("" if allowed else ", use fewer stages per rank, or allow recompute or offload"),
            parameter="memory_limit",
        )


def reduce_memory(
    state: SearchState, problems: list[SearchProblem], allowed: Sequence[str]
) -> None:
    """Add feasible programs by reducing the memory of ranks that exceed the limit."""
    state.problems = problems
    for problem in problems:
        bases = {_one_by_one(problem): "one by one"}
        for each in state.ranked(problem.placement, feasible=False)[:_TRIED]:
            order = problem.order(each.program)
            bases.setdefault(order, each.method)
            # A recomputed activation stays in memory until its weight gradient, so a later weight
            # gradient gains nothing.
            stages = problem.placement.num_stages
            short = [[kind for kind in kinds if kind < 2 * stages] for kinds in order]
            at_once = tuple(tuple(with_weight_grads(kinds, stages)) for kinds in short)
            bases.setdefault(at_once, each.method)
        for number, (order, method) in enumerate(bases.items()):
            base = problem.program(order, name="searched")
            for way in allowed:
                # One by one, a program may fit where no other does.
                if number and state.is_late(times=3):
                    return
                _reduce(state, problem, base, way, method)


def _least_reduced(problems: Sequence[SearchProblem], way: str) -> float:
    """The peak of the fullest rank if microbatches run one at a time and all stages are reduced."""
    found = []
    for problem in problems:
        one = replace(problem, num_microbatches=1)
        reduced = _PASSES[way](one.program(_one_by_one(one), name="one by one"))
        found.append(float(max(simulate(reduced, problem.costs).peak_bytes)))
    return min(found)


def _one_by_one(problem: SearchProblem) -> Order:
    """An order in which no stage holds more than one microbatch."""
    wishes = [[float(n) for n in range(problem.num_microbatches)]] * problem.num_kinds
    windows = (1,) * problem.placement.num_stages
    free = replace(problem, limit=problem.least_memory)
    return schedule_by_priority(free, wishes, windows=windows).order


def _reduce(
    state: SearchState, problem: SearchProblem, base: Program, way: str, method: str
) -> None:
    """Reduce stages of the ranks over the limit, one more per rank at each step."""
    sizes = problem.memory.activation
    largest_first = [
        sorted(problem.placement.stages_of(rank), key=lambda stage: (-sizes[stage], stage))
        for rank in range(base.num_ranks)
    ]
    chosen: set[int] = set()
    while True:
        program = _PASSES[way](base, stages=frozenset(chosen)) if chosen else base
        result = simulate(program, problem.costs)
        full = [rank for rank, peak in enumerate(result.peak_bytes) if peak > problem.most]
        if not full:
            break
        more = [largest_first[rank].pop(0) for rank in full if largest_first[rank]]
        if not more:
            return
        chosen.update(more)
    if chosen:
        state.reduced.append(
            Point(
                program=program,
                value=getattr(result, problem.objective),
                peak=float(max(result.peak_bytes)),
                method=f"{way}, after {method}",
            )
        )
