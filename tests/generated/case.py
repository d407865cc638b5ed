"""A whole script by a seed: a model, how it is laid on ranks, and what is done with it in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.testing.compare import Tolerance
from tests.crossings import CROSSINGS, SUMMED
from tests.generated.draws import Draws
from tests.generated.hooks import HOOKS
from tests.generated.models import Recipe
from tests.generated.moves import Evaluate, Freeze, Move, Resume, Step
from tests.generated.plans import Plan, draw_plan
from tests.generated.units import UNITS

__all__ = ["Case", "draw_case"]

# Where sums are taken in another order, they are of double precision, and agree to this.
SUMS = Tolerance(relative=1e-9, absolute=1e-13)
# What crosses in one precision alone.
NARROW = ("half", "float8", "complex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script.

    Args:
        seed: what it was drawn by.
        recipe: the model.
        plan: how it is laid on ranks at first.
        optimizer: ``sgd``, ``adamw``, ``scaled`` (with a ``GradScaler``), or ``in backward`` (a
            step in each parameter's hook on its accumulated gradient).
        hooks: kinds of hooks, and the units that have them.
        metrics: whether the loss function returns more than the loss.
        scale_grads, dynamic_shapes, microbatch_rng: of the pipeline.
        all_inputs: whether every rank passes inputs and targets, or just those that need them.
        replicas: how stages are replicated, if they are.
        moves: what is done, in turn.
    """

    seed: int
    recipe: Recipe
    plan: Plan
    optimizer: str
    hooks: tuple[tuple[str, int], ...]
    metrics: bool
    scale_grads: bool
    dynamic_shapes: bool
    microbatch_rng: bool
    all_inputs: bool
    replicas: str
    moves: tuple[Move, ...]

    @property
    def tolerance(self) -> Tolerance | None:
        """How far values may lie apart; None demands equality."""
        return SUMS if self.recipe.double else None


def draw_case(
    seed: int,
    without: frozenset[str] = frozenset(),
    *,
    ranks: int | None = None,
    replicas: str = "",
) -> Case:
    """The script of a seed.

    Args:
        seed: the seed.
        without: features that are switched off.
        ranks: on how many ranks, where that is given.
        replicas: how stages are replicated: ``ddp``, ``fsdp`` or ``replicate``, if they are.
    """
    draws = Draws(seed, without)
    way = draws.one_of(("layers", "layers", "layers", "by module", "captured", "pieces"))
    if way != "layers" and not draws.has(way.replace(" ", "-")):
        way = "layers"
    plans = _plans(draws, way, ranks, replicas)
    recipe = _recipe(draws.part("model"), way, plans, replicas)
    plans = [_with_split(draws.part(f"split {i}"), p, recipe) for i, p in enumerate(plans)]
    optimizer = draws.one_of(("sgd", "adamw"))
    if draws.takes("scaler", 0.15) and not replicas:
        optimizer = "scaled"
    elif draws.takes("in-backward", 0.2) and _may_step_in_backward(recipe, plans, replicas):
        optimizer = "in backward"
    hooked = draws.takes("hooks", 0.3) and way != "pieces" and not replicas
    # Of a parameter that processes share, one on the accumulated gradient would see a part.
    parts = ranks is not None and any(plan.family.copies > 1 for plan in plans)
    random = any(unit in UNITS and UNITS[unit].random for unit in recipe.units)
    case = Case(
        seed=seed,
        recipe=recipe,
        plan=plans[0],
        optimizer=optimizer,
        hooks=_hooks(draws.part("hooks"), recipe, parts=parts) if hooked else (),
        metrics=draws.takes("metrics", 0.2) and "loss" not in recipe.between,
        scale_grads=not draws.chance(0.2) or way == "pieces",
        dynamic_shapes=draws.takes("dynamic-shapes", 0.3),
        microbatch_rng=random and way != "pieces",
        all_inputs=draws.chance(0.5),
        replicas=replicas,
        moves=(),
    )
    moves = _moves(draws.part("moves"), case, plans)
    exact = _sums_in_order(case, plans, moves)
    return replace(case, moves=moves, recipe=replace(recipe, double=not exact))


def _plans(draws: Draws, way: str, ranks: int | None, replicas: str) -> list[Plan]:
    """That of the beginning, and those with which training is resumed."""
    more = draws.number(1, 2) if draws.takes("resuming", 0.3) else 0
    plans = [draw_plan(draws.part("plan"), way=way, ranks=ranks)]
    for i in range(more):
        # Of ranks that are processes there may be fewer later, and not more than there are.
        some = ranks if ranks is None or replicas else draws.number(1, ranks)
        plans.append(draw_plan(draws.part(f"plan {i}"), way=way, ranks=some))
    return plans


def _recipe(draws: Draws, way: str, plans: list[Plan], replicas: str) -> Recipe:
    num = max(plan.num_model_stages for plan in plans) + draws.number(0, 3)
    if way == "pieces":
        return Recipe(seed=draws.number(0, 999), way=way, units=("",) * max(4, num), double=True)
    in_turn = all(plan.order is None and plan.family.copies == 1 for plan in plans)
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


