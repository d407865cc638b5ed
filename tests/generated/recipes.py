"""A model by a seed: what it is made of, so that the plans for it can be played."""

from __future__ import annotations

from collections.abc import Sequence

from tests.crossings import CROSSINGS
from tests.generated.draws import Draws
from tests.generated.models import Recipe
from tests.generated.plans import Plan
from tests.generated.units import UNITS

__all__ = ["draw_recipe"]

# What crosses in one precision alone.
NARROW = ("half", "float8", "complex")


def draw_recipe(draws: Draws, way: str, plans: Sequence[Plan], replicas: str) -> Recipe:
    """A model.

    Args:
        draws: the choices.
        way: how it is cut.
        plans: how it is laid on ranks, in turn.
        replicas: how stages are replicated, if they are.
    """
    num = max(plan.num_model_stages for plan in plans) + draws.number(0, 3)
    if way == "pieces":
        return Recipe(seed=draws.number(0, 999), way=way, units=("",) * max(4, num), double=True)
    in_turn = all(plan.order is None and plan.family.num_directions == 1 for plan in plans)
    names = [
        name
        for name, unit in UNITS.items()
        if (unit.feature is None or draws.has(unit.feature))
        and (in_turn or not unit.keeps)
        and (unit.exports or way != "captured")
        and (way == "layers" or not unit.empty)
        and not ((unit.sparse or unit.empty) and replicas)
        # FSDP hands its modules views that autograd lets nobody write into, and reduces no sparse
        # gradients.
        and not (name in ("in place on its input", "sparse words") and replicas == "fsdp")
        and (draws.has("sums") or not unit.sums)
    ]
    units = [draws.one_of(names) for _ in range(num)]
    for i, name in enumerate(units):
        if name == "in place on its input" and i > 0:
            # Of what was before, autograd must not need the output.
            units[i - 1] = "shift"
    if "in place on its input" in units:
        # A stage with a compiled part is not watched for what it writes into.
        units = ["linear" if name == "compiled" else name for name in units]
    frozen = draws.some_of(range(num), 0.15) if draws.takes("freezing", 0.3) else ()
    if replicas:  # DDP wants something to train in every stage
        frozen = ()
    tied = draws.takes("tied", 0.15)
    between: frozenset[str] = frozenset()
    if way == "layers":
        units[-1] = "plain"
        if tied and num > 2:
            units[0] = "plain"
        if draws.takes("crossings", 0.3) and num > 3:
            _cross(draws, units)
    else:
        some = ("skip", "residual", "shift") if draws.has("sums") else ()
        between = frozenset(draws.some_of((*some, "scale", "offset", "in place", "loss"), 0.25))
    return Recipe(
        seed=draws.number(0, 999),
        way=way,
        units=tuple(units),
        frozen=tuple(i for i in frozen if i < num - 1),
        tied=tied and (way != "layers" or num > 2),
        between=between,
    )


def _cross(draws: Draws, units: list[str]) -> None:
    """Something of another kind crosses between two of the layers."""
    name = draws.one_of([name for name in CROSSINGS if name not in NARROW])
    begin = draws.number(1, len(units) - 3)
    end = draws.number(begin + 1, min(begin + 2, len(units) - 2))
    units[begin] = f"give {name}"
    units[begin + 1 : end] = ["pass"] * (end - begin - 1)
    units[end] = f"take {name}"
