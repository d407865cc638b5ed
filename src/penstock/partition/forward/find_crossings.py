"""Which values cross between the stages of a model that was run dry.

    call    wte    h.0    h.1    h.2    lm_head     a dry run notes which calls ran, in order,
    stage    0      0      1      1        1        and which values each of them was given
    needs   ids    wte    h.0    h.1    h.2,labels
                      │ ids, labels, output 0 of h.0 cross

Pure: this module runs no model and holds no tensor. What a cut does not allow, refusals.py says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from penstock.errors import PartitionError
from penstock.partition.forward.absent import Source, SourceKind
from penstock.partition.forward.crossings import Crossings, PlacedCall
from penstock.partition.forward.recorded import DryRun
from penstock.partition.forward.refusals import PlacedRun, refuse
from penstock.partition.forward.shared_parts import SharedParts, home_of

__all__ = ["Homes", "find_crossings", "first_uses"]

Homes = Mapping[str, int | None]


def find_crossings(seen: DryRun, homes: Homes, num_stages: int, shared: SharedParts) -> Crossings:
    """Give every call its stage, and every boundary the values that cross it.

    A part with a home runs there. One without (an activation, a dropout, a rotary table: nothing
    of it has to be stored) runs as early as it can, once.

    Args:
        seen: the dry run.
        homes: the stage of each part, and of each parameter that stands by itself; None for
            those that run where their inputs are.
        num_stages: how many stages there are.
        shared: what several parts have in common.

    Raises:
        PartitionError: a part would run before the values that it needs are there, or stages
            would see what others write.
    """
    stages = place_calls(seen, homes)
    wanted = _wanted(seen, stages, num_stages)
    _leave_out_held(wanted, homes, shared)
    refuse(
        PlacedRun(
            seen=seen,
            homes=homes,
            num_stages=num_stages,
            shared=shared,
            stages=tuple(stages),
            wanted=wanted,
            origins={source: _origin(source, stages, homes) for source in wanted},
        )
    )
    return Crossings(
        inputs=seen.inputs,
        calls=tuple(
            PlacedCall(
                unit=call.unit,
                stage=stage,
                output=call.output,
                written=call.written,
                writes=call.writes,
            )
            for call, stage in zip(seen.calls, stages, strict=True)
        ),
        carried=tuple(
            _carried(boundary, wanted, stages, homes) for boundary in range(num_stages - 1)
        ),
        written=seen.written,
        draws=seen.draws,
        host_draws=seen.host_draws,
    )


def place_calls(seen: DryRun, homes: Homes) -> list[int]:
    """The stage of each call.

    Raises:
        PartitionError: a part would run before the values that it needs are there.
    """
    stages: list[int] = []
    for call in seen.calls:
        ready, after = _ready(call.needs, stages, homes)
        home = homes[call.unit]
        if home is not None and ready > home:
            raise _too_early(call.unit, home, after, ready, seen, stages)
        stages.append(ready if home is None else home)
    return stages


def first_uses(seen: DryRun, homes: Homes, num_stages: int) -> dict[str, int]:
    """For each parameter that the code between the parts computes with, the first stage to.

    Args:
        seen: the dry run.
        homes: the stage of each part.
        num_stages: how many stages there are.
    """
    wanted = _wanted(seen, place_calls(seen, homes), num_stages)
    return {s.name: min(at) for s, at in wanted.items() if s.kind is SourceKind.PARAMETER}


def _wanted(seen: DryRun, stages: Sequence[int], num_stages: int) -> dict[Source, set[int]]:
    """For each value the stages that need it."""
    wanted: dict[Source, set[int]] = {}
    for call, stage in zip(seen.calls, stages, strict=True):
        for source in call.needs:
            wanted.setdefault(source, set()).add(stage)
    for source in (*seen.needs, *seen.everywhere):
        wanted.setdefault(source, set()).add(num_stages - 1)
    return wanted


def _leave_out_held(wanted: dict[Source, set[int]], homes: Homes, shared: SharedParts) -> None:
    """A stage that holds a parameter, if only under another name, needs none of another stage."""
    for source, at in wanted.items():
        if source.kind is SourceKind.PARAMETER:
            first = home_of(source.name, homes)
            at -= shared.stages(source.name, homes) - {first}
            at |= set() if at else {first or 0}


def _carried(
    boundary: int, wanted: Mapping[Source, set[int]], stages: Sequence[int], homes: Homes
) -> tuple[Source, ...]:
    crossing = (s for s, at in wanted.items() if _origin(s, stages, homes) <= boundary < max(at))
    return tuple(sorted(crossing, key=lambda s: (s.kind.value, s.call, s.leaf, s.name)))


def _origin(source: Source, stages: Sequence[int], homes: Homes) -> int:
    """The stage that has a value first; random draws are never carried."""
    match source.kind:
        case SourceKind.INPUT:
            return 0
        case SourceKind.OUTPUT | SourceKind.WRITTEN:
            return stages[source.call]
        case SourceKind.PARAMETER:
            return home_of(source.name, homes) or 0
        case SourceKind.DRAW:
            return sys.maxsize


def _ready(
    needs: frozenset[Source], stages: Sequence[int], homes: Homes
) -> tuple[int, Source | None]:
    """The first stage that can have all of ``needs``, and which of them is the last to come."""
    outputs = [s for s in needs if s.kind in (SourceKind.OUTPUT, SourceKind.WRITTEN)]
    if not outputs:
        return 0, None
    latest = max(outputs, key=lambda s: (_origin(s, stages, homes), s.call))
    return _origin(latest, stages, homes), latest


def _too_early(
    unit: str,
    home: int,
    after: Source | None,
    ready: int,
    seen: DryRun,
    stages: Sequence[int],
) -> PartitionError:
    again = any(seen.calls[i].unit == unit for i in range(len(stages)))
    what = (
        f"{unit} is called several times, in stage {home} and again"
        if again
        else f"{unit} is in stage {home}, but is called"
    )
    way = (
        "; cut so that all its calls lie in one stage"
        if again
        else f"; put it into stage {ready} or later, or name modules in the order of their calls"
    )
    return PartitionError(f"{what} with {after}, which stage {ready} computes{way}")
