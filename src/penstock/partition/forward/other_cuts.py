"""Where a model could be cut by module instead, for the errors of cuts that it does not allow.

    between the same parts     the dry run is there: other cuts are tried on it
    around more                where code between the parts stands in the way, modules that hold
                               them are left whole, from the inside to the outside

It runs a model dry, and cuts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.errors import PartitionError
from penstock.partition.forward.homes import try_cut
from penstock.partition.forward.nearest import Cut, nearest_place
from penstock.partition.forward.recorded import DryRun
from penstock.partition.forward.units import Units, find_units
from penstock.partition.spec import SplitSpec

__all__ = ["around_more", "between_the_same"]

NOWHERE = "no other place between these modules works"


def between_the_same(parts: Units, spec: SplitSpec, seen: DryRun) -> str:
    """The nearest place for one of the cuts, between the parts that the dry run has seen.

    Args:
        parts: the model's units.
        spec: the cuts that it does not allow.
        seen: its dry run.
    """
    order = seen.first_calls()
    cuts = [_cut(name, parts, order) for name in starts_of(parts, spec, order)]
    if spec.stages and _works(parts, seen, cuts):
        starts = [cut.label.removeprefix("before ") for cut in cuts]
        return f"stages that begin there work if all lies where it runs: split={starts}"
    move = nearest_place(cuts, _places(parts, order), lambda c: _works(parts, seen, c))
    return NOWHERE if move is None else str(move)


def around_more(parts: Units, run: Callable[[Units], DryRun]) -> str:
    """The nearest place outside of the modules in which code stands in the way of cuts.

    Args:
        parts: the model's units, as they can't be run dry.
        run: runs other units dry, or raises a PartitionError.
    """
    opened = sorted((name for name in parts.opened if name), key=lambda n: -n.count("."))
    for whole in opened:
        try:
            outer = find_units(parts.model, [whole])
            seen = run(outer)
        except PartitionError:
            continue
        order = seen.first_calls()
        if whole not in order:
            continue
        place = nearest_place(
            [Cut(label="", position=order[whole])],
            _places(outer, order),
            lambda cuts, outer=outer, seen=seen: _works(outer, seen, cuts),  # type: ignore[misc]
        )
        if place is not None:
            return f"{whole} can be left whole: {place}"
    return NOWHERE


def starts_of(parts: Units, spec: SplitSpec, order: Mapping[str, int]) -> Sequence[str]:
    """The modules with which stages after the first begin, whatever words said so."""
    if not spec.stages:
        return spec.begins(order)
    return [
        min(
            (unit for name in names for unit in parts.under(name)),
            key=lambda unit: order.get(unit, len(order)),
            default=names[0],
        )
        for names in spec.stages[1:]
    ]


def _cut(name: str, parts: Units, order: Mapping[str, int]) -> Cut:
    called = [order[unit] for unit in parts.under(name) if unit in order]
    return Cut(label=f"before {name}", position=min(called, default=len(order)))


def _places(parts: Units, order: Mapping[str, int]) -> list[Cut]:
    return [
        Cut(label=f"before {name}", position=at) for name, at in order.items() if parts.stored(name)
    ]


def _works(parts: Units, seen: DryRun, cuts: Sequence[Cut]) -> bool:
    spec = SplitSpec(starts=tuple(cut.label.removeprefix("before ") for cut in cuts))
    return try_cut(parts, spec, seen) is not None
