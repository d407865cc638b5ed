"""A search problem: the work of a step under costs and a limit, on one placement.

Backwards are split: a full backward is an input gradient with its weight gradient right after it,
except that its result reaches the next stage later. But W may hold more than F left, which a full
backward never does. Under a memory limit none is split then: I takes the time of both, and W none.

Messages are delays. One that does not overlap with its rank's compute is a part of the action that
sends it. Messages that wait for each other (``one_message_at_a_time``) do so only in simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import get_args

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.families.common import program_of
from penstock.schedule.family import refuse_sizes
from penstock.schedule.list_schedule import KIND_OPS, Edges, kind_needs
from penstock.schedule.placement import Placement, looped, wave
from penstock.schedule.program import Program
from penstock.schedule.wording import number_of
from penstock.schedule.workload import Objective, Order, TimedOrder, Workload
from penstock.simulate.costs import Costs, as_number
from penstock.simulate.memory import StageMemory, peaks

__all__ = ["Objective", "Order", "SearchProblem", "TimedOrder", "problems_of"]

# An upper bound on any sum of sizes that costs accept.
_NO_LIMIT = 1e120


# Without slots: cached tables live in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class SearchProblem(Workload):
    """A placement, a number of microbatches, costs and a limit; the rest follows from these.

    Args:
        costs: the cost of each kind of action.
    """

    costs: Costs
    durations: tuple[float, ...] = field(init=False)
    needs: Edges = field(init=False)
    changes: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        placement, costs = self.placement, self.costs
        stages = placement.num_stages
        unused = (0.0,) * (self.num_kinds - len(self.ops) * stages)
        durations = [cost for op in self.ops for cost in costs.of(op, num_stages=stages)]
        changes = [self.memory.change(op, stage) for op in self.ops for stage in range(stages)]

        def delay(stage: int, other: int) -> float:
            if costs.transfers_overlap or placement.same_rank(stage, other):
                return costs.travel(stage, other, placement)
            return costs.latency_between(stage, other, num_stages=stages)

        for first, offset in () if costs.transfers_overlap else ((0, +1), (stages, -1)):
            for stage in range(stages):
                other = placement.neighbour(stage, offset)
                if other is not None and not placement.same_rank(stage, other):
                    durations[first + stage] += costs.transfer(stage, other, num_stages=stages)
        for name, value in (
            ("durations", (*durations, *unused)),
            ("needs", kind_needs(placement, delay)),
            ("changes", (*changes, *unused)),
        ):
            object.__setattr__(self, name, value)

    @cached_property
    def memory(self) -> StageMemory:
        """The memory of stages, in the unit of the limit."""
        return StageMemory.of(self.costs, self.placement.num_stages)

    @cached_property
    def splits(self) -> bool:
        """True if backwards are split; if False, I is the full backward, and W does nothing."""
        pairs = zip(self.memory.activation, self.memory.weight_grad, strict=True)
        return math.isinf(self.limit) or all(after <= before for before, after in pairs)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of programs, by kind ÷ stages."""
        return KIND_OPS if self.splits else (Op.FORWARD, Op.FULL_BACKWARD)

    @property
    def least_memory(self) -> float:
        """The peak of the fullest rank if microbatches run one at a time: a lower bound."""
        sizes, ranks = self.memory.activation, range(self.placement.num_ranks)
        return max(sum(sizes[s] for s in self.placement.stages_of(rank)) for rank in ranks)

    @property
    def is_feasible(self) -> bool:
        """True if some program is within the limit."""
        return self.least_memory <= self.most

    def peaks(self, program: Program) -> tuple[float, ...]:
        """For each rank, the peak memory of a program on this placement."""
        return peaks(program, self.memory)

    def program(self, order: Sequence[Sequence[int]], *, name: str) -> Program:
        """The program that runs kinds in this order."""
        microbatches, full = self.num_microbatches, not self.splits
        return program_of(name, self.placement, microbatches, order, full=full)


def problems_of(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    virtual: int | None,
    memory_limit: float | None,
    objective: Objective,
    placements: Sequence[Placement] | None,
) -> list[SearchProblem]:
    """The search problem of each placement, feasible or not; arguments and errors of ``search``."""
    stages = {} if virtual is None else {"virtual": virtual}
    refuse_sizes("search", ranks=ranks, microbatches=microbatches, **stages)
    if objective not in get_args(Objective):
        raise ScheduleError(
            f"search: objective={objective!r}; choose 'makespan' (a barrier before the optimizer) "
            "or 'span' (none)"
        )
    limit = math.inf if memory_limit is None else as_number(memory_limit)
    if not limit >= 0:
        raise ScheduleError(
            f"search: memory_limit={memory_limit!r} is not a number ≥ 0", parameter="memory_limit"
        )
    if placements is None:
        placements = _usual(costs, ranks, virtual)
    else:
        _refuse_placements(placements, ranks, virtual)
    limit = limit if limit <= _NO_LIMIT else math.inf
    return [
        SearchProblem(
            placement=placement,
            num_microbatches=microbatches,
            costs=costs,
            limit=limit,
            objective=objective,
        )
        for placement in placements
    ]


def _usual(costs: Costs, ranks: int, virtual: int | None) -> tuple[Placement, ...]:
    """The default placements: loops, and waves for an even number of stages per rank."""
    if virtual is None:
        given = (getattr(costs, field.name) for field in fields(costs))
        stages = max((len(each) for each in given if isinstance(each, tuple)), default=ranks)
        if stages % ranks:
            raise ScheduleError(
                f"search: costs for {stages} stages, which {ranks} ranks can't share evenly; "
                "pass placements, or costs for a multiple of the ranks"
            )
        virtual = stages // ranks
    if virtual % 2 or ranks == 1:
        return (looped(ranks, virtual),)
    return looped(ranks, virtual), wave(ranks, virtual // 2)


def _refuse_placements(placements: Sequence[Placement], ranks: int, virtual: int | None) -> None:
    if not placements:
        raise ScheduleError("search: placements is empty; leave it out for the usual ones")
    for placement in placements:
        stages = ranks * (virtual or 1)
        if placement.num_ranks != ranks or (virtual and placement.num_stages != stages):
            raise ScheduleError(
                f"search: a placement of {number_of(placement.num_stages, 'stage')} on "
                f"{number_of(placement.num_ranks, 'rank')}, but ranks={ranks}"
                + (f" with virtual={virtual} hold {stages}" if virtual else "")
            )
        if placement.num_directions != 1:
            raise ScheduleError("search: placements with two copies of the model are not searched")
