"""Choose a whole script by a seed."""

from __future__ import annotations

from dataclasses import replace

from tests.generated.case import Case
from tests.generated.draws import Draws
from tests.generated.habits import OPTIMIZERS, RATES, Habits
from tests.generated.hooks import HOOKS
from tests.generated.models import Recipe
from tests.generated.plans import Plan, draw_beside, draw_plan, with_given
from tests.generated.recipes import draw_recipe
from tests.generated.scripts import draw_moves, sums_in_order
from tests.generated.units import UNITS

__all__ = ["draw_case"]


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
    recipe = draw_recipe(draws.part("model"), way, plans, replicas)
    plans = [
        _laid(draws.part(f"split {i}"), plan, recipe, ranks is not None, replicas)
        for i, plan in enumerate(plans)
    ]
    habits = _habits(draws, recipe, plans, replicas)
    hooked = draws.takes("hooks", 0.3) and way != "pieces" and not replicas
    # Of a parameter that processes share, one on the accumulated gradient would see a part.
    parts = ranks is not None and any(plan.num_copies > 1 for plan in plans)
    random = any(unit in UNITS and UNITS[unit].random for unit in recipe.units)
    case = Case(
        seed=seed,
        recipe=recipe,
        plan=plans[0],
        habits=habits,
        hooks=_hooks(draws.part("hooks"), recipe, parts=parts) if hooked else (),
        metrics=draws.takes("metrics", 0.2) and "loss" not in recipe.between,
        scale_grads=not draws.chance(0.2) or way == "pieces",
        dynamic_shapes=draws.takes("dynamic-shapes", 0.3),
        microbatch_rng=random and way != "pieces",
        all_inputs=draws.chance(0.5),
        replicas=replicas,
        moves=(),
    )
    moves = draw_moves(draws.part("moves"), case, plans)
    exact = sums_in_order(case, plans, moves)
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


def _laid(draws: Draws, plan: Plan, recipe: Recipe, processes: bool, replicas: str) -> Plan:
    """A plan for a model that is drawn: how it is cut, and what else is done with it."""
    plan = replace(plan, split=draws.parts_of(len(recipe.units), plan.num_model_stages))
    plan = _keeping(plan, recipe)
    plan = with_given(draws, plan, way=recipe.way)
    if not draws.takes("beside", 0.15) or recipe.way == "pieces" or plan.given == "auto":
        return plan
    # A model is captured once, and wrapped once.
    shares = draws.chance(0.5) or recipe.way == "captured" or bool(replicas)
    beside = draw_beside(draws, plan, shares=shares, alike=shares or processes)
    keeps = any(unit in UNITS and UNITS[unit].keeps for unit in recipe.units)
    if beside is not None and keeps and not beside.sums_in_order:
        return plan
    return replace(plan, beside=None if beside is None else _keeping(beside, recipe))


def _keeping(plan: Plan, recipe: Recipe) -> Plan:
    """A plan that recomputes no forward that writes into its inputs, which is refused."""
    writes = "in place on its input" in recipe.units
    return replace(plan, kept="offload") if writes and plan.kept == "recompute" else plan


def _habits(draws: Draws, recipe: Recipe, plans: list[Plan], replicas: str) -> Habits:
    optimizer = draws.one_of(("sgd", "adamw"))
    scaled = draws.takes("scaler", 0.15)
    in_backward = not scaled and draws.takes("in-backward", 0.2)
    if in_backward and _may_step_in_backward(recipe, plans, replicas):
        return Habits(in_backward=True)
    more = draws.part("habits")
    if more.takes("optimizers", 0.3):
        optimizer = more.one_of(list(OPTIMIZERS))
    # A replica has a loss of its own.
    rates = [name for name in RATES if name != "plateau" or not replicas]
    return Habits(
        optimizer=optimizer,
        scaled=scaled,
        groups=more.takes("groups", 0.2),
        rates=more.one_of(rates) if more.takes("rates", 0.3) else "",
        averaged=more.takes("average", 0.2),
    )


def _may_step_in_backward(recipe: Recipe, plans: list[Plan], replicas: str) -> bool:
    """Whether each parameter has one gradient per microbatch, and the last comes last."""
    return (
        # The others reduce gradients after the hook.
        replicas in ("", "fsdp")
        and not recipe.tied
        and not any(unit in UNITS and UNITS[unit].sparse for unit in recipe.units)
        and all(plan.num_copies == 1 and plan.pieces == 1 for plan in plans)
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
