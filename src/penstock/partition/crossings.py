"""Which values cross between the stages of a model that was run dry.

    call    wte    h.0    h.1    h.2    lm_head     a dry run notes which calls ran, in order,
    stage    0      0      1      1        1        and which values each of them was given
    needs   ids    wte    h.0    h.1    h.2,labels
                      │ ids, labels, output 0 of h.0 cross

A value is carried hop by hop from the stage that has it to the last one that needs it. Pure data:
this module runs no model and holds no tensor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.absent import Kind, Source
from penstock.stage.boundary import BoundarySpec

__all__ = [
    "Call",
    "Crossings",
    "Recorded",
    "DryRun",
    "find_crossings",
    "first_uses",
    "place_calls",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One call of a part of the model, as the dry run saw it.

    Args:
        unit: the part's name.
        needs: the values that it was given, or that what it was given was computed from.
        output: what it returned, and what was collected from within it.
        written: the leaves of the output that somebody wrote into afterwards.
        writes: the leaves of its arguments that it wrote into.
        buffers: its buffers that it wrote into.
    """

    unit: str
    needs: frozenset[Source]
    output: BoundarySpec
    written: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a dry run of the whole model saw.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls in order.
        needs: the values that the model's output was computed from.
        everywhere: the inputs that every stage has: those that are not floating point. Masks and
            positions are made of them, and control flow may depend on them.
        written: the leaves of the inputs that the model writes into.
        loss: whether the output has a scalar named ``loss``.
        changed: the parameters and buffers that the code between the parts writes into.
        draws: whether it draws random numbers.
    """

    inputs: BoundarySpec
    calls: tuple[Recorded, ...]
    needs: frozenset[Source]
    everywhere: frozenset[Source]
    written: tuple[int, ...]
    loss: bool
    changed: frozenset[str] = frozenset()
    draws: bool = False

    def first_calls(self) -> dict[str, int]:
        """For each part that was called, its first call."""
        found: dict[str, int] = {}
        for i, call in enumerate(self.calls):
            found.setdefault(call.unit, i)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a part, in the order in which they run.

    Args:
        unit: the part's name.
        stage: where it runs.
        output: what it returns, and what is collected from within it.
        written: the leaves of the output that later code writes into.
        writes: the leaves of its arguments that it writes into.
    """

    unit: str
    stage: int
    output: BoundarySpec
    written: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossings:
    """All that the stages have to know to run their parts of a model on inputs of one shape.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls in order.
        carried: for each boundary the values that cross it, in order.
        written: the leaves of the inputs that the model writes into.
        draws: whether the code between the parts draws random numbers.
    """

    inputs: BoundarySpec
    calls: tuple[Call, ...]
    carried: tuple[tuple[Source, ...], ...]
    written: tuple[int, ...] = ()
    draws: bool = False

    def last_call(self, stage: int) -> int:
        """The last call that runs on ``stage``; -1 where none does."""
        return max((i for i, call in enumerate(self.calls) if call.stage == stage), default=-1)

    def encode(self) -> bytes:
        """As JSON, to be read by ``decode`` on another rank."""
        calls = [
            [c.unit, c.stage, c.output.encode().decode(), c.written, c.writes] for c in self.calls
        ]
        carried = [[[s.kind.value, s.call, s.leaf, s.name] for s in part] for part in self.carried]
        inputs = self.inputs.encode().decode()
        return json.dumps([inputs, calls, carried, self.written, self.draws]).encode()

    @staticmethod
    def decode(data: bytes) -> Crossings:
        """What ``encode`` wrote."""
        inputs, calls, carried, written, draws = json.loads(data)
        return Crossings(
            inputs=BoundarySpec.decode(inputs.encode()),
            calls=tuple(
                Call(
                    unit=unit,
                    stage=stage,
                    output=BoundarySpec.decode(output.encode()),
                    written=tuple(leaves),
                    writes=tuple(writes),
                )
                for unit, stage, output, leaves, writes in calls
            ),
            carried=tuple(
                tuple(Source(Kind(kind), call, leaf, name) for kind, call, leaf, name in part)
                for part in carried
            ),
            written=tuple(written),
            draws=draws,
        )


