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
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from penstock.errors import PartitionError
from penstock.partition.forward.forward_trace import ForwardTrace, LeafCall, replaced_message
from penstock.partition.forward.leaf_modules import LeafModules, NotByModule
from penstock.partition.forward.placeholder import ValueKind, ValueRef
from penstock.partition.plan import abbreviate, prefixes
from penstock.partition.spec import SplitSpec
from penstock.partition.ties import named_tensors
from penstock.stage.boundary import BoundarySpec

__all__ = ["ForwardPlan", "StageAssignment", "assign_stages", "plan_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """The stages of a model's modules; holds no module."""

    num_stages: int
    # Of each leaf module, and of each parameter or buffer held directly by a container; None for a
    # stateless leaf module, which runs where its inputs are available first.
    stages: Mapping[str, int | None]
    shared: Mapping[str, tuple[str, ...]]  # all names of what has several (see ``LeafModules``)

    def stage_of(self, name: str) -> int | None:
        """The stage of a leaf module or of any name inside one; None without a stage."""
        names = (name, *prefixes(name))
        return next((self.stages[each] for each in names if each in self.stages), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """The plan of a forward over all stages, for inputs of one shape."""

    trace: ForwardTrace
    stages: tuple[int, ...]  # the stage that runs each call
    boundary_values: tuple[tuple[ValueRef, ...], ...]  # per boundary, in order
    # The inputs that cross no boundary, since the ranks whose stages take them pass them.
    remote_inputs: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """The plan as JSON, for ``decode`` on another rank; without what only planning needs."""
        trace = self.trace
        calls = [
            (call.leaf, call.output.encode().decode(), call.written, call.writes, call.changes)
            for call in trace.calls
        ]
        values = [[astuple(ref) for ref in refs] for refs in self.boundary_values]
        inputs = trace.inputs.encode().decode()
        parts = (inputs, calls, trace.written, trace.draws, self.stages, values, self.remote_inputs)
        return json.dumps(parts).encode()

    @staticmethod
    def decode(data: bytes) -> ForwardPlan:
        """Decode the result of ``encode``."""
        inputs, calls, written, draws, stages, values, remote_inputs = json.loads(data)
        return ForwardPlan(
            trace=ForwardTrace(
                inputs=BoundarySpec.decode(inputs.encode()),
                calls=tuple(
                    LeafCall(leaf, BoundarySpec.decode(output.encode()), *map(tuple, effects))
                    for leaf, output, *effects in calls
                ),
                written=tuple(written),
                draws=draws,
            ),
            stages=tuple(stages),
            boundary_values=tuple(
                tuple(ValueRef(ValueKind(kind), *rest) for kind, *rest in refs) for refs in values
            ),
            remote_inputs=tuple(remote_inputs),
        )


def plan_forward(
    trace: ForwardTrace, assignment: StageAssignment, remote_inputs: tuple[int, ...] = ()
) -> ForwardPlan:
    """Assign a stage to every call, and to every boundary the values that cross it.

    A stateless leaf module (an activation, a dropout, a rotary table) runs once, on the first stage
    that has its inputs.

    Raises:
        NotByModule: a leaf module would run before its inputs are available, or stages would
            miss writes of other stages, draw different random numbers, or lose gradients.
    """
    placed = _Placement(trace, assignment)
    for ref, at in placed.needed.items():
        if ref.kind is ValueKind.PARAMETER:  # a stage may hold the parameter under another name
            first, names = placed.origin(ref), assignment.shared.get(ref.name, ())
            at.difference_update({assignment.stage_of(name) for name in names} - {first})
            if not at:
                at.add(first)
    _refuse_shared_state(placed)
    for ref, at in placed.needed.items():
        message = _refusal(placed, ref, at)
        if message:
            raise NotByModule(message)
    for name in sorted(trace.changes):
        at = placed.needed.get(ValueRef(ValueKind.PARAMETER, 0, 0, name), set())
        stage = assignment.stage_of(name) or 0
        if at != {stage}:
            users = f"stages {sorted(at)} compute" if at else "no stage computes"
            raise NotByModule(
                f"the top-level forward writes into {name}, which lies in stage {stage}, but "
                f"{users} with it; move that into a module"
            )

    def crossing(boundary: int) -> tuple[ValueRef, ...]:
        found = (r for r, at in placed.needed.items() if placed.origin(r) <= boundary < max(at))
        found = (r for r in found if r.kind is not ValueKind.INPUT or r.leaf not in remote_inputs)
        return tuple(sorted(found, key=lambda r: (r.kind, r.call, r.leaf, r.name)))

    return ForwardPlan(
        trace=trace,
        stages=tuple(placed.stages),
        boundary_values=tuple(map(crossing, range(assignment.num_stages - 1))),
        remote_inputs=remote_inputs,
    )


class _Placement:
    """A trace with the stages of its calls.

    Attributes:
        stages: the stage of each call.
        needed: the stages that need each value.
    """

    def __init__(self, trace: ForwardTrace, assignment: StageAssignment) -> None:
        self.trace, self.assignment = trace, assignment
        self.stages: list[int] = []
        self.needed: dict[ValueRef, set[int]] = {}
        for call in trace.calls:
            made = [r for r in call.needs if r.kind in (ValueKind.OUTPUT, ValueKind.WRITE)]
            latest = max(made, key=lambda ref: (self.origin(ref), ref.call), default=None)
            ready = 0 if latest is None else self.origin(latest)
            stage = assignment.stages[call.leaf]
            if stage is not None and ready > stage:
                raise NotByModule(
                    f"{call.leaf} is in stage {stage}, but is called with {latest}, which stage "
                    f"{ready} computes; put it there or later, name modules in the order of their "
                    "calls, and keep all calls of a module in one stage"
                )
            self.stages.append(ready if stage is None else stage)
            for ref in call.needs:
                self.needed.setdefault(ref, set()).add(self.stages[-1])
        for ref in trace.needs:
            self.needed.setdefault(ref, set()).add(assignment.num_stages - 1)

    def origin(self, ref: ValueRef) -> int:
        """The first stage that has a value."""
        if ref.kind in (ValueKind.OUTPUT, ValueKind.WRITE):
            return self.stages[ref.call]
        if ref.kind is ValueKind.PARAMETER:
            return self.assignment.stage_of(ref.name) or 0
        return 0 if ref.kind is ValueKind.INPUT else sys.maxsize  # others never cross


# --- refusals ----------------------------------------------------------------------------------


def _refusal(placed: _Placement, ref: ValueRef, at: set[int]) -> str | None:
    """The reason why the stages that need a value would compute it wrongly, if any."""
    origin, last = placed.origin(ref), max(at)
    match ref.kind:
        case ValueKind.STATE:
            return replaced_message(ref.name)
        case ValueKind.DRAW:
            # The first stage to run the top-level forward after the draw draws as the plain model.
            first = min({*placed.stages[ref.call :], placed.assignment.num_stages - 1})
            if at != {first}:
                return (
                    f"the top-level forward draws random numbers ({ref.name}) in stage {first}, "
                    f"for values that the stages {sorted(at)} need, and each would draw its own; "
                    "use an nn.Dropout module there, which runs once"
                )
        case ValueKind.WRITE if at != {origin}:
            return (
                f"{ref.name}, in stage {origin}, writes into the tensor that it is called with "
                f"(argument {ref.leaf}), which stage {last} computes with, unwritten; have it "
                "return a new tensor, or cut so that all its users are in one stage"
            )
        case ValueKind.PARAMETER if min(at) < origin:
            return (
                f"{ref} lies in stage {origin}, but stage {min(at)} computes with it outside of "
                f"its module; move it to stage {min(at)}, or, if it is never called, pass example="
            )
    return None


def _refuse_shared_state(placed: _Placement) -> None:
    """Refuse state that leaf modules of several stages share, and that a call changes."""
    calls = list(zip(placed.trace.calls, placed.stages, strict=True))
    shared = placed.assignment.shared
    for name in (f"{call.leaf}.{change}" for call in placed.trace.calls for change in call.changes):
        owner, _, last = name.rpartition(".")
        names = shared.get(owner) or [each.rpartition(".")[0] for each in shared.get(name, ())]
        holders = {each for owner in names for each in (owner, *prefixes(owner))}
        at = {stage for call, stage in calls if call.leaf in holders}
        if len(at) > 1:
            where = f"in the stages {sorted(at)}"
            what = f"{names[0]} is one module within several, {where}, and changes its {last} in"
            if owner not in shared:
                what = (
                    f"{shared[name][0]} is one tensor in several modules, {where}, and changes in"
                )
            raise NotByModule(
                f"{what} each call: it would not be in the order of one process; give each its "
                "own, freeze it (eval()), or cut so that all its calls lie in one stage"
            )


# --- the stages of leaf modules -----------------------------------------------------------------


def assign_stages(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None
) -> StageAssignment:
    """Assign a stage to each leaf module and direct parameter, from the user's split.

    cuts               wte  wpe  drop  h.0  h.1  h.2  h.3  ln_f  lm_head
    [2, 2]              0    0    -     0    0    1    1    1     1
    ["h.1"]             0    0    -     0    1    1    1    1     1
    [[...], [...]]      as named

    A stateless leaf module (-) needs no stage. Without a trace, definition order is taken as
    execution order.

    Raises:
        PartitionError: a stage is empty, or the cuts are out of order.
    """
    shared, num_stages = leaves.shared, spec.num_stages
    with_state = [name for name in leaves.leaves if leaves.has_state(name)]
    stages: dict[str, int | None] = dict.fromkeys(leaves.leaves)
    if spec.stages:
        stages |= _by_names(leaves, spec, with_state)
    else:
        stages |= _by_starts(leaves, spec, trace, with_state)
    unassigned = [name for name in leaves.direct if name not in stages]
    unassigned += [name for name in with_state if stages[name] is None]
    if trace is not None and unassigned:
        # A head that is never called, since a fused loss takes its weight, goes where it is used.
        assignment = StageAssignment(num_stages=num_stages, stages=stages, shared=shared)
        needed = _Placement(trace, assignment).needed
        uses = {r.name: min(at) for r, at in needed.items() if r.kind is ValueKind.PARAMETER}
        tensors = named_tensors(leaves.model)
        for name in unassigned:
            inside = (n for n in tensors if n == name or n.startswith(f"{name}."))
            first = (shared.get(n, (n,))[0] for n in inside)
            stages[name] = min((uses[n] for n in first if n in uses), default=None)
    stages |= {name: 0 for name in leaves.direct if stages.get(name) is None}
    before = 0
    for name in with_state:  # an unused module joins the module defined before it
        at = stages[name]
        stages[name] = before = before if at is None else at
    for stage in range(num_stages):
        if stage not in stages.values():
            raise PartitionError(
                f"stage {stage} would hold no parameter; give it modules that have some, or cut "
                "into fewer stages"
            )
    return StageAssignment(num_stages=num_stages, stages=stages, shared=shared)


def _by_names(leaves: LeafModules, spec: SplitSpec, with_state: Sequence[str]) -> dict[str, int]:
    stages: dict[str, int] = {}
    assignable = {*with_state, *leaves.direct}
    for stage, names in enumerate(spec.stages):
        for leaf in (leaf for name in names for leaf in leaves.under(name)):
            if leaf in assignable and stages.setdefault(leaf, stage) != stage:
                raise PartitionError(
                    f"{leaf} is named in stage {stages[leaf]} and, perhaps by another of its "
                    f"names, in stage {stage}; name it once"
                )
    for leaf in with_state:  # one that occurs several times in a list but is named once
        named = [stages[each] for each in leaves.shared.get(leaf, ()) if each in stages]
        if named:
            stages.setdefault(leaf, named[0])
    return stages


def _by_starts(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None, with_state: Sequence[str]
) -> dict[str, int]:
    order: Mapping[str, int] = (
        {name: i for i, name in enumerate(leaves.leaves)} if trace is None else trace.first_calls()
    )
    starts = spec.begins(order)
    called = ([order[leaf] for leaf in leaves.under(name) if leaf in order] for name in starts)
    firsts = [min(calls, default=-1) for calls in called]
    if any(then <= first for first, then in pairwise([-1, *firsts])):
        raise PartitionError(
            f"stages are to begin with {abbreviate(starts)}, but the model does not call these in "
            "this order; name modules that it calls, in the order in which they run"
        )
    return {
        name: sum(first <= order[name] for first in firsts) for name in with_state if name in order
    }
