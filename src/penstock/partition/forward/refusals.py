"""What a cut by module does not allow: what stages would write, draw or keep beside each other.

    written     a tensor, a buffer or an attribute that one stage changes and another reads
    drawn       random numbers that two stages would draw, or a later one than the plain model
    lost        gradients of what a reentrant checkpoint computes
    too early   a parameter that an earlier stage computes with

Pure checks of a dry run and its placement, each with its message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.forward.absent import Source, SourceKind
from penstock.partition.forward.recorded import DryRun
from penstock.partition.forward.shared_parts import SharedParts, home_of

__all__ = ["PlacedRun", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A dry run whose calls have their stages.

    Args:
        seen: the dry run.
        homes: the stage of each part.
        num_stages: how many stages there are.
        shared: what several parts have in common.
        stages: the stage of each call.
        wanted: for each value, the stages that need it.
        origins: for each value, the stage that has it first.
    """

    seen: DryRun
    homes: Mapping[str, int | None]
    num_stages: int
    shared: SharedParts
    stages: tuple[int, ...]
    wanted: Mapping[Source, set[int]]
    origins: Mapping[Source, int]

    def first_to_run(self, calls: int) -> int:
        """The stage that is the first to run the code behind so many calls."""
        ends = [max((i for i, s in enumerate(self.stages) if s == k), default=-1) + 1
                for k in range(self.num_stages - 1)]  # fmt: skip
        return next((stage for stage, end in enumerate(ends) if end > calls), self.num_stages - 1)


def refuse(placed: PlacedRun) -> None:
    """Refuse what the stages of a cut can't do.

    Raises:
        PartitionError: something of it.
    """
    _refuse_shared(placed)
    _refuse_draws(placed)
    _refuse_writes(placed)
    _refuse_changed(placed)
    _refuse_detached(placed)
    _refuse_early_parameters(placed)


def _refuse_shared(placed: PlacedRun) -> None:
    at: dict[str, set[int]] = {}
    for call, stage in zip(placed.seen.calls, placed.stages, strict=True):
        for name in call.changed:
            known = placed.shared.known(f"{call.unit}.{name}")
            if known is not None:
                at.setdefault(known, set()).add(stage)
    for name, where in at.items():
        users = where | _users(placed, name)
        if len(users) > 1:
            raise PartitionError(
                f"{name.rpartition('.')[0]} is one module within several, in the stages "
                f"{sorted(users)}, and changes its {name.rpartition('.')[2]} ({name}) in each "
                "call: it would not be in the order of one process; give each its own, freeze it "
                "(eval()), or cut so that all its calls lie in one stage"
            )


def _users(placed: PlacedRun, name: str) -> set[int]:
    """The stages that call a part which holds the module of a name."""
    owner = name.rpartition(".")[0]
    names = [each for each, known in placed.shared.state.items() if known in (owner, name)]
    units = {unit for unit in placed.homes for each in names if each.startswith(f"{unit}.")}
    calls = zip(placed.seen.calls, placed.stages, strict=True)
    return {stage for call, stage in calls if call.unit in units}


def _refuse_draws(placed: PlacedRun) -> None:
    marks = [call.drawn for call in placed.seen.calls]
    for source, at in placed.wanted.items():
        if source.kind is not SourceKind.DRAW:
            continue
        if len(at) > 1:
            raise PartitionError(
                f"the code between the model's parts draws random numbers ({source.name}) for "
                f"values that the stages {sorted(at)} need, and each would draw its own; use an "
                "nn.Dropout module there, which runs once, or cut elsewhere"
            )
        first, (used,) = placed.first_to_run(bisect_right(marks, source.call)), at
        if used != first:
            raise PartitionError(
                f"the code between the model's parts draws random numbers ({source.name}) in "
                f"stage {first}, for values that stage {used} alone needs and would draw anew, "
                "others than the plain model's; use an nn.Dropout module there, whose result "
                "crosses, or cut elsewhere"
            )


def _refuse_writes(placed: PlacedRun) -> None:
    for source, at in placed.wanted.items():
        here = placed.origins[source]
        if source.kind is SourceKind.WRITTEN and at != {here}:
            raise PartitionError(
                f"{source.name}, in stage {here}, writes into the tensor that it is called with "
                f"(argument {source.leaf}), which stage {max(at)} computes with and would not see "
                "written; have it return a new tensor, or cut so that all who use it are in one "
                "stage"
            )


def _refuse_changed(placed: PlacedRun) -> None:
    for name in sorted(placed.seen.changed):
        at = placed.wanted.get(Source(SourceKind.PARAMETER, 0, 0, name), set())
        home = home_of(name, placed.homes) or 0
        if at != {home}:
            where = f"stages {sorted(at)} compute" if at else "nothing that is returned computes"
            raise PartitionError(
                f"the code between the model's parts writes into {name}, which lies in stage "
                f"{home}, but {where} with it; move that into a module, or cut elsewhere"
            )


def _refuse_detached(placed: PlacedRun) -> None:
    for source, at in placed.wanted.items():
        if source.kind is not SourceKind.OUTPUT or max(at) == placed.origins[source]:
            continue
        if placed.seen.calls[source.call].detached:
            raise PartitionError(
                f"{source.name} is called within an autograd function, as by a checkpoint with "
                f"use_reentrant=True, but what it returns crosses to stage {max(at)}: its gradient "
                "would be lost; use use_reentrant=False"
            )


def _refuse_early_parameters(placed: PlacedRun) -> None:
    for source, at in placed.wanted.items():
        origin = placed.origins[source]
        if source.kind is SourceKind.PARAMETER and min(at) < origin:
            raise PartitionError(
                f"{source} lies in stage {origin}, but stage {min(at)} computes with it outside "
                f"of its module; put the module into stage {min(at)}"
            )
