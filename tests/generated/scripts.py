"""Choose what is done with a model, move by move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.crossings import SUMMED
from tests.generated.case import Case
from tests.generated.draws import Draws
from tests.generated.moves import Evaluate, Fail, Freeze, Move, Reload, Resume, Step
from tests.generated.plans import Plan
from tests.generated.units import UNITS

__all__ = ["draw_moves", "sums_in_order"]


def draw_moves(draws: Draws, case: Case, plans: Sequence[Plan]) -> tuple[Move, ...]:
    """What is done with it.

    Args:
        draws: the choices.
        case: the script so far.
        plans: how the model is laid on ranks, in turn.
    """
    moves: list[Move] = []
    for i, plan in enumerate(plans):
        if i:
            moves.append(Resume(plan=plan))
        some: list[Move] = []
        for _ in range(draws.number(1, 4)):
            some += _some_moves(draws, case, plan)
        more = draws.part(f"more {i}")
        for move in (*some, _step(draws, case, plan)):
            moves += [*_between(more, case, plan), _varied(more, case, plan, move)]
    return tuple(moves)


def _between(draws: Draws, case: Case, plan: Plan) -> list[Move]:
    """What may be done before any move."""
    moves: list[Move] = []
    if draws.takes("reloading", 0.06):
        moves.append(Reload(factor=draws.one_of((1.0, 0.5))))
    if draws.takes("failing", 0.06) and _may_fail(case):
        units = [i for i, unit in enumerate(case.recipe.units) if unit in UNITS]
        places = ["loss"]
        if units and case.recipe.way in ("layers", "by module"):
            places.append("backward")
        if units and case.recipe.way == "layers":  # the other runs dry first
            places.append("forward")
        beside = plan.beside is not None and draws.chance(0.3)
        now = plan.beside if beside and plan.beside is not None else plan
        moves.append(
            Fail(
                place=draws.one_of(places),
                unit=draws.one_of(units) if units else 0,
                microbatch=draws.number(0, now.microbatches - 1),
                rows=_rows(draws, case, now),
                seed=draws.number(0, 999),
                beside=beside,
            )
        )
    return moves


def _may_fail(case: Case) -> bool:
    """Whether nothing but gradients is left of a step that fails."""
    units = case.recipe.units
    return (
        not case.replicas  # whose groups do not outlive a failure
        and not case.habits.in_backward
        and case.recipe.way != "pieces"
        and "compiled" not in units
        and not any(unit in UNITS and UNITS[unit].keeps for unit in units)
    )


def _varied(draws: Draws, case: Case, plan: Plan, move: Move) -> Move:
    """A move, done in one of several ways."""
    if not isinstance(move, Step | Evaluate):
        return move
    if plan.beside is not None and draws.chance(0.5):
        move = replace(move, beside=True, rows=_rows(draws, case, plan.beside))
    if isinstance(move, Evaluate):
        averaged = case.habits.averaged and not case.recipe.tied
        return replace(move, averaged=averaged and draws.chance(0.5))
    move = replace(move, by_model=draws.chance(0.5))
    if not move.clip:
        return move
    if case.habits.scaled and not move.update:
        return replace(move, clip="")
    return replace(move, clip=draws.one_of(("norm", "largest", "measured", "value")))


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
    steps_itself = case.habits.in_backward
    keeps = draws.takes("accumulating", 0.25)
    overflows = draws.chance(0.2) and case.habits.scaled
    clips, sparse = draws.takes("clipping", 0.1), "sparse words" in case.recipe.units
    return Step(
        rows=_rows(draws, case, plan),
        length=plan.pieces * draws.number(1, 3),
        seed=draws.number(0, 999),
        update=not keeps and not steps_itself,
        clip="norm" if clips and not steps_itself and not sparse else "",
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


def sums_in_order(case: Case, plans: Sequence[Plan], moves: Sequence[Move]) -> bool:
    """Whether all sums are taken in the plain loop's order.

    Args:
        case: the script, but for its moves.
        plans: how the model is laid on ranks, in turn.
        moves: what is done.
    """
    recipe = case.recipe
    crossings = {unit.partition(" ")[2] for unit in recipe.units if unit not in UNITS}
    # What writes into its microbatch finds it elsewhere in memory when it is recomputed, and
    # kernels round by where it lies.
    every = [each for plan in plans for each in (plan, plan.beside) if each is not None]
    moved = recipe.units[0] == "in place on its input" and any(plan.kept for plan in every)
    return (
        not moved
        and all(plan.sums_in_order for plan in plans)
        and not recipe.tied
        and not case.replicas
        and recipe.way != "pieces"
        and not recipe.between & {"skip", "residual"}
        and not crossings & set(SUMMED)
        and not any(unit in UNITS and UNITS[unit].sums for unit in recipe.units)
        and not any(isinstance(move, Step) and move.clip not in ("", "value") for move in moves)
    )
