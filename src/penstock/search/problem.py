"""What is asked of a search, in integers: the rules and the costs are read once, not per action.

    kind     (F, I or W) x stage          what all microbatches of it have in common
    order    for each rank, kinds         the microbatch is how often the kind came before

Microbatches are alike, so that each kind takes them in turn: an order needs no microbatch, and no
program is lost that way but for a renaming. Backwards are split throughout, since a full backward
is an input gradient with its weight gradient right after it, only that the next stage hears of it
later. But W may hold more than F left, which a full backward never does:

    held   F 2 .. I 2|3 .. W 3|0      split        limit 2: only full backwards fit
           F 2 .. B 2|0               full

Where split backwards don't fit at all none is split: I takes the time of both, W none. This module
knows no method of searching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import prerequisites
from penstock.simulate.costs import Costs

__all__ = ["Objective", "Order", "SearchProblem", "order_of", "program_of", "slack"]

Objective: TypeAlias = Literal["makespan", "span"]

Order: TypeAlias = tuple[tuple[int, ...], ...]
"""For each rank, kinds in the order in which it runs them."""

_OPS = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
_WHOLE = (Op.FORWARD, Op.FULL_BACKWARD)
_NUMBER = {op: number for number, op in enumerate(_OPS)}


# Not slotted: the tables are made once, when first asked for, and kept in the dictionary.
@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A placement, a number of microbatches, costs and a limit.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        costs: what each kind of action costs.
        held: for each stage, what one of its activations counts against the limit, from F to I.
        held_for_weights: likewise from I to W.
        limit: the most that a rank may hold; infinite where there is none.
        objective: what to make small.
        splits: whether backwards are split; if not, I stands for the full one, and W for nothing.
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    held: tuple[float, ...]
    held_for_weights: tuple[float, ...]
    limit: float
    objective: Objective = "makespan"
    splits: bool = True

    @property
    def num_kinds(self) -> int:
        """Number of kinds: three per stage."""
        return 3 * self.placement.num_stages

    @property
    def virtual(self) -> int:
        """Stages per rank, rounded down where ranks hold unequally many."""
        return self.placement.num_stages // self.placement.num_ranks

    @property
    def size(self) -> int:
        """Number of actions of a program."""
        return self.num_kinds * self.num_microbatches

    def kind(self, op: Op, stage: int) -> int:
        """The number of a kind."""
        return _NUMBER[op] * self.placement.num_stages + stage

    def op_and_stage(self, kind: int) -> tuple[Op, int]:
        """What a kind stands for."""
        number, stage = divmod(kind, self.placement.num_stages)
        return _OPS[number], stage

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """The compute time of each kind."""
        stages = self.placement.num_stages
        if not self.splits:
            forward, full = (self.costs.of(op, num_stages=stages) for op in _WHOLE)
            return (*forward, *full, *(0.0,) * stages)
        return tuple(cost for op in _OPS for cost in self.costs.of(op, num_stages=stages))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each kind."""
        return self.placement.stage_ranks * 3

    @cached_property
    def needs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each kind, the kinds that it needs of its microbatch, and how long they travel."""
        found = []
        for kind in range(self.num_kinds):
            op, stage = self.op_and_stage(kind)
            required = prerequisites(action(stage, op, 0), self.placement)
            found.append(
                tuple(
                    (self.kind(p.op, p.stage), self.costs.travel(p.stage, stage, self.placement))
                    for p in required
                )
            )
        return tuple(found)

    @cached_property
    def feeds(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each kind, the other ranks that wait for it, and how long it travels to them."""
        feeds: list[list[tuple[int, float]]] = [[] for _ in range(self.num_kinds)]
        for kind, needs in enumerate(self.needs):
            for before, delay in needs:
                if self.ranks[before] != self.ranks[kind]:
                    feeds[before].append((self.ranks[kind], delay))
        return tuple(map(tuple, feeds))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each kind, the kinds that need it."""
        users: list[list[int]] = [[] for _ in range(self.num_kinds)]
        for kind, needs in enumerate(self.needs):
            for before, _ in needs:
                users[before].append(kind)
        return tuple(map(tuple, users))

    @cached_property
    def left_for_weights(self) -> tuple[float, ...]:
        """For each stage, what is held from I to W: nothing where backwards are not split."""
        return self.held_for_weights if self.splits else (0.0,) * self.placement.num_stages

    @cached_property
    def changes(self) -> tuple[float, ...]:
        """For each kind, by how much its rank holds more when it is done (F: when it starts)."""
        pairs = zip(self.left_for_weights, self.held, strict=True)
        more = tuple(behind - before for behind, before in pairs)
        return (*self.held, *more, *(-behind for behind in self.left_for_weights))

    @cached_property
    def growths(self) -> tuple[float, ...]:
        """For each stage, how much more is held from I to W than before."""
        pairs = zip(self.left_for_weights, self.held, strict=True)
        return tuple(max(0.0, behind - before) for behind, before in pairs)

    @cached_property
    def first_starts(self) -> tuple[float, ...]:
        """For each rank, when its first action starts, whatever the program.

        A rank can do nothing before the first forward of its first stage, and that waits for
        nothing but the stages before it.
        """
        reached = []
        now = 0.0
        for stage in range(self.placement.num_stages):
            if stage:
                now += self.needs[self.kind(Op.FORWARD, stage)][0][1]
            reached.append(now)
            now += self.durations[self.kind(Op.FORWARD, stage)]
        return tuple(
            reached[min(self.placement.stages_of(rank))] for rank in range(self.placement.num_ranks)
        )

    @property
    def origins(self) -> tuple[float, ...]:
        """For each rank, the time from which the objective counts its last end."""
        if self.objective == "span":
            return self.first_starts
        return (0.0,) * self.placement.num_ranks

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """For each rank, what it holds where microbatches go one by one: no program holds less."""
        return tuple(self._one_by_one(rank) for rank in range(self.placement.num_ranks))

    def _one_by_one(self, rank: int) -> float:
        held = most = 0.0
        for stage in self.placement.stages_of(rank):
            held += self.held[stage]
            # All stages after it are through with their backwards by then.
            most = max(most, held, held + self.growths[stage])
        return most

    @cached_property
    def most_memory(self) -> tuple[float, ...]:
        """For each rank, what it holds at most, whatever the order."""
        each = [held + more for held, more in zip(self.held, self.growths, strict=True)]
        return tuple(
            self.num_microbatches * sum(each[stage] for stage in self.placement.stages_of(rank))
            for rank in range(self.placement.num_ranks)
        )

    @property
    def can_be_met(self) -> bool:
        """Whether there is a program within the limit."""
        return max(self.least_memory) <= self.limit + slack(self.limit)

    def value(self, ends: Sequence[float]) -> float:
        """The objective, where these are the ranks' last ends."""
        return max(end - origin for end, origin in zip(ends, self.origins, strict=True))

    def resized(self, microbatches: int) -> SearchProblem:
        """The same with another number of microbatches."""
        return replace(self, num_microbatches=microbatches)

    def costing(self, costs: Costs) -> SearchProblem:
        """The same with other costs; what activations take stays."""
        return replace(self, costs=costs)

    def limited(self, limit: float) -> SearchProblem:
        """The same with another limit."""
        return replace(self, limit=limit)

    def keeps_limit(self, order: Order) -> bool:
        """Whether an order is within the limit: a program with full backwards may hold less."""
        most = self.limit + slack(self.limit)
        if math.isinf(most) or not any(self.growths):
            return True
        return all(
            held <= most
            for kinds in order
            for held in accumulate(map(self.changes.__getitem__, kinds))
        )

    def peaks(self, program: Program) -> tuple[float, ...]:
        """For each rank, the most that a program of this placement holds at once, from F to W."""
        return tuple(self._peak(program, rank) for rank in range(program.num_ranks))

    def _peak(self, program: Program, rank: int) -> float:
        now = peak = 0.0
        for step in program.ranks[rank]:
            released = 0.0
            for part in step.parts:
                stage = part.stage
                if part.op is Op.FORWARD:
                    now += self.held[stage]
                elif part.op is Op.FULL_BACKWARD:
                    released += self.held[stage]
                elif part.op is Op.INPUT_GRAD:
                    released += self.held[stage] - self.held_for_weights[stage]
                elif part.op is Op.WEIGHT_GRAD:
                    released += self.held_for_weights[stage]
            peak = max(peak, now, now - released)
            now -= released
        return peak