def _with_split(draws: Draws, plan: Plan, recipe: Recipe) -> Plan:
    return replace(plan, split=draws.parts_of(len(recipe.units), plan.num_model_stages))


def _may_step_in_backward(recipe: Recipe, plans: list[Plan], replicas: str) -> bool:
    """Whether each parameter has one gradient per microbatch, and the last comes last."""
    return (
        not replicas
        and not recipe.tied
        and not any(unit in UNITS and UNITS[unit].sparse for unit in recipe.units)
        and all(plan.family.copies == 1 and plan.pieces == 1 for plan in plans)
    )


def _hooks(draws: Draws, recipe: Recipe, *, parts: bool) -> tuple[tuple[str, int], ...]:
    """Kinds of hooks and units, of those that take and give a tensor."""
    units = [i for i, unit in enumerate(recipe.units) if unit in UNITS and unit != "compiled"]
    if not units:
        return ()
    kinds = [
        kind
        for kind in HOOKS
        if not (recipe.tied and "gradient" in kind)
        and not (recipe.way == "captured" and "gradient" not in kind)
        and not (parts and kind == "on an accumulated gradient")
    ]
    if not kinds:
        return ()
    return tuple((draws.one_of(kinds), draws.one_of(units)) for _ in range(draws.number(1, 3)))


def _moves(draws: Draws, case: Case, plans: list[Plan]) -> tuple[Move, ...]:
    moves: list[Any] = []
    for i, plan in enumerate(plans):
        if i:
            moves.append(Resume(plan=plan))
        for _ in range(draws.number(1, 4)):
            moves += _some_moves(draws, case, plan)
        moves.append(_step(draws, case, plan))
    return tuple(moves)


def _some_moves(draws: Draws, case: Case, plan: Plan) -> list[Move]:
    moves: list[Move] = []
    if draws.takes("freezing", 0.12) and case.recipe.way != "pieces" and not case.replicas:
        moves.append(Freeze(units=draws.some_of(range(len(case.recipe.units) - 1), 0.3)))
    if draws.takes("eval", 0.3):
        training = draws.chance(0.3) and not case.microbatch_rng
        moves.append(
            Evaluate(
                rows=_rows(draws, case, plan),
                seed=draws.number(0, 999),
                training=training,
                target=draws.chance(0.4),
                narrow=_narrow(draws, case),
            )
        )
    moves.append(_step(draws, case, plan))
    return moves


def _step(draws: Draws, case: Case, plan: Plan) -> Step:
    steps_itself = case.optimizer == "in backward"
    keeps = draws.takes("accumulating", 0.25)
    overflows = draws.chance(0.2) and case.optimizer == "scaled"
    return Step(
        rows=_rows(draws, case, plan),
        length=plan.pieces * draws.number(1, 3),
        seed=draws.number(0, 999),
        update=not keeps and not steps_itself,
        clip=draws.takes("clipping", 0.1)
        and not steps_itself
        and "sparse words" not in case.recipe.units,
        zero="" if steps_itself else draws.one_of(("none", "none", "zeros")),
        overflow=overflows and case.recipe.way != "pieces",
        narrow=_narrow(draws, case),
    )


def _narrow(draws: Draws, case: Case) -> bool:
    units = case.recipe.units
    coarse = any(unit in UNITS and UNITS[unit].coarse for unit in units)
    # A graph keeps the dtype that the code asked for when it was captured.
    coarse = coarse or ("narrow" in units and case.recipe.way != "layers")
    return draws.takes("autocast", 0.1) and case.recipe.way != "pieces" and not coarse


def _rows(draws: Draws, case: Case, plan: Plan) -> int:
    # A graph that is captured for any number of rows knows that there are two or more.
    whole = plan.microbatches * draws.number(
        2 if case.recipe.way in ("captured", "by module") else 1, 3
    )
    more = draws.number(0, plan.microbatches - 1) if draws.takes("uneven", 0.3) else 0
    # Sequences' microbatches count alike only where they are alike.
    return whole if plan.pieces > 1 else whole + more


def _sums_in_order(case: Case, plans: list[Plan], moves: tuple[Move, ...]) -> bool:
    """Whether all sums are taken in the plain loop's order."""
    recipe = case.recipe
    crossings = {unit.partition(" ")[2] for unit in recipe.units if unit not in UNITS}
    # What writes into its microbatch finds it elsewhere in memory when it is recomputed, and
    # kernels round by where it lies.
    moved = recipe.units[0] == "in place on its input" and any(plan.kept for plan in plans)
    return (
        not moved
        and all(plan.sums_in_order for plan in plans)
        and not recipe.tied
        and not case.replicas
        and recipe.way != "pieces"
        and not recipe.between & {"skip", "residual"}
        and not crossings & set(SUMMED)
        and not any(unit in UNITS and UNITS[unit].sums for unit in recipe.units)
        and not any(isinstance(move, Step) and move.clip for move in moves)
    )
