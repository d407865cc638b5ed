"""Which way a model is cut, and from which words."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, Pipeline, ScheduleError, StageError
from penstock.partition.plan import Plan
from penstock.testing.compare import assert_same, plain_step, snapshot
from tests.partition.odd_models import DIM, NetBase

X = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))
HALVES = Plan(stages=(("embed", "blocks.0"), ("blocks.1", "blocks.2", "blocks.3", "head")))


def square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def agrees(model: nn.Module, **options: Any) -> Pipeline:
    """A pipeline of the model, after a step like the plain model's."""
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn=square, n_microbatches=2, **options)
    loss = pipe.step(X, target=X)
    assert torch.equal(loss, plain_step(plain, square, X, n_microbatches=2).loss)
    assert_same(snapshot(pipe), snapshot(plain))
    return pipe


def sizes(pipe: Pipeline) -> list[int]:
    return [len(list(stage.submod.parameters())) // 2 for stage in pipe.stages]


def test_a_plan_and_its_file(tmp_path: Path) -> None:
    for name in ("plan.toml", "plan.json"):
        HALVES.save(tmp_path / name)
        assert sizes(agrees(NetBase(), split=str(tmp_path / name))) == [2, 4]
    assert sizes(agrees(NetBase(), split=HALVES)) == [2, 4]
    row = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    assert sizes(agrees(row, split=Plan(stages=(("0", "1"), ("2",))))) == [2, 1]


@pytest.mark.parametrize(
    ("split", "stages"),
    [(["blocks.2"], [3, 3]), ([3, 1], [4, 2]), (None, [3, 3]), (HALVES.stages, [2, 4])],
)
def test_names_and_counts(split: Any, stages: list[int]) -> None:
    ranks = None if split else 2
    assert sizes(agrees(NetBase(), split=split, ranks=ranks)) == stages


def test_balanced_by_a_measurement() -> None:
    assert sum(sizes(agrees(NetBase(), split="auto", example=(X[:3],), ranks=3))) == 6
    row = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    assert sum(sizes(agrees(row, split="auto", example=(X[:3],), ranks=2))) == 4


def test_the_way_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line: which, and why."""
    with caplog.at_level(logging.INFO, "penstock"):
        agrees(NetBase(), ranks=2)
    (line,) = caplog.messages
    assert line == (
        "NetBase: cut by module into 2 stages, since it has 4 repeated blocks; every stage runs "
        "the model's own forward"
    )


class Again(NetBase):
    """Runs its first block again at the end: by module that can't be cut in two."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def test_what_is_not_by_module_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    plain = copy.deepcopy(model := Again())
    with caplog.at_level(logging.INFO, "penstock"):
        pipe = Pipeline(model, loss_fn=square, ranks=2, example=(X[:3],), n_microbatches=2)
    assert any(
        line.startswith("Again: captured as a graph and cut into 2 stages, since not by module: b")
        for line in caplog.messages
    )
    loss = pipe.step(X)
    assert torch.equal(loss, plain_step(plain, square, X, n_microbatches=2).loss)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


class AgainScored(Again):
    """Computes its loss itself, among what it returns."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return {"loss": y.square().mean(), "out": y}


def test_a_captured_model_trains_on_its_own_loss() -> None:
    plain = copy.deepcopy(model := AgainScored())
    pipe = Pipeline(model, ranks=2, example=(X[:3],), n_microbatches=2)
    loss = pipe.step(X)
    assert loss is not None
    expected = plain_step(plain, lambda output: output["loss"], X, n_microbatches=2)
    assert torch.equal(loss, expected.loss)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("model_type", [NetBase, Again])
def test_a_step_without_any_loss_is_refused(model_type: type[NetBase]) -> None:
    """It would train nothing, and nobody would notice."""
    pipe = Pipeline(model_type(), ranks=2, example=(X[:3],), n_microbatches=2)
    with pytest.raises(StageError, match=r"nothing says on what: pass loss_fn= to Pipeline; .*"):
        pipe.step(X)
    assert pipe.eval(X).shape == (len(X), DIM)


def test_what_is_neither_says_both() -> None:
    class Worse(Again):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if x.sum() > 0 else -x

    with pytest.raises(
        PartitionError, match=r"needs the value of output 0 of head.*nor can it be capt"
    ):
        Pipeline(Worse(), ranks=2, example=(X[:3],), n_microbatches=2)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"split": "best", "ranks": 2}, PartitionError, "expected 'auto', a plan or its file"),
        ({"split": "none.toml"}, PartitionError, "no such plan"),
        ({"split": "auto", "ranks": 2}, PartitionError, "pass example="),
        ({"split": "auto", "example": (X,)}, ScheduleError, "pass ranks="),
        ({"split": HALVES, "ranks": 3}, ScheduleError, "2 stages, but 1f1b on 3 ranks"),
        ({"split": ["blocks.1"], "ranks": 1, "virtual": 1}, ScheduleError, "2 stages, but"),
        (
            {"split": Plan(stages=(("embed", "blocks"), ("top",)), model="Other")},
            PartitionError,
            r"made for a Other, does not fit this NetBase: it names top.*head\.weight",
        ),
        ({"ranks": 6}, PartitionError, "4 layers can't make 6 stages"),
    ],
)
def test_what_does_not_fit(options: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        Pipeline(NetBase(), loss_fn=square, n_microbatches=2, **options)