def find_crossings(
    seen: DryRun,
    homes: Mapping[str, int | None],
    num_stages: int,
    shared: Mapping[str, str] | None = None,
) -> Crossings:
    """Give every call its stage, and every boundary the values that cross it.

    A part with a home runs there. One without (an activation, a dropout, a rotary table: nothing
    of it has to be stored) runs as early as it can, once.

    Args:
        seen: the dry run.
        homes: the stage of each part, and of each parameter that stands by itself; None for
            those that run where their inputs are.
        num_stages: how many stages there are.
        shared: buffers that several parts hold, and under which one name each is known.

    Raises:
        PartitionError: a part would run before the values that it needs are there, or stages
            would see what others write.
    """
    stages = place_calls(seen, homes)
    _refuse_shared(seen, stages, shared or {})
    wanted = _wanted(seen, stages, num_stages)
    last = num_stages - 1
    _refuse_two_draws(wanted)
    _refuse_writes(wanted, stages)
    _refuse_changed(seen, wanted, homes)
    carried = [
        tuple(
            sorted(
                (s for s, at in wanted.items() if _origin(s, stages, homes) <= boundary < max(at)),
                key=lambda s: (s.kind.value, s.call, s.leaf, s.name),
            )
        )
        for boundary in range(last)
    ]
    for source, at in wanted.items():
        origin = _origin(source, stages, homes)
        if source.kind is Kind.PARAMETER and min(at) < origin:
            raise PartitionError(
                f"{source} lies in stage {origin}, but stage {min(at)} computes with it outside "
                f"of its module; put the module into stage {min(at)}"
            )
    return Crossings(
        inputs=seen.inputs,
        calls=tuple(
            Call(
                unit=call.unit,
                stage=stage,
                output=call.output,
                written=call.written,
                writes=call.writes,
            )
            for call, stage in zip(seen.calls, stages, strict=True)
        ),
        carried=tuple(carried),
        written=seen.written,
        draws=seen.draws,
    )


def place_calls(seen: DryRun, homes: Mapping[str, int | None]) -> list[int]:
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


def first_uses(seen: DryRun, homes: Mapping[str, int | None], num_stages: int) -> dict[str, int]:
    """For each parameter that the code between the parts computes with, the first stage to.

    Args:
        seen: the dry run.
        homes: the stage of each part.
        num_stages: how many stages there are.
    """
    wanted = _wanted(seen, place_calls(seen, homes), num_stages)
    return {s.name: min(at) for s, at in wanted.items() if s.kind is Kind.PARAMETER}


def _wanted(seen: DryRun, stages: Sequence[int], num_stages: int) -> dict[Source, set[int]]:
    """For each value the stages that need it."""
    wanted: dict[Source, set[int]] = {}
    for call, stage in zip(seen.calls, stages, strict=True):
        for source in call.needs:
            wanted.setdefault(source, set()).add(stage)
    for source in (*seen.needs, *seen.everywhere):
        wanted.setdefault(source, set()).add(num_stages - 1)
    return wanted


def _origin(source: Source, stages: Sequence[int], homes: Mapping[str, int | None]) -> int:
    """The stage that has a value first; random draws are never carried."""
    match source.kind:
        case Kind.INPUT:
            return 0
        case Kind.OUTPUT | Kind.WRITTEN:
            return stages[source.call]
        case Kind.PARAMETER:
            return homes.get(source.name) or 0
        case Kind.DRAW:
            return sys.maxsize


def _ready(
    needs: frozenset[Source], stages: Sequence[int], homes: Mapping[str, int | None]
) -> tuple[int, Source | None]:
    """The first stage that can have all of ``needs``, and which of them is the last to come."""
    outputs = [s for s in needs if s.kind in (Kind.OUTPUT, Kind.WRITTEN)]
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


def _refuse_writes(wanted: Mapping[Source, set[int]], stages: Sequence[int]) -> None:
    for source, at in wanted.items():
        here = stages[source.call] if source.kind is Kind.WRITTEN else None
        if here is not None and at != {here}:
            raise PartitionError(
                f"{source.name}, in stage {here}, writes into the tensor that it is called with "
                f"(argument {source.leaf}), which stage {max(at)} computes with and would not see "
                "written; have it return a new tensor, or cut so that all who use it are in one "
                "stage"
            )


def _refuse_shared(seen: DryRun, stages: Sequence[int], shared: Mapping[str, str]) -> None:
    at: dict[str, set[int]] = {}
    for call, stage in zip(seen.calls, stages, strict=True):
        for name in call.buffers:
            known = shared.get(f"{call.unit}.{name}")
            if known is not None:
                at.setdefault(known, set()).add(stage)
    for name, where in at.items():
        if len(where) > 1:
            raise PartitionError(
                f"{name.rpartition('.')[0]} is one module within several, in the stages "
                f"{sorted(where)}, and changes its buffer {name} in each call: it would not be in "
                "the order of one process; give each its own, freeze it (eval()), or cut so that "
                "all its calls lie in one stage"
            )


def _refuse_changed(
    seen: DryRun, wanted: Mapping[Source, set[int]], homes: Mapping[str, int | None]
) -> None:
    for name in sorted(seen.changed):
        at = wanted.get(Source(Kind.PARAMETER, 0, 0, name), set())
        home = homes.get(name) or 0
        if at != {home}:
            where = f"stages {sorted(at)} compute" if at else "nothing that is returned computes"
            raise PartitionError(
                f"the code between the model's parts writes into {name}, which lies in stage "
                f"{home}, but {where} with it; move that into a module, or cut elsewhere"
            )


def _refuse_two_draws(wanted: Mapping[Source, set[int]]) -> None:
    for source, at in wanted.items():
        if source.kind is Kind.DRAW and len(at) > 1:
            raise PartitionError(
                f"the code between the model's parts draws random numbers ({source.name}) for "
                f"values that the stages {sorted(at)} need, and each would draw its own; use an "
                "nn.Dropout module there, which runs once, or cut elsewhere"
            )
