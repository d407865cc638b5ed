"""A program and its costs as integers, for the engine's loop: rules are read once, not per action.

    row    a key of ``ActionIndex``      what all microbatches of an (op, stage) have in common
    slot   its code                 one action

A prerequisite is the same microbatch of another row, so from an action's slot it lies at a fixed
offset that belongs to the row. What costs ask for beyond that, such as messages that follow each
other, is put into the tables by ``penstock.simulate.channels``. This module knows neither events
nor times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.schedule.action import Action, Op, action
from penstock.schedule.index import ActionIndex
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, COVERS, SENDS, WHOLE_STAGE, prerequisites
from penstock.simulate.costs import Costs

__all__ = ["Entry", "Tables", "tabulate"]

Entry: TypeAlias = int | tuple[int, ...]
"""A step of a rank: an action's slot, or the slots of a block's parts."""

_Firsts: TypeAlias = Mapping[tuple[Op, int], int]
"""For each row, in their order, its first slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What the engine asks of a program; all but ``entries`` is per row.

    Args:
        coding: numbers the slots that are actions; those from there on are messages and copies.
        width: slots of one row: as many as microbatches, or one where each has its own costs.
        entries: for each rank, its steps; then for each channel beside the ranks, its own.
        needs: the offset of each prerequisite, and the delay from its end until its result is
            there.
        fulfils: the offsets of all that is done when the action is done.
        durations: the compute time.
        overlaps: the time of a block whose first part this is; None as for its parts in turn.
        receives: whether the action waits for its prerequisite in the background.
        computes_only: whether there are no steps but those that compute.
        extra_steps: whether there are rows among the steps of the ranks that are no actions.
        shown_as: rows beside the ranks whose times are those of an action: the action's row.
    """

    coding: ActionIndex
    width: int
    entries: tuple[list[Entry], ...]
    needs: tuple[tuple[tuple[int, float], ...], ...]
    fulfils: tuple[tuple[int, ...], ...]
    durations: tuple[float, ...]
    overlaps: tuple[float | None, ...]
    receives: tuple[bool, ...]
    computes_only: bool
    extra_steps: bool = False
    shown_as: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.coding.placement.num_stages

    @property
    def num_slots(self) -> int:
        """Number of slots in all."""
        return len(self.durations) * self.width


def tabulate(program: Program, costs: Costs) -> Tables:
    """The tables of ``program`` under ``costs``.

    Args:
        program: with or without transfers.
        costs: what each kind of action costs.

    Raises:
        ScheduleError: costs for another number of stages, or for edges that the program lacks.
    """
    coding = ActionIndex(
        placement=program.placement,
        num_microbatches=program.num_microbatches,
        num_splits=program.num_splits,
    )
    num_stages, width = program.num_stages, program.num_microbatches
    costs.refuse_misfits(program.placement)
    ops = {s.op for steps in program.ranks for s in steps if isinstance(s, Action)}
    rows = list(coding.rows())
    first = {row: number * width for number, row in enumerate(rows)}
    overlap: tuple[float | None, ...] = (None,) * num_stages
    if costs.overlap is not None:
        overlap = costs.per_stage("overlap", num_stages=num_stages)
    return Tables(
        coding=coding,
        width=width,
        entries=_entries(program, first),
        # Blocks hold computations only, so that steps of one action tell whether there are sends.
        needs=_needs(program, costs, first, transfers=bool(ops & SENDS)),
        fulfils=tuple(
            tuple(first[each, stage] - first[op, stage] for each in (op, *COVERS.get(op, ())))
            if op not in WHOLE_STAGE
            else ()
            for op, stage in rows
        ),
        durations=tuple(cost for op in Op for cost in costs.of(op, num_stages=num_stages)),
        overlaps=overlap * len(Op),
        receives=tuple(op is Op.RECV_F or op is Op.RECV_B for op, _ in rows),
        computes_only=ops <= COMPUTE,
    )


def _entries(program: Program, first: _Firsts) -> tuple[list[Entry], ...]:
    """The ranks' steps as slots."""
    # Two lookups of one key each: hashing a pair per action would cost more.
    by_op = {op: [first[op, stage] for stage in range(program.num_stages)] for op in Op}
    return tuple(
        [
            by_op[step.op][step.stage] + (step.microbatch or 0)
            if isinstance(step, Action)
            else tuple(by_op[a.op][a.stage] + (a.microbatch or 0) for a in step.parts)
            for step in steps
        ]
        for steps in program.ranks
    )


def _needs(
    program: Program, costs: Costs, first: _Firsts, *, transfers: bool
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """For each row, how far off what it needs is, and how long that travels."""
    placement, needs = program.placement, []
    for op, stage in first:
        required = prerequisites(action(stage, op, 0), placement, transfers=transfers)
        needs.append(
            tuple(
                (first[p.op, p.stage] - first[op, stage], costs.travel(p.stage, stage, placement))
                for p in required
            )
        )
    return tuple(needs)
