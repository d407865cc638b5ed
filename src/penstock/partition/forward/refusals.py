"""Refusals of a cut by module: state, random numbers and gradients that stages would get wrong.

    written     a tensor, a buffer or an attribute that one stage changes and another reads
    drawn       random numbers that two stages would draw, or a later one than the plain model
    lost        gradients of what a reentrant checkpoint computes
    too early   a parameter that an earlier stage computes with

Pure checks of a trace whose calls have their stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.forward.forward_trace import ForwardTrace, replaced_message
from penstock.partition.forward.leaf_modules import SharedNames, StageAssignment, stage_of
from penstock.partition.forward.placeholder import ValueKind, ValueRef

__all__ = ["PlacedTrace", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTrace:
    """A trace whose calls have their stages.

    Args:
        trace: the trace.
        assignment: the stage of each leaf module.
        num_stages: the number of stages.
        shared: what leaf modules share.
        stages: the stage of each call.
        needed: the stages that need each value.
        origins: the stage that has each value first.
    """

    trace: ForwardTrace
    assignment: StageAssignment
    num_stages: int
    shared: SharedNames
    stages: tuple[int, ...]
    needed: Mapping[ValueRef, set[int]]
    origins: Mapping[ValueRef, int]

    def first_to_run(self, calls: int) -> int:
        """The first stage to run the top-level forward behind so many calls."""
        for stage in range(self.num_stages - 1):
            if any(at == stage for at in self.stages[calls:]):
                return stage
        return self.num_stages - 1


def refuse(placed: PlacedTrace) -> None:
    """Refuse what the stages of a cut would get wrong.

    Raises:
        PartitionError: the first thing found.
    """
    _refuse_shared_state(placed)
    for ref, at in placed.needed.items():
        match ref.kind:
            case ValueKind.STATE:
                raise PartitionError(replaced_message(ref.name))
            case ValueKind.DRAW:
                _refuse_draw(placed, ref, at)
            case ValueKind.WRITE:
                _refuse_write(placed.origins[ref], ref, at)
            case ValueKind.OUTPUT:
                _refuse_detached(placed, ref, at)
            case ValueKind.PARAMETER:
                _refuse_early_parameter(placed.origins[ref], ref, at)
            case ValueKind.INPUT:
                pass
    _refuse_changes(placed)


def _refuse_shared_state(placed: PlacedTrace) -> None:
    changed_at: dict[str, set[int]] = {}
    for call, stage in zip(placed.trace.calls, placed.stages, strict=True):
        for name in call.changes:
            known = placed.shared.shared_name(f"{call.leaf}.{name}")
            if known is not None:
                changed_at.setdefault(known, set()).add(stage)
    for name, at in changed_at.items():
        owner, _, last = name.rpartition(".")
        users = at | _stages_that_call(placed, owner, name)
        if len(users) > 1:
            raise PartitionError(
                f"{owner} is one module within several, in the stages {sorted(users)}, and changes "
                f"its {last} ({name}) in each call: it would not be in the order of one process; "
                "give each its own, freeze it (eval()), or cut so that all its calls lie in one "
                "stage"
            )


def _stages_that_call(placed: PlacedTrace, owner: str, name: str) -> set[int]:
    """The stages that call a leaf module with this inner module or buffer."""
    names = [each for each, known in placed.shared.inner.items() if known in (owner, name)]
    leaves = {leaf for leaf in placed.assignment for each in names if each.startswith(f"{leaf}.")}
    calls = zip(placed.trace.calls, placed.stages, strict=True)
    return {stage for call, stage in calls if call.leaf in leaves}


def _refuse_draw(placed: PlacedTrace, ref: ValueRef, at: set[int]) -> None:
    if len(at) > 1:
        raise PartitionError(
            f"the top-level forward draws random numbers ({ref.name}) for values that the stages "
            f"{sorted(at)} need, and each would draw its own; use an nn.Dropout module there, "
            "which runs once"
        )
    first, (used,) = placed.first_to_run(ref.call), at
    if used != first:
        raise PartitionError(
            f"the top-level forward draws random numbers ({ref.name}) in stage {first}, for values "
            f"that stage {used} alone needs and would draw anew, others than the plain model's; "
            "use an nn.Dropout module there, whose result crosses"
        )


def _refuse_write(origin: int, ref: ValueRef, at: set[int]) -> None:
    if at != {origin}:
        raise PartitionError(
            f"{ref.name}, in stage {origin}, writes into the tensor that it is called with "
            f"(argument {ref.leaf}), which stage {max(at)} computes with and would not see "
            "written; have it return a new tensor, or cut so that all its users are in one stage"
        )


def _refuse_detached(placed: PlacedTrace, ref: ValueRef, at: set[int]) -> None:
    if max(at) != placed.origins[ref] and placed.trace.calls[ref.call].detached:
        raise PartitionError(
            f"{ref.name} is called within an autograd function, as by a checkpoint with "
            f"use_reentrant=True, but its result crosses to stage {max(at)}: its gradient would be "
            "lost; use use_reentrant=False"
        )


def _refuse_early_parameter(origin: int, ref: ValueRef, at: set[int]) -> None:
    if min(at) < origin:
        raise PartitionError(
            f"{ref} lies in stage {origin}, but stage {min(at)} computes with it outside of its "
            f"module; put the module into stage {min(at)}"
        )


def _refuse_changes(placed: PlacedTrace) -> None:
    for name in sorted(placed.trace.changes):
        at = placed.needed.get(ValueRef(ValueKind.PARAMETER, 0, 0, name), set())
        stage = stage_of(name, placed.assignment) or 0
        if at != {stage}:
            where = f"stages {sorted(at)} compute" if at else "nothing that is returned computes"
            raise PartitionError(
                f"the top-level forward writes into {name}, which lies in stage {stage}, but "
                f"{where} with it; move that into a module"
            )
