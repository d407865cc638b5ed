"""Plans: kept in files, and held against a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock import PartitionError
from penstock.partition.plan import Plan

PLAN = Plan(
    stages=(("embed", "layers.0"), ("layers.1", "head")),
    model="Tiny",
    made='balance, "max"',
)


class Tiny(nn.Module):
    """Embedding, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.act = nn.ReLU()
        self.head = nn.Linear(2, 4)


# --- files -------------------------------------------------------------------------------------


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(str(path)) == PLAN
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as some editors save
    assert Plan.load(path) == PLAN


def test_the_form_of_the_file(tmp_path: Path) -> None:
    plan = Plan(stages=(("embed", "layers.0"), ("layers.1", "head")), model="Tiny", made="by hand")
    plan.save(tmp_path / "plan.toml")
    assert (tmp_path / "plan.toml").read_text().splitlines() == [
        "penstock_plan = 1",
        'model = "Tiny"',
        'made = "by hand"',
        "",
        "[[stage]]",
        "modules = [",
        '    "embed",',
        '    "layers.0",',
        "]",
        "",
        "[[stage]]",
        "modules = [",
        '    "layers.1",',
        '    "head",',
        "]",
    ]


def test_a_plan_by_hand_needs_names_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[stage]]\nmodules = ["a"]\n[[stage]]\nmodules = ["b"]')
    assert Plan.load(path) == Plan(stages=(("a",), ("b",)))


names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans") / "plan.toml"


@given(data=st.data())
def test_any_plan_comes_back(path: Path, data: st.DataObject) -> None:
    flat = data.draw(st.lists(names, min_size=1, max_size=8, unique=True))
    cut = data.draw(st.integers(0, len(flat) - 1))
    stages = tuple(part for part in (tuple(flat[:cut]), tuple(flat[cut:])) if part)
    plan = Plan(stages=stages, model=data.draw(names), made=data.draw(st.text(max_size=8)))
    plan.save(path)
    assert Plan.load(path) == plan


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"penstock_plan": 2}, "format 2"),
        ({"stages": []}, r"unknown keys \['stages'\]"),
        ({"stage": "a"}, "stage of the plan is 'a', expected a list"),
        ({"stage": ["a"]}, "stage 0 of the plan is 'a', expected a table"),
        ({"stage": [{"modules": "a"}]}, "modules of stage 0 of the plan is 'a'"),
        ({"stage": [{"modules": ["a"], "time": 1}]}, r"stage 0 .* unknown keys \['time'\]"),
        ({"stage": []}, "no stages"),
        ({"penstock_plan": True}, "penstock_plan of the plan is True"),
        ({"model": 3}, "model of the plan is 3, expected a str"),
        ({"made": ["a"]}, r"made of the plan is \['a'\], expected a str"),
        ({"stage": {"modules": ["a"]}}, "stage of the plan is .*, expected a list"),
        ({"stage": [{}]}, "stage 0 of the plan is empty; name its modules"),
        ({"stage": [{"modules": ["a", 1]}]}, "modules of stage 0 .* expected names"),
    ],
)
def test_values_that_are_no_plan(change: dict[str, Any], told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        Plan.from_dict(PLAN.to_dict() | change)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("plan.toml", "stage = [", "plan.toml: not TOML"),
        ("plan.toml", "a = " + "[" * 100_000, "plan.toml: not TOML"),
        ("plan.toml", "[[stage]]", r"^[^ ]*plan\.toml: stage 0 of the plan is empty"),
        ("plan.json", "{}", r"^[^ ]*plan\.json: a plan is a \.toml file"),
        ("plan.toml", None, "plan.toml: no such plan"),
    ],
)
def test_files_that_are_no_plan(name: str, text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PartitionError, match=told):
        Plan.load(tmp_path / name)


def test_a_file_of_another_kind_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match=r"a \.toml file"):
        PLAN.save(tmp_path / "plan.txt")
    assert not list(tmp_path.iterdir())


# --- what a plan may say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ((), "no stages"),
        ((("a",), ()), "stage 1 of the plan is empty"),
        ((("a",), ("b", "a")), "a in stage 0 and again in stage 1"),
        ((("a.b",), ("a",)), r"a\.b \(stage 0\) and a \(stage 1\), which holds it"),
    ],
)
def test_plans_that_contradict_themselves(stages: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        Plan(stages=stages)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("embed", 0), ("layers.0.weight", 0), ("layers.1", 1), ("layers.10", None), ("layers", None)],
)
def test_the_stage_of_a_name(name: str, stage: int | None) -> None:
    assert PLAN.stage_of(name) == stage


# --- against a model ---------------------------------------------------------------------------


def test_a_plan_fits_its_model() -> None:
    PLAN.check(Tiny())
    PLAN.check(Tiny().to("meta"))


def test_a_plan_for_another_model_names_the_differences() -> None:
    model = Tiny()
    model.layers.append(nn.Linear(2, 2))
    plan = Plan(stages=(("embed", "layers.0"), ("layers.1", "layers.7", "head")), model="Other")
    with pytest.raises(PartitionError) as raised:
        plan.check(model)
    assert str(raised.value) == (
        "the plan, made for a Other, does not fit this Tiny: it names layers.7, which the model "
        "lacks; no stage holds the parameters layers.2.weight, layers.2.bias; make it anew with "
        "`penstock split`, or correct its names"
    )


def test_many_names_are_counted() -> None:
    model = Tiny()
    model.layers.extend(nn.Linear(2, 2) for _ in range(9))
    with pytest.raises(PartitionError, match=r"layers\.4\.bias and 12 more"):
        PLAN.check(model)


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    model = Tiny()
    model.head.weight = model.embed.weight
    model.head.bias = None
    Plan(stages=(("embed", "layers.0"), ("layers.1",))).check(model)


def test_a_parameter_outside_the_modules_is_named_itself() -> None:
    model = Tiny()
    model.register_parameter("scale", nn.Parameter(model.head.bias.detach()))
    with pytest.raises(PartitionError, match="no stage holds the parameters scale"):
        PLAN.check(model)
    Plan(stages=(PLAN.stages[0], (*PLAN.stages[1], "scale"))).check(model)