def slack(limit: float) -> float:
    """What sums of activations may exceed a limit by, being sums of floats."""
    return 1e-9 * max(1.0, limit) if math.isfinite(limit) else 0.0


def program_of(problem: SearchProblem, order: Sequence[Sequence[int]], *, name: str) -> Program:
    """The program that runs kinds in this order.

    Args:
        problem: whose kinds they are.
        order: for each rank, kinds; each as often as there are microbatches.
        name: the program's name.
    """
    names = [problem.op_and_stage(kind) for kind in range(problem.num_kinds)]
    ranks: list[tuple[Action, ...]] = []
    for kinds in order:
        done = [0] * problem.num_kinds
        steps = []
        for kind in kinds:
            op, stage = names[kind]
            if problem.splits:
                steps.append(action(stage, op, done[kind]))
            elif op is not Op.WEIGHT_GRAD:
                whole = Op.FORWARD if op is Op.FORWARD else Op.FULL_BACKWARD
                steps.append(action(stage, whole, done[kind]))
            done[kind] += 1
        ranks.append(tuple(steps))
    return Program(
        name=name,
        placement=problem.placement,
        num_microbatches=problem.num_microbatches,
        ranks=tuple(ranks),
    )


def order_of(problem: SearchProblem, program: Program) -> Order:
    """The order of kinds of a program, full backwards taken apart; inverse of ``program_of``.

    Args:
        problem: a problem with the program's placement.
        program: compute only.

    Raises:
        ScheduleError: the program holds other actions than computations.
    """
    ranks = []
    for steps in program.ranks:
        kinds: list[int] = []
        for part in (part for step in steps for part in step.parts):
            if part.op is Op.FULL_BACKWARD:
                kinds.append(problem.kind(Op.INPUT_GRAD, part.stage))
                kinds.append(problem.kind(Op.WEIGHT_GRAD, part.stage))
            elif part.op in _NUMBER:
                kinds.append(problem.kind(part.op, part.stage))
            else:
                raise ScheduleError(f"{program.name}: {part} is no computation; take it out first")
        ranks.append(tuple(kinds))
    return tuple(ranks)
