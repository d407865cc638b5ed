"""A few scripts made from seeds, in one process and over ranks: as the plain model does them.

Many more run by hand, with ``python -m tests.generated``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.generated import piped
from tests.generated.case import Case
from tests.generated.drawing import draw_case
from tests.generated.draws import FEATURES
from tests.generated.habits import OPTIMIZERS, RATES, Habits
from tests.generated.models import Recipe
from tests.generated.moves import Evaluate, Fail, Freeze, Reload, Resume, Step
from tests.generated.ranks import Grid, told_of, told_over

# What is compiled or searched for takes its time, in every process.
WITHOUT = frozenset({"auto", "compiled"})
FORMS = {"program", "name", "file", "function", "auto"}


@pytest.mark.parametrize("seed", range(13, 33))
def test_a_script_in_one_process(seed: int) -> None:
    assert not told_of(draw_case(seed, WITHOUT))


@pytest.mark.parametrize(
    "grid", [Grid(ranks=2), Grid(ranks=3), Grid(ranks=2, wrapper="ddp")], ids=str
)
def test_scripts_over_processes(grid: Grid) -> None:
    seeds = range(100, 102)
    told = told_over(grid, seeds, WITHOUT)
    assert not any(told), dict(zip(seeds, told, strict=True))


def cases(num: int, *without: str) -> list[Case]:
    return [draw_case(seed, frozenset(without)) for seed in range(num)]


def test_a_seed_gives_one_script() -> None:
    assert cases(20) == cases(20)
    assert len(set(cases(20))) == 20


def test_all_features_come_up_and_can_be_switched_off() -> None:
    drawn = cases(200)
    moves = [type(move) for case in drawn for move in case.moves]
    assert {Evaluate, Fail, Freeze, Reload, Resume, Step} == set(moves)
    assert {case.recipe.way for case in drawn} == {"layers", "by module", "captured", "pieces"}
    assert {case.plan.kept for case in drawn} == {"", "recompute", "offload"}
    assert {case.plan.given for case in drawn} == FORMS
    assert {case.plan.beside is None for case in drawn} == {True, False}
    habits = [case.habits for case in drawn]
    assert {each.optimizer for each in habits} == set(OPTIMIZERS)
    assert {each.rates for each in habits} == {"", *RATES}
    assert {(each.scaled, each.in_backward) for each in habits} == {
        (False, False),
        (True, False),
        (False, True),
    }
    assert {case.tolerance is None for case in drawn} == {True, False}
    plain = cases(200, *FEATURES)
    assert {case.recipe.way for case in plain} == {"layers"}
    assert not any(case.hooks or case.plan.kept or case.recipe.frozen for case in plain)
    assert {case.habits.optimizer for case in plain} <= {"sgd", "adamw"}
    assert not any(case.habits.rates or case.plan.beside for case in plain)
    assert {type(move) for case in plain for move in case.moves} == {Step}


@pytest.mark.parametrize("spoiled", ["loss", "gradient", "buffer"])
def test_differences_are_named(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one bit in the last place, or by a term that is not there."""
    case = draw_case(0, WITHOUT)
    step = Step(rows=4, length=4, seed=0, update=False, zero="")
    recipe = Recipe(seed=0, way="layers", units=("batch norm", "linear", "plain"))
    plan = replace(case.plan, schedule="1f1b", ranks=3, virtual=1, microbatches=2, kept="")
    plan = replace(plan, order=None, merged=False, split=(1, 1, 1), given="program")
    script = replace(
        case, recipe=recipe, plan=plan, hooks=(), habits=Habits(), moves=(step,),
        microbatch_rng=False, metrics=False,
    )  # fmt: skip
    assert told_of(script) == ""
    whole = piped.Piped.train

    def train(self: Any, *args: Any) -> dict[str, Tensor]:
        found = dict(whole(self, *args))
        if spoiled == "loss":
            found["loss 1"] = found["loss 1"].nextafter(found["loss 1"] + 1)
        elif spoiled == "gradient":
            next(iter(self.pipe.parameters())).grad = None
        else:
            dict(self.pipe.named_buffers())["0.2.num_batches_tracked"] += 1
        return found

    monkeypatch.setattr(piped.Piped, "train", train)
    assert {"loss": "loss 1", "gradient": "gradient of 0.0", "buffer": "batches"}[
        spoiled
    ] in told_of(script)
