"""Which way a model is cut, and from which words."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, Pipeline, ScheduleError, StageError
from penstock.partition.plan import Plan
from penstock.partition.ties import find_ties
from tests.compare import Tolerance, assert_same, plain_step, snapshot
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
    HALVES.save(tmp_path / "plan.toml")
    assert sizes(agrees(NetBase(), split=str(tmp_path / "plan.toml"))) == [2, 4]
    assert sizes(agrees(NetBase(), split=tmp_path / "plan.toml")) == [2, 4]
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


def test_an_example_may_be_the_one_argument() -> None:
    for split in ([2, 2], "auto"):
        assert sum(sizes(agrees(NetBase(), split=split, example=X[:3], ranks=2))) == 6


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
        "NetBase: cut by module into 2 stages; every stage runs the model's own forward"
    )


class Shared(NetBase):
    """Two blocks in turn, each of which stands twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = type(self).listed(*self.blocks[:2], *self.blocks[:2])

    listed: Any = staticmethod(lambda *blocks: nn.ModuleList(blocks))


class SharedRow(Shared):
    listed = nn.Sequential


@pytest.mark.parametrize("model_type", [Shared, SharedRow])
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 4},
        {"ranks": 2, "schedule": "zbv"},
        {"split": ["blocks.1"]},
        {"split": [3, 1]},
        {"split": [["embed", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]},
        {"ranks": 2, "split": "auto"},
    ],
)
def test_a_layer_in_several_places_of_a_list(model_type: Any, options: Any) -> None:
    """Each place goes to its stage; the gradients of all are the one layer's."""
    plain = copy.deepcopy(model := model_type())
    pipe = Pipeline(model, loss_fn=square, example=(X[:3],), n_microbatches=2, **options)
    loss = pipe.step(X)
    assert torch.equal(loss, plain_step(plain, square, X, n_microbatches=2).loss)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=Tolerance(relative=1e-5))
    assert list(pipe.state_dict()) == list(plain.state_dict())
    if "schedule" not in options and options.get("split") != "auto":
        assert len(find_ties([stage.submod for stage in pipe.stages])) >= 2


def test_a_layer_in_several_places_that_counts_its_calls_is_refused() -> None:
    norm = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    (model := NetBase()).blocks = nn.ModuleList([norm] * 4)
    with pytest.raises(PartitionError, match=r"is one module within several, in the stages"):
        Pipeline(model, loss_fn=square, example=(X[:3],), n_microbatches=2, split=[2, 2])


