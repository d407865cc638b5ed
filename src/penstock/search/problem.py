"""A search problem in integers: rules and costs are read once, not per action.

    kind     (F, I or W) x stage          as ``penstock.schedule.list_schedule`` numbers them
    order    for each rank, kinds         each kind runs its microbatches in index order

Microbatches are interchangeable, so each kind runs them in index order without loss of generality.
Backwards are split: a full backward is an input gradient with its weight gradient right after it,
except that its result reaches the next stage later. But W may hold more than F left, which a full
backward never does. Under a memory limit none is split then: I takes the time of both, and W none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, get_args

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.family import refuse_sizes
from penstock.schedule.list_schedule import KIND_OPS, actions_of, kind_needs
from penstock.schedule.messages import number_of
from penstock.schedule.placement import Placement, looped, wave
from penstock.schedule.program import Program
from penstock.schedule.replay import DependencyReplay
from penstock.simulate.costs import Costs, as_number
from penstock.simulate.memory import StageMemory, peaks

__all__ = ["Objective", "Order", "SearchProblem", "TimedOrder", "problems_of"]

Objective: TypeAlias = Literal["makespan", "span"]

Order: TypeAlias = tuple[tuple[int, ...], ...]
"""The kinds of each rank, in execution order."""

Edges: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""For each action or kind, others of the same microbatch, and the delays of results."""

# An upper bound on any sum of sizes that costs accept.
_NO_LIMIT = 1e120


class TimedOrder(NamedTuple):
    """An order, its objective, and for each kind the end of each microbatch."""

    order: Order
    value: float
    ends: tuple[tuple[float, ...], ...]


# Without slots: cached tables live in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A placement, a number of microbatches, costs and a limit.

    Args:
        placement: the rank of every stage.
        num_microbatches: microbatches per step.
        costs: the cost of each kind of action.
        limit: the most memory that a rank may hold; infinity for no limit.
        objective: the figure to minimize.
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    limit: float = math.inf
    objective: Objective = "makespan"

    @property
    def num_kinds(self) -> int:
        """Number of kinds: three per stage."""
        return 3 * self.placement.num_stages

    @property
    def size(self) -> int:
        """Number of actions of a program."""
        return self.num_kinds * self.num_microbatches

    @property
    def most(self) -> float:
        """The limit, with a tolerance for rounding errors in sums of activations."""
        return self.limit + 1e-9 * max(1.0, self.limit)

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

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """The compute time of each kind."""
        stages = self.placement.num_stages
        found = [cost for op in self.ops for cost in self.costs.of(op, num_stages=stages)]
        return (*found, *(0.0,) * (self.num_kinds - len(found)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each kind."""
        return self.placement.stage_ranks * 3

    @cached_property
    def needs(self) -> Edges:
        """For each kind, the kinds that it requires."""
        placement = self.placement
        return kind_needs(placement, lambda one, two: self.costs.travel(one, two, placement))

    @cached_property
    def users(self) -> Edges:
        """For each kind, the kinds that require it."""
        users: list[list[tuple[int, float]]] = [[] for _ in range(self.num_kinds)]
        for kind, needs in enumerate(self.needs):
            for before, delay in needs:
                users[before].append((kind, delay))
        return tuple(map(tuple, users))

    @cached_property
    def changes(self) -> tuple[float, ...]:
        """For each kind, the change of its rank's memory at its end (F: at its start)."""
        stages = range(self.placement.num_stages)
        found = [self.memory.change(op, stage) for op in self.ops for stage in stages]
        return (*found, *(0.0,) * (self.num_kinds - len(found)))

    @cached_property
    def origins(self) -> tuple[float, ...]:
        """For each rank, the time from which the objective counts.

        For the span that is the rank's first start: the first forward of its first stage precedes
        all its other actions.
        """
        ranks = range(self.placement.num_ranks)
        starts, now = list[float](), 0.0
        for stage in range(self.placement.num_stages):
            now += self.needs[stage][0][1] if stage else 0.0
            starts.append(now)
            now += self.durations[stage]
        is_span = self.objective == "span"
        return tuple(is_span * starts[min(self.placement.stages_of(rank))] for rank in ranks)

    @property
    def least_memory(self) -> float:
        """The peak of the fullest rank if microbatches run one at a time: a lower bound."""
        sizes, ranks = self.memory.activation, range(self.placement.num_ranks)
        return max(sum(sizes[s] for s in self.placement.stages_of(rank)) for rank in ranks)

    @property
    def is_feasible(self) -> bool:
        """True if some program is within the limit."""
        return self.least_memory <= self.most

    def value(self, ends: Sequence[float]) -> float:
        """The objective, from the ranks' last ends."""
        return max(end - origin for end, origin in zip(ends, self.origins, strict=True))

    def limited(self, limit: float) -> SearchProblem:
        """A copy with another limit."""
        return replace(self, limit=limit)

    def peaks(self, program: Program) -> tuple[float, ...]:
        """For each rank, the peak memory of a program on this placement."""
        return peaks(program, self.memory)

    def replay(self, order: Sequence[Sequence[int]]) -> TimedOrder | None:
        """The times of an order; None on a deadlock.

        They equal the times of ``penstock.simulate`` if messages do not wait for each other.
        """
        played = self.play([self.ids(kinds) for kinds in order])
        if played is None:
            return None
        width = self.num_microbatches
        return TimedOrder(
            order=tuple(map(tuple, order)),
            value=self.value([each[-1] if each else 0.0 for each in played.ends]),
            ends=tuple(
                tuple(played.done[first : first + width]) for first in range(0, self.size, width)
            ),
        )

    def play(self, queues: Sequence[Sequence[int]]) -> DependencyReplay | None:
        """Replay each rank's actions (``ids``); None on a deadlock."""
        width = self.num_microbatches
        played = DependencyReplay(
            queues,
            (),
            num_ids=self.size,
            width=width,
            needs=[
                tuple(((before - kind) * width, delay) for before, delay in needs)
                for kind, needs in enumerate(self.needs)
            ],
            fulfilled=[(0,)] * self.num_kinds,
            durations=self.durations,
        )
        return played if played.play() else None

    def ids(self, kinds: Sequence[int]) -> list[int]:
        """The actions of a rank's kinds as integers: kind x microbatches + microbatch."""
        following = [kind * self.num_microbatches - 1 for kind in range(self.num_kinds)]
        found = []
        for kind in kinds:
            following[kind] += 1
            found.append(following[kind])
        return found

    def program(self, order: Sequence[Sequence[int]], *, name: str) -> Program:
        """The program that runs kinds in this order."""
        width = self.num_microbatches
        ranks = actions_of(self.placement, order, microbatches=width, full=not self.splits)
        return Program(name=name, placement=self.placement, num_microbatches=width, ranks=ranks)

    def order(self, program: Program) -> Order:
        """The order of a program's kinds, with full backwards split; inverse of ``program``."""
        stages = self.placement.num_stages
        numbers: dict[Op, tuple[int, ...]]
        numbers = {op: (number * stages,) for number, op in enumerate(KIND_OPS)}
        numbers[Op.FULL_BACKWARD] = (stages, 2 * stages)
        return tuple(
            tuple(
                first + part.stage
                for step in steps
                for part in step.parts
                for first in numbers[part.op]
            )
            for steps in program.ranks
        )


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
    if not isinstance(placements, Sequence) or not all(
        isinstance(each, Placement) for each in placements
    ):
        raise ScheduleError(
            f"search: placements={placements!r}: expected a sequence of placements, such as "
            "[linear(4), v_shape(4)] of penstock.schedule.placement"
        )
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
