"""Which stage holds which part of a model: from what the user says to a stage for each part.

    cuts               wte  wpe  drop  h.0  h.1  h.2  h.3  ln_f  lm_head
    [2, 2]              0    0    -     0    0    1    1    1     1
    ["h.1"]             0    0    -     0    1    1    1    1     1
    [[...], [...]]      as named; what is left over is an error

A part without parameters (-) needs no home. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.forward.crossings import Crossings
from penstock.partition.forward.find_crossings import Homes, find_crossings, first_uses
from penstock.partition.forward.recorded import DryRun
from penstock.partition.forward.units import Units
from penstock.partition.plan import abbreviate
from penstock.partition.spec import SplitSpec
from penstock.partition.ties import names_by_tensor

__all__ = ["find_homes", "try_cut"]


def find_homes(parts: Units, spec: SplitSpec, seen: DryRun | None) -> dict[str, int | None]:
    """Give each part its stage.

    Args:
        parts: the model's units.
        spec: how it is to be cut.
        seen: its dry run; without one, parts run in the order of their definition.

    Returns:
        For each unit, and each parameter that an opened module holds by itself, its stage; None
        for units of which nothing has to be stored.

    Raises:
        PartitionError: a stage is empty, a parameter left over, or the cuts are out of order.
    """
    stored = [name for name in parts.units if parts.stored(name)]
    homes: dict[str, int | None] = dict.fromkeys(parts.units)
    if spec.stages:
        homes |= _named(parts, spec, stored)
    else:
        homes |= _counted(parts, spec, seen, stored)
    unnamed = [name for name in parts.direct if name not in homes]
    if spec.stages:
        params = dict(parts.model.named_parameters(remove_duplicate=False))
        _refuse_left_over([name for name in unnamed if name in params], spec)
    uncalled = [name for name in stored if homes[name] is None]
    if seen is not None and (unnamed or uncalled):
        uses = first_uses(seen, homes, spec.num_stages)
        homes |= _where_used(parts.model, [*unnamed, *uncalled], uses)
    homes |= {name: 0 for name in unnamed if name not in homes}
    homes |= _beside(stored, homes)
    for stage in range(spec.num_stages):
        if stage not in homes.values():
            raise PartitionError(
                f"stage {stage} would hold no parameter; give it modules that have some, or cut "
                "into fewer stages"
            )
    return homes


def try_cut(parts: Units, spec: SplitSpec, seen: DryRun) -> Crossings | None:
    """What crosses where a model is cut so; None where it can't be."""
    try:
        homes = find_homes(parts, spec, seen)
        return find_crossings(seen, homes, spec.num_stages, parts.shared)
    except PartitionError:
        return None


def _named(parts: Units, spec: SplitSpec, stored: Sequence[str]) -> dict[str, int | None]:
    homes: dict[str, int | None] = {}
    for stage, names in enumerate(spec.stages):
        for name in names:
            for unit in parts.under(name):
                if unit in stored or unit in parts.direct:
                    other = homes.setdefault(unit, stage)
                    if other != stage:
                        raise PartitionError(
                            f"{name} is named in stage {stage}, but is the same module as {unit}, "
                            f"which stage {other} has; name it once"
                        )
    # One that stands in a list several times, but is named once, stays whole.
    held = {id(parts.units[unit]): home for unit, home in homes.items() if unit in parts.units}
    homes |= {u: held[id(parts.units[u])] for u in stored if id(parts.units[u]) in held} | homes
    missing = [unit for unit in stored if unit not in homes]
    _refuse_left_over(
        [f"{u}.{p}" for u in missing for p, _ in parts.units[u].named_parameters()] or missing,
        spec,
    )
    return homes


def _refuse_left_over(left: Sequence[str], spec: SplitSpec) -> None:
    if left:
        raise PartitionError(
            f"no stage holds the parameters {abbreviate(left)}; name them, or the modules that "
            f"hold them, in one of the {spec.num_stages} stages"
        )


def _counted(
    parts: Units, spec: SplitSpec, seen: DryRun | None, stored: Sequence[str]
) -> dict[str, int | None]:
    order: Mapping[str, int] = (
        {name: i for i, name in enumerate(parts.units)} if seen is None else seen.first_calls()
    )
    starts = spec.begins(order)
    firsts = [_first_call(parts, name, order) for name in starts]
    for (before, first), (name, then) in pairwise(zip(starts, firsts, strict=True)):
        if then <= first:
            raise PartitionError(
                f"a stage is to begin with {before} and the next one with {name}, which does not "
                "run after it; name them in the order in which they run"
            )
    homes: dict[str, int | None] = {}
    for name in parts.units:
        if name in order and name in stored:
            homes[name] = sum(first <= order[name] for first in firsts)
    return homes


def _where_used(
    model: nn.Module, parts: Sequence[str], uses: Mapping[str, int]
) -> dict[str, int | None]:
    """The parts whose parameters the code between the parts computes with, where it does first.

    A head whose weight goes to a fused loss is one, which is never called itself.
    """
    found: dict[str, int | None] = {}
    known = {name: names[0] for names in names_by_tensor(model).values() for name in names}
    for part in parts:
        inside = (known[name] for name in known if name == part or name.startswith(f"{part}."))
        at = [uses[name] for name in inside if name in uses]
        if at:
            found[part] = min(at)
    return found


def _beside(stored: Sequence[str], homes: Homes) -> dict[str, int | None]:
    """All that is stored; what nobody uses, with what is defined before it."""
    found: dict[str, int | None] = {}
    stage = 0
    for name in stored:
        at = homes[name]
        stage = stage if at is None else at
        found[name] = stage
    return found


def _first_call(parts: Units, name: str, order: Mapping[str, int]) -> int:
    if name in parts.direct:
        raise PartitionError(
            f"a stage is to begin with {name}, which is no module; begin with one that is called"
        )
    called = [order[unit] for unit in parts.under(name) if unit in order]
    if not called:
        raise PartitionError(
            f"a stage is to begin with {name}, but the model did not call it on the example; "
            "begin with a module that it calls"
        )
    return min(called)