class Again(NetBase):
    """Runs its first block again at the end: by module that can't be cut in two."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def test_models_not_cut_by_module_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    plain = copy.deepcopy(model := Again())
    with caplog.at_level(logging.INFO, "penstock"):
        pipe = Pipeline(model, loss_fn=square, ranks=2, example=(X[:3],), n_microbatches=2)
    (warned,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    told = warned.getMessage()
    assert told.startswith("Again: cut by torch.export, since it can't be cut by module: ")
    assert "The stages run a fixed graph" in told and "method='export' accepts this" in told
    loss = pipe.step(X)
    assert torch.equal(loss, plain_step(plain, square, X, n_microbatches=2).loss)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_the_method_may_be_named(caplog: pytest.LogCaptureFixture) -> None:
    options: Any = {"loss_fn": square, "ranks": 2, "example": (X[:3],), "n_microbatches": 2}
    with pytest.raises(PartitionError, match="keep all calls of a module in one stage") as raised:
        Pipeline(Again(), method="module", **options)
    assert "torch.export" not in str(raised.value)
    for model in (Again(), NetBase()):
        plain = copy.deepcopy(model)
        pipe = Pipeline(model, method="export", **options)
        assert torch.equal(pipe.step(X), plain_step(plain, square, X, n_microbatches=2).loss)
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]
    with pytest.raises(PartitionError, match="method='export' needs example="):
        Pipeline(NetBase(), method="export", ranks=2)
    with pytest.raises(PartitionError, match="method='fx': expected 'module', 'export' or None"):
        Pipeline(NetBase(), method="fx", ranks=2)  # type: ignore[arg-type]


class Backwards(NetBase):
    """Runs its blocks from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class BackwardsAgain(NetBase):
    """Runs its blocks from the last to the first, and the last one once more."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*reversed(self.blocks), self.blocks[3]):
            x = block(x)
        return self.head(x)


def test_blocks_are_counted_in_the_order_of_their_calls() -> None:
    pipe = agrees(Backwards(), split=[3, 1], example=(X[:3],))
    held = {name.rpartition(".")[0] for name, _ in pipe.stages[0].submod.named_parameters()}
    assert held == {"embed", "blocks.3.0", "blocks.2.0", "blocks.1.0"}


class SharedAgain(Again, Shared):
    """Calls more of its blocks than stand in its list."""


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        (BackwardsAgain, r"blocks\.0 is named in stage 0, but runs in stage 1 of the captured"),
        (SharedAgain, r"blocks\.[12] is named in stage \d, but runs in stage \d of the captured"),
    ],
)
def test_counts_of_blocks_that_a_capture_runs_in_another_order(
    model_type: type[NetBase], told: str
) -> None:
    with pytest.raises(PartitionError, match=told):
        Pipeline(model_type(), loss_fn=square, split=[3, 1], example=(X[:3],), n_microbatches=2)


@pytest.mark.parametrize(
    "later",
    [
        ["head", "blocks.3", "blocks.2", "blocks.1"],
        ["head", "blocks.1", "blocks.2.0", "blocks.3"],
    ],
)
def test_a_captured_stage_begins_with_the_first_operations(later: list[str]) -> None:
    plain = copy.deepcopy(model := Again())
    split = [["embed", "blocks.0"], later]
    pipe = Pipeline(model, loss_fn=square, split=split, example=(X[:3],), n_microbatches=2)
    held = [dict(stage.submod.named_parameters()) for stage in pipe.stages]
    assert set(held[0]) == {f"{n}.{p}" for n in ("embed", "blocks.0.0") for p in ("weight", "bias")}
    assert {"head.weight", "blocks.1.0.weight", "blocks.3.0.bias"} < set(held[1])
    loss = pipe.step(X)
    assert torch.equal(loss, plain_step(plain, square, X, n_microbatches=2).loss)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (
            [["embed", "blocks.0", "blocks.2"], ["blocks.1", "blocks.3", "head"]],
            r"blocks\.2 is named in stage 0, but runs in stage 1 of the captured graph",
        ),
        (
            [["embed", "blocks.1", "blocks.2"], ["blocks.0", "blocks.3", "head"]],
            r"blocks\.1 is named in stage 0, but runs in stage 1 of the captured graph",
        ),
        ([["embed", "blocks.0"], ["blocks.1", "blocks.2", "head"]], r"parameters blocks\.3"),
    ],
)
def test_names_that_a_captured_stage_does_not_hold(split: Any, told: str) -> None:
    """They were taken for the stage's first name alone, without a word."""
    with pytest.raises(PartitionError, match=told):
        Pipeline(Again(), loss_fn=square, split=split, example=(X[:3],), n_microbatches=2)


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
    with pytest.raises(StageError, match=r"there is no loss: pass loss_fn= to Pipeline; .*"):
        pipe.step(X)
    assert pipe.eval(X).shape == (len(X), DIM)


def test_models_that_neither_method_cuts_name_both_errors() -> None:
    class Worse(Again):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    told = r"needs the value of input argument 0.*nor by torch\.export: .*with torch\.where$"
    with pytest.raises(PartitionError, match=told):
        Pipeline(Worse(), ranks=2, example=(X[:3],), n_microbatches=2)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"split": "best", "ranks": 2}, PartitionError, "expected 'auto', a plan or its file"),
        ({"split": "none.toml"}, PartitionError, "no such plan"),
        ({"split": 3}, PartitionError, "split=3: expected 'auto', a plan or its file"),
        ({"split": []}, PartitionError, r"split=\[\]: expected 'auto', a plan or its file"),
        (
            {"split": ["blocks.1.0.weight"], "example": (X,)},
            PartitionError,
            r"begin with blocks\.1\.0\.weight, but the model does not call these",
        ),
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
def test_values_that_do_not_fit(options: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        Pipeline(NetBase(), loss_fn=square, n_microbatches=2, **options)


def test_a_model_without_repeated_blocks_is_pointed_to_auto() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.out(self.embed(ids))
            return out

    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(PartitionError, match=r"has 1 stages, .*; split='auto' measures"):
        Pipeline(Odd(), example=(ids,), ranks=2, loss_fn=torch.sum, n_microbatches=1)
    pipe = Pipeline(Odd(), example=(ids,), ranks=2, loss_fn=None, n_microbatches=1, split="auto")
    assert [len([*s.submod.parameters()]) for s in pipe.stages] == [1, 2]


class DrawsNumbers(nn.Module):
    """Its forward can't be cut: each stage would draw numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * (1 + random.random() * 0)
        return out


def test_one_stage_need_not_be_cut() -> None:
    agrees(DrawsNumbers(), ranks=1, example=X[:2])
