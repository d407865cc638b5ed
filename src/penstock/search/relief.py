"""Programs that hold less than the ones they come from: stages recompute, or offload.

    0F0 0F1 0F2 0I0 0W0 ...               rank 0 holds 3, the limit is 2
    0F0 0F1 0F2 0RECOMPUTE0 0I0 0W0 ...   rank 0 holds what one microbatch needs

Of each rank that holds too much, as few stages as it takes do so, those first that hold the most.
Programs are those of a search without a limit, and those within a larger one; passes change them,
and the simulation tells what they come to then. This module looks for no order itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.passes.offload import offload
from penstock.schedule.passes.recompute import recompute
from penstock.schedule.program import Program
from penstock.search.greedy import place
from penstock.search.known import Found, Known
from penstock.search.problem import SearchProblem, order_of, program_of, slack
from penstock.simulate.simulation import Simulation, simulate

__all__ = ["Relief", "least_relieved", "relieve", "reliefs"]

_Pass: TypeAlias = Callable[[Program, frozenset[int]], Program]

# How many programs of each placement are tried.
_TRIED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """A way to hold less.

    Args:
        name: what the method of such a program is called.
        argument: the argument of ``search`` that allows it.
        apply: the pass, for some stages of a program.
    """

    name: str
    argument: str
    apply: _Pass


_RECOMPUTE = Relief(
    name="recomputation",
    argument="recompute",
    apply=lambda program, stages: recompute(program, stages=stages),
)
_OFFLOAD = Relief(
    name="offload",
    argument="offload",
    apply=lambda program, stages: offload(program, stages=stages),
)


def reliefs(*, recompute: bool, offload: bool) -> tuple[Relief, ...]:
    """The ways that are allowed."""
    both = ((recompute, _RECOMPUTE), (offload, _OFFLOAD))
    return tuple(relief for allowed, relief in both if allowed)


def relieve(known: Known, starts: Sequence[Found], allowed: Sequence[Relief]) -> None:
    """Note programs within the limit that come from others, where ranks of those hold too much.

    Args:
        known: what is known; the programs are noted there.
        starts: programs within the limit or not.
        allowed: the ways to hold less.
    """
    for problem in known.problems:
        mine = sorted(
            (each for each in starts if each.placement == problem.placement),
            key=lambda found: found.value,
        )
        alone = program_of(problem, _one_by_one(problem), name="one by one")
        for relief in allowed:
            # If that is too much, all is.
            _relieve(known, problem, alone, relief, "one by one")
        for base, method in _bases(problem, mine[:_TRIED]):
            for relief in allowed:
                if known.is_late(times=3):
                    return
                _relieve(known, problem, base, relief, method)


def least_relieved(problems: Iterable[SearchProblem], relief: Relief) -> float:
    """What the fullest rank holds where microbatches go one by one and all stages are relieved."""
    return min(_all_relieved(problem.resized(1), relief) for problem in problems)


def _all_relieved(problem: SearchProblem, relief: Relief) -> float:
    program = program_of(problem, _one_by_one(problem), name="one by one")
    relieved = relief.apply(program, frozenset(range(program.num_stages)))
    return max(peaks_of(simulate(relieved, problem.costs)))


def _one_by_one(problem: SearchProblem) -> Sequence[Sequence[int]]:
    """The order in which no stage holds more than one microbatch."""
    wishes = [[float(n) for n in range(problem.num_microbatches)]] * problem.num_kinds
    free = problem.limited(max(problem.least_memory))
    return place(free, wishes, windows=(1,) * problem.placement.num_stages).order


def _bases(problem: SearchProblem, found: Sequence[Found]) -> Iterator[tuple[Program, str]]:
    """Programs, and the same with each weight gradient right after its input gradient.

    What is recomputed is held from then on, so that there is nothing to gain from weight
    gradients that come later.
    """
    seen = set()
    for each in found:
        order = order_of(problem, each.program)
        at_once = tuple(_weights_at_once(problem, kinds) for kinds in order)
        for variant in (order, at_once):
            if variant not in seen:
                seen.add(variant)
                yield program_of(problem, variant, name=each.program.name), each.method


def _weights_at_once(problem: SearchProblem, kinds: Sequence[int]) -> tuple[int, ...]:
    stages = problem.placement.num_stages
    found: list[int] = []
    for kind in kinds:
        if kind < 2 * stages:
            found.append(kind)
        if stages <= kind < 2 * stages:
            found.append(kind + stages)
    return tuple(found)


def _relieve(
    known: Known, problem: SearchProblem, base: Program, relief: Relief, method: str
) -> None:
    """Relieve stages of the ranks that hold too much, one more of each at a time."""
    most = known.limit + slack(known.limit)
    sizes = problem.held
    left = [
        sorted(problem.placement.stages_of(rank), key=lambda stage: (-sizes[stage], stage))
        for rank in range(base.num_ranks)
    ]
    chosen: set[int] = set()
    program = base
    while True:
        result = simulate(program, problem.costs)
        peaks = peaks_of(result)
        full = [rank for rank, peak in enumerate(peaks) if peak > most]
        if not full:
            if chosen:
                method = f"{relief.name}, after {method}"
                known.note_simulated(problem, result, float(max(peaks)), method, is_relieved=True)
            return
        more = [left[rank].pop(0) for rank in full if left[rank]]
        if not more:
            return
        chosen.update(more)
        program = relief.apply(base, frozenset(chosen))


def peaks_of(result: Simulation) -> Sequence[float]:
    """For each rank the most that it holds, in the unit of a memory limit."""
    counted = result.costs.activation_bytes is None and result.costs.weight_grad_bytes is None
    return result.peak_in_flight if counted else result.peak_bytes
