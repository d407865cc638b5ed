"""The plan of one forward over the stages: the stage of each call, and the values that cross.

    call     wte    h.0    h.1    h.2    lm_head
    stage    0      0      1      1      1
    needs    ids    wte    h.0    h.1    h.2, labels
    crosses               ids, labels, output 0 of h.0             the boundary between 0 and 1

A value crosses hop by hop from the stage that produces it to the last stage that needs it. The
first rank plans once per input shape, and sends the plan to the other ranks. Models whose state,
random numbers or gradients would differ on stages are refused here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.forward.forward_trace import ForwardTrace, LeafCall, replaced_message
from penstock.partition.forward.leaf_modules import SharedNames, StageAssignment, stage_of
from penstock.partition.forward.placeholder import ValueKind, ValueRef
from penstock.stage.boundary import BoundarySpec

__all__ = ["ForwardPlan", "first_uses", "plan_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """The plan of a forward over all stages, for inputs of one shape.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls of leaf modules in order.
        stages: the stage that runs each call.
        boundary_values: for each boundary the values that cross it, in order.
        written: the leaves of the inputs that the model writes into.
        draws: True if the top-level forward draws random numbers.
    """

    inputs: BoundarySpec
    calls: tuple[LeafCall, ...]
    stages: tuple[int, ...]
    boundary_values: tuple[tuple[ValueRef, ...], ...]
    written: tuple[int, ...] = ()
    draws: bool = False

    def last_call(self, stage: int) -> int:
        """The last call that ``stage`` runs; -1 for none."""
        return max((i for i, at in enumerate(self.stages) if at == stage), default=-1)

    def encode(self) -> bytes:
        """The plan as JSON, for ``decode`` on another rank; without the needs of its calls."""
        calls = [
            [c.leaf, c.output.encode().decode(), c.written, c.writes, c.changes] for c in self.calls
        ]
        crossing = [
            [[r.kind.value, r.call, r.leaf, r.name] for r in refs] for refs in self.boundary_values
        ]
        inputs = self.inputs.encode().decode()
        return json.dumps([inputs, calls, self.stages, crossing, self.written, self.draws]).encode()

    @staticmethod
    def decode(data: bytes) -> ForwardPlan:
        """Decode the result of ``encode``."""
        inputs, calls, stages, crossing, written, draws = json.loads(data)
        return ForwardPlan(
            inputs=BoundarySpec.decode(inputs.encode()),
            calls=tuple(
                LeafCall(
                    leaf=leaf,
                    needs=frozenset(),
                    output=BoundarySpec.decode(output.encode()),
                    written=tuple(leaves),
                    writes=tuple(writes),
                    changes=tuple(changes),
                )
                for leaf, output, leaves, writes, changes in calls
            ),
            stages=tuple(stages),
            boundary_values=tuple(
                tuple(ValueRef(ValueKind(kind), *rest) for kind, *rest in refs) for refs in crossing
            ),
            written=tuple(written),
            draws=draws,
        )


def plan_forward(
    trace: ForwardTrace, assignment: StageAssignment, num_stages: int, shared: SharedNames
) -> ForwardPlan:
    """Assign a stage to every call, and to every boundary the values that cross it.

    A stateless leaf module (an activation, a dropout, a rotary table) runs once, on the first stage
    that has its inputs.

    Args:
        trace: the trace of the model.
        assignment: the stage of each leaf module and direct parameter.
        num_stages: the number of stages.
        shared: the names of state shared by leaf modules.

    Raises:
        PartitionError: a leaf module would run before its inputs are available, or stages would
            miss writes of other stages, draw different random numbers, or lose gradients.
    """
    placed = _Placement(trace, assignment, num_stages)
    for ref, at in placed.needed.items():
        if ref.kind is ValueKind.PARAMETER:  # a stage may hold the parameter under another name
            first = stage_of(ref.name, assignment)
            at -= shared.stages_with(ref.name, assignment) - {first}
            at |= set() if at else {first or 0}
    _refuse_shared_state(placed, shared)
    for ref, at in placed.needed.items():
        message = _refusal(placed, ref, at)
        if message:
            raise PartitionError(message)
    _refuse_changes(placed)

    def crossing(boundary: int) -> tuple[ValueRef, ...]:
        found = (r for r, at in placed.needed.items() if placed.origin(r) <= boundary < max(at))
        return tuple(sorted(found, key=lambda r: (r.kind.value, r.call, r.leaf, r.name)))

    return ForwardPlan(
        inputs=trace.inputs,
        calls=trace.calls,
        stages=tuple(placed.stages),
        boundary_values=tuple(map(crossing, range(num_stages - 1))),
        written=trace.written,
        draws=trace.draws,
    )


def first_uses(trace: ForwardTrace, assignment: StageAssignment, num_stages: int) -> dict[str, int]:
    """The first stage whose top-level forward uses each parameter."""
    needed = _Placement(trace, assignment, num_stages).needed
    return {r.name: min(at) for r, at in needed.items() if r.kind is ValueKind.PARAMETER}


class _Placement:
    """A trace with the stages of its calls.

    Attributes:
        stages: the stage of each call.
        needed: the stages that need each value.
    """

    def __init__(self, trace: ForwardTrace, assignment: StageAssignment, num_stages: int) -> None:
        self.trace, self.assignment, self.num_stages = trace, assignment, num_stages
        self.stages: list[int] = []
        self.needed: dict[ValueRef, set[int]] = {}
        for call in trace.calls:
            made = [r for r in call.needs if r.kind in (ValueKind.OUTPUT, ValueKind.WRITE)]
            latest = max(made, key=lambda ref: (self.origin(ref), ref.call), default=None)
            ready = 0 if latest is None else self.origin(latest)
            stage = assignment[call.leaf]
            if stage is not None and ready > stage:
                raise self._too_early(call.leaf, stage, latest, ready)
            self.stages.append(ready if stage is None else stage)
            for ref in call.needs:
                self.needed.setdefault(ref, set()).add(self.stages[-1])
        for ref in (*trace.needs, *trace.everywhere):
            self.needed.setdefault(ref, set()).add(num_stages - 1)

    def origin(self, ref: ValueRef) -> int:
        """The first stage that has a value."""
        match ref.kind:
            case ValueKind.INPUT:
                return 0
            case ValueKind.OUTPUT | ValueKind.WRITE:
                return self.stages[ref.call]
            case ValueKind.PARAMETER:
                return stage_of(ref.name, self.assignment) or 0
            case ValueKind.DRAW | ValueKind.STATE:  # never crosses
                return sys.maxsize

    def _too_early(
        self, leaf: str, stage: int, after: ValueRef | None, ready: int
    ) -> PartitionError:
        if any(leaf == call.leaf for call in self.trace.calls[: len(self.stages)]):
            return PartitionError(
                f"{leaf} is called several times, in stage {stage} and again with {after}, which "
                f"stage {ready} computes; cut so that all its calls lie in one stage"
            )
        return PartitionError(
            f"{leaf} is in stage {stage}, but is called with {after}, which stage {ready} "
            f"computes; put it into stage {ready} or later, or name modules in the order of their "
            "calls"
        )


# --- refusals ----------------------------------------------------------------------------------


def _refusal(placed: _Placement, ref: ValueRef, at: set[int]) -> str | None:
    """The reason why the stages that need a value would compute it wrongly, if any."""
    origin, last = placed.origin(ref), max(at)
    match ref.kind:
        case ValueKind.STATE:
            return replaced_message(ref.name)
        case ValueKind.DRAW:
            # The first stage to run the top-level forward after the draw has the plain model's.
            first = min({*placed.stages[ref.call :], placed.num_stages - 1})
            if len(at) > 1:
                return (
                    f"the top-level forward draws random numbers ({ref.name}) for values that the "
                    f"stages {sorted(at)} need, and each would draw its own; use an nn.Dropout "
                    "module there, which runs once"
                )
            if at != {first}:
                return (
                    f"the top-level forward draws random numbers ({ref.name}) in stage {first}, "
                    f"for values that stage {last} alone needs and would draw anew, others than "
                    "the plain model's; use an nn.Dropout module there, whose result crosses"
                )
        case ValueKind.WRITE if at != {origin}:
            return (
                f"{ref.name}, in stage {origin}, writes into the tensor that it is called with "
                f"(argument {ref.leaf}), which stage {last} computes with and would not see "
                "written; have it return a new tensor, or cut so that all its users are in one "
                "stage"
            )
        case ValueKind.OUTPUT if last != origin and placed.trace.calls[ref.call].detached:
            return (
                f"{ref.name} is called within an autograd function, as by a checkpoint with "
                f"use_reentrant=True, but its result crosses to stage {last}: its gradient would "
                "be lost; use use_reentrant=False"
            )
        case ValueKind.PARAMETER if min(at) < origin:
            return (
                f"{ref} lies in stage {origin}, but stage {min(at)} computes with it outside of "
                f"its module; put the module into stage {min(at)}"
            )
    return None


def _refuse_shared_state(placed: _Placement, shared: SharedNames) -> None:
    calls = list(zip(placed.trace.calls, placed.stages, strict=True))
    changed_at: dict[str, set[int]] = {}
    for call, stage in calls:
        for name in call.changes:
            known = shared.shared_name(f"{call.leaf}.{name}")
            if known is not None:
                changed_at.setdefault(known, set()).add(stage)
    for name, at in changed_at.items():
        owner, _, last = name.rpartition(".")
        inner = [each for each, known in shared.inner.items() if known in (owner, name)]
        leaves = {leaf for leaf in placed.assignment for n in inner if n.startswith(f"{leaf}.")}
        users = {stage for call, stage in calls if call.leaf in leaves}
        if len(at | users) > 1:
            raise PartitionError(
                f"{owner} is one module within several, in the stages {sorted(at | users)}, and "
                f"changes its {last} ({name}) in each call: it would not be in the order of one "
                "process; give each its own, freeze it (eval()), or cut so that all its calls lie "
                "in one stage"
            )


def _refuse_changes(placed: _Placement) -> None:
    for name in sorted(placed.trace.changes):
        at = placed.needed.get(ValueRef(ValueKind.PARAMETER, 0, 0, name), set())
        stage = stage_of(name, placed.assignment) or 0
        if at != {stage}:
            where = f"stages {sorted(at)} compute" if at else "nothing that is returned computes"
            raise PartitionError(
                f"the top-level forward writes into {name}, which lies in stage {stage}, but "
                f"{where} with it; move that into a module"
            )
