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
from typing import Any

from penstock.errors import PartitionError
from penstock.partition.forward.forward_trace import ForwardTrace, LeafCall, replaced_message
from penstock.partition.forward.leaf_modules import (
    LeafModules,
    SharedNames,
    StageAssignment,
    stage_of,
)
from penstock.partition.forward.placeholder import ValueKind, ValueRef
from penstock.partition.plan import abbreviate
from penstock.partition.spec import SplitSpec
from penstock.partition.ties import names_by_tensor
from penstock.stage.boundary import BoundarySpec

__all__ = ["ForwardPlan", "assign_stages", "plan_forward", "try_cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """The plan of a forward over all stages, for inputs of one shape."""

    inputs: BoundarySpec  # these, calls, written and draws are those of the ForwardTrace
    calls: tuple[LeafCall, ...]
    stages: tuple[int, ...]  # the stage that runs each call
    boundary_values: tuple[tuple[ValueRef, ...], ...]  # per boundary, in order
    written: tuple[int, ...]
    draws: bool

    def last_call(self, stage: int) -> int:
        """The last call that ``stage`` runs; -1 for none."""
        return max((i for i, at in enumerate(self.stages) if at == stage), default=-1)

    def encode(self) -> bytes:
        """The plan as JSON, for ``decode`` on another rank; without the needs of its calls."""

        def plain(value: Any) -> Any:
            return value.encode().decode() if isinstance(value, BoundarySpec) else value.value

        calls = [(c.leaf, c.output, c.written, c.writes, c.changes) for c in self.calls]
        values = [[astuple(ref) for ref in refs] for refs in self.boundary_values]
        fields = self.inputs, calls, self.stages, values, self.written, self.draws
        return json.dumps(fields, default=plain).encode()

    @staticmethod
    def decode(data: bytes) -> ForwardPlan:
        """Decode the result of ``encode``."""
        inputs, calls, stages, values, written, draws = json.loads(data)
        return ForwardPlan(
            inputs=BoundarySpec.decode(inputs.encode()),
            calls=tuple(
                LeafCall(
                    leaf=leaf,
                    output=BoundarySpec.decode(output.encode()),
                    written=tuple(written),
                    writes=tuple(writes),
                    changes=tuple(changes),
                )
                for leaf, output, written, writes, changes in calls
            ),
            stages=tuple(stages),
            boundary_values=tuple(
                tuple(ValueRef(ValueKind(kind), *rest) for kind, *rest in refs) for refs in values
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
        for ref in trace.needs:
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
            "computes; put it there or later, or name modules in the order of their calls"
        )


# --- refusals ----------------------------------------------------------------------------------


def _refusal(placed: _Placement, ref: ValueRef, at: set[int]) -> str | None:
    """The reason why the stages that need a value would compute it wrongly, if any."""
    origin, last = placed.origin(ref), max(at)
    match ref.kind:
        case ValueKind.STATE:
            return replaced_message(ref.name)
        case ValueKind.DRAW:
            # The first stage to run the top-level forward after the draw draws as the plain model.
            first = min({*placed.stages[ref.call :], placed.num_stages - 1})
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


# --- the stages of leaf modules -----------------------------------------------------------------


def assign_stages(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None
) -> dict[str, int | None]:
    """Assign a stage to each leaf module and direct parameter, from the user's split.

    cuts               wte  wpe  drop  h.0  h.1  h.2  h.3  ln_f  lm_head
    [2, 2]              0    0    -     0    0    1    1    1     1
    ["h.1"]             0    0    -     0    1    1    1    1     1
    [[...], [...]]      as named; a parameter that is left over is an error

    A stateless leaf module (-) needs no stage. Without a trace, definition order is taken as
    execution order.

    Raises:
        PartitionError: a stage is empty, a parameter has no stage, or the cuts are out of order.
    """
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
        needed = _Placement(trace, stages, spec.num_stages).needed
        uses = {r.name: min(at) for r, at in needed.items() if r.kind is ValueKind.PARAMETER}
        first = {n: names[0] for names in names_by_tensor(leaves.model).values() for n in names}
        for name in unassigned:
            inside = (first[n] for n in first if n == name or n.startswith(f"{name}."))
            stages[name] = min((uses[each] for each in inside if each in uses), default=None)
    stages |= {name: 0 for name in leaves.direct if stages.get(name) is None}
    before = 0
    for name in with_state:  # an unused module joins the module defined before it
        at = stages[name]
        stages[name] = before = before if at is None else at
    for stage in range(spec.num_stages):
        if stage not in stages.values():
            raise PartitionError(
                f"stage {stage} would hold no parameter; give it modules that have some, or cut "
                "into fewer stages"
            )
    return stages


def try_cut(leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace) -> ForwardPlan | None:
    """The plan of a model cut at these places; None if it can't be cut."""
    try:
        assignment = assign_stages(leaves, spec, trace)
        return plan_forward(trace, assignment, spec.num_stages, leaves.shared)
    except PartitionError:
        return None


def _by_names(leaves: LeafModules, spec: SplitSpec, with_state: Sequence[str]) -> dict[str, int]:
    stages: dict[str, int] = {}
    for stage, names in enumerate(spec.stages):
        for name in names:
            for leaf in leaves.under(name):
                if leaf in with_state or leaf in leaves.direct:
                    other = stages.setdefault(leaf, stage)
                    if other != stage:
                        raise PartitionError(
                            f"{name} is named in stage {stage}, but is the same module as {leaf}, "
                            f"which stage {other} has; name it once"
                        )
    # A module that occurs several times in a list but is named once stays whole.
    modules = leaves.leaves
    by_module = {id(modules[leaf]): at for leaf, at in stages.items() if leaf in modules}
    again = {leaf: by_module.get(id(modules[leaf])) for leaf in with_state}
    stages = {leaf: at for leaf, at in again.items() if at is not None} | stages
    params = dict(leaves.model.named_parameters(remove_duplicate=False))
    missing = [name for name in leaves.direct if name in params and name not in stages]
    for leaf in with_state:
        if leaf not in stages:
            inside = [f"{leaf}.{name}" for name, _ in modules[leaf].named_parameters()]
            missing += inside or [leaf]
    if missing:
        raise PartitionError(
            f"no stage holds the parameters {abbreviate(missing)}; name them, or the modules that "
            f"hold them, in one of the {spec.num_stages} stages"
        )
    return stages


def _by_starts(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None, with_state: Sequence[str]
) -> dict[str, int]:
    order: Mapping[str, int] = (
        {name: i for i, name in enumerate(leaves.leaves)} if trace is None else trace.first_calls()
    )
    starts = spec.begins(order)
    firsts = [_first_call(leaves, name, order) for name in starts]
    for (before, first), (name, then) in pairwise(zip(starts, firsts, strict=True)):
        if then <= first:
            raise PartitionError(
                f"a stage is to begin with {before} and the next one with {name}, which does not "
                "run after it; name them in the order in which they run"
            )
    return {
        name: sum(first <= order[name] for first in firsts) for name in with_state if name in order
    }


def _first_call(leaves: LeafModules, name: str, order: Mapping[str, int]) -> int:
    called = [order[leaf] for leaf in leaves.under(name) if leaf in order]
    if not called:
        raise PartitionError(
            f"a stage is to begin with {name}, but the model does not call it on the example; "
            "begin with a module that it calls"
        )
    return min(called)
