"""The plan by which stages run one forward: the stage of each call, and the values that cross.

    call     wte    h.0    h.1    h.2    lm_head
    stage    0      0      1      1      1
    needs    ids    wte    h.0    h.1    h.2, labels
    crosses               ids, labels, output 0 of h.0             the boundary between 0 and 1

A value crosses hop by hop from the stage that has it to the last one that needs it. The first rank
makes the plan for inputs of one shape, and sends it to the others. This module runs no model;
``refusals`` says what a cut does not allow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.forward.forward_trace import ForwardTrace
from penstock.partition.forward.leaf_modules import SharedNames, StageAssignment, stage_of
from penstock.partition.forward.placeholder import ValueKind, ValueRef
from penstock.partition.forward.refusals import PlacedTrace, refuse
from penstock.stage.boundary import BoundarySpec

__all__ = ["ForwardPlan", "PlannedCall", "first_uses", "plan_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """One call of a leaf module, in the order in which they run.

    Args:
        leaf: its name.
        stage: the stage that runs it.
        output: its result, and what hooks collected from within it.
        written: the leaves of the output that later code writes into.
        writes: the leaves of its arguments that it writes into.
        changes: the buffers and attributes of its own that it writes or sets.
    """

    leaf: str
    stage: int
    output: BoundarySpec
    written: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """All that stages need to know to run a forward on inputs of one shape.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls in order.
        boundary_values: for each boundary the values that cross it, in order.
        written: the leaves of the inputs that the model writes into.
        draws: True if the top-level forward draws random numbers.
    """

    inputs: BoundarySpec
    calls: tuple[PlannedCall, ...]
    boundary_values: tuple[tuple[ValueRef, ...], ...]
    written: tuple[int, ...] = ()
    draws: bool = False

    def last_call(self, stage: int) -> int:
        """The last call that ``stage`` runs; -1 for none."""
        return max((i for i, call in enumerate(self.calls) if call.stage == stage), default=-1)

    def encode(self) -> bytes:
        """The plan as JSON, for ``decode`` on another rank."""
        calls = [
            [c.leaf, c.stage, c.output.encode().decode(), c.written, c.writes, c.changes]
            for c in self.calls
        ]
        crossing = [
            [[r.kind.value, r.call, r.leaf, r.name] for r in refs] for refs in self.boundary_values
        ]
        inputs = self.inputs.encode().decode()
        return json.dumps([inputs, calls, crossing, self.written, self.draws]).encode()

    @staticmethod
    def decode(data: bytes) -> ForwardPlan:
        """The plan that ``encode`` wrote."""
        inputs, calls, crossing, written, draws = json.loads(data)
        return ForwardPlan(
            inputs=BoundarySpec.decode(inputs.encode()),
            calls=tuple(
                PlannedCall(
                    leaf=leaf,
                    stage=stage,
                    output=BoundarySpec.decode(output.encode()),
                    written=tuple(leaves),
                    writes=tuple(writes),
                    changes=tuple(changes),
                )
                for leaf, stage, output, leaves, writes, changes in calls
            ),
            boundary_values=tuple(
                tuple(ValueRef(ValueKind(kind), *rest) for kind, *rest in refs) for refs in crossing
            ),
            written=tuple(written),
            draws=draws,
        )


def plan_forward(
    trace: ForwardTrace, assignment: StageAssignment, num_stages: int, shared: SharedNames
) -> ForwardPlan:
    """Give every call its stage, and every boundary the values that cross it.

    A leaf module without state (an activation, a dropout, a rotary table) runs once, as early as
    its inputs allow.

    Args:
        trace: the trace of the model.
        assignment: the stage of each leaf module and direct parameter.
        num_stages: the number of stages.
        shared: what leaf modules share.

    Raises:
        PartitionError: a leaf module would run before its inputs are there, or stages would miss
            what others write.
    """
    stages = _stages_of_calls(trace, assignment)
    needed = _needed_at(trace, stages, num_stages)
    for ref, at in needed.items():
        if ref.kind is ValueKind.PARAMETER:  # a stage may hold it under another name
            first = stage_of(ref.name, assignment)
            at -= shared.stages_with(ref.name, assignment) - {first}
            at |= set() if at else {first or 0}
    origins = {ref: _origin(ref, stages, assignment) for ref in needed}
    refuse(
        PlacedTrace(
            trace=trace,
            assignment=assignment,
            num_stages=num_stages,
            shared=shared,
            stages=tuple(stages),
            needed=needed,
            origins=origins,
        )
    )
    return ForwardPlan(
        inputs=trace.inputs,
        calls=tuple(
            PlannedCall(
                leaf=call.leaf,
                stage=stage,
                output=call.output,
                written=call.written,
                writes=call.writes,
                changes=call.changes,
            )
            for call, stage in zip(trace.calls, stages, strict=True)
        ),
        boundary_values=tuple(
            tuple(
                sorted(
                    (ref for ref, at in needed.items() if origins[ref] <= boundary < max(at)),
                    key=lambda ref: (ref.kind.value, ref.call, ref.leaf, ref.name),
                )
            )
            for boundary in range(num_stages - 1)
        ),
        written=trace.written,
        draws=trace.draws,
    )


def first_uses(trace: ForwardTrace, assignment: StageAssignment, num_stages: int) -> dict[str, int]:
    """The first stage whose top-level forward computes with each parameter that any does."""
    needed = _needed_at(trace, _stages_of_calls(trace, assignment), num_stages)
    return {r.name: min(at) for r, at in needed.items() if r.kind is ValueKind.PARAMETER}


def _stages_of_calls(trace: ForwardTrace, assignment: StageAssignment) -> list[int]:
    stages: list[int] = []
    for call in trace.calls:
        made = [r for r in call.needs if r.kind in (ValueKind.OUTPUT, ValueKind.WRITE)]
        latest = max(made, key=lambda ref: (stages[ref.call], ref.call), default=None)
        ready = 0 if latest is None else stages[latest.call]
        stage = assignment[call.leaf]
        if stage is not None and ready > stage:
            again = call.leaf in {before.leaf for before in trace.calls[: len(stages)]}
            raise _too_early(call.leaf, stage, latest, ready, again)
        stages.append(ready if stage is None else stage)
    return stages


def _too_early(
    leaf: str, stage: int, after: ValueRef | None, ready: int, again: bool
) -> PartitionError:
    if again:
        return PartitionError(
            f"{leaf} is called several times, in stage {stage} and again with {after}, which stage "
            f"{ready} computes; cut so that all its calls lie in one stage"
        )
    return PartitionError(
        f"{leaf} is in stage {stage}, but is called with {after}, which stage {ready} computes; "
        f"put it into stage {ready} or later, or name modules in the order of their calls"
    )


def _needed_at(
    trace: ForwardTrace, stages: Sequence[int], num_stages: int
) -> dict[ValueRef, set[int]]:
    """The stages that need each value."""
    needed: dict[ValueRef, set[int]] = {}
    for call, stage in zip(trace.calls, stages, strict=True):
        for ref in call.needs:
            needed.setdefault(ref, set()).add(stage)
    for ref in (*trace.needs, *trace.everywhere):
        needed.setdefault(ref, set()).add(num_stages - 1)
    return needed


def _origin(ref: ValueRef, stages: Sequence[int], assignment: Mapping[str, int | None]) -> int:
    """The stage that has a value first."""
    match ref.kind:
        case ValueKind.INPUT:
            return 0
        case ValueKind.OUTPUT | ValueKind.WRITE:
            return stages[ref.call]
        case ValueKind.PARAMETER:
            return stage_of(ref.name, assignment) or 0
        case ValueKind.DRAW | ValueKind.STATE:  # never crosses
            return sys.maxsize
