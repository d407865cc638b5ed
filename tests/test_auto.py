"""A program found for the stages as they are measured: it trains as one device does."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from penstock import PartitionError, Pipeline, PipelineStage, ScheduleError, auto, check
from penstock.partition.balance.for_program import stage_costs
from penstock.partition.profile import profile
from penstock.runtime.comm.process_group import Link, measure_link
from penstock.schedule.action import Action, Op
from tests.agreement import Twins
from tests.compare import plain_step
from tests.models import DIM, features, mlp
from tests.processes import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SEARCH_S", 1.0)


def layers(num: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Tanh()) for _ in range(num)
    ]
    return nn.Sequential(OrderedDict((f"block{i}", block) for i, block in enumerate(blocks)))


class Tower(nn.Module):
    """A model that is no sequence: blocks in a list, called by its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


EVEN_TIMES: dict[str, Any] = {"forward": 1e-3, "input_grad": 1e-3, "weight_grad": 1e-3}
RELEASES = (Op.WEIGHT_GRAD, Op.FULL_BACKWARD)
EXAMPLE = (torch.ones(3, DIM),)


@pytest.mark.parametrize(
    ("ranks", "virtual", "split"),
    [(2, None, None), (3, 2, None), (2, None, "auto"), (4, None, None)],
)
def test_gradients_are_those_of_one_device(ranks: int, virtual: int | None, split: Any) -> None:
    both = Twins(
        layers(),
        F.mse_loss,
        schedule="auto",
        example=EXAMPLE,
        ranks=ranks,
        virtual=virtual,
        split=split,
        n_microbatches=4,
    )
    for number in range(2):
        inputs, target = features(12, number)
        both.step(inputs, target=target)
        both.descend()
    check(both.pipe.program)
    assert both.pipe.program.num_stages == ranks * (virtual or 1)


def test_a_model_that_is_no_sequence() -> None:
    torch.manual_seed(0)
    model = Tower()
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, loss_fn=F.mse_loss, schedule="auto", example=EXAMPLE, ranks=2, n_microbatches=4
    )
    inputs, target = features(12, 0)
    pipe.step(inputs, target=target)
    for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True):
        (F.mse_loss(plain(x), y) / 4).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in pipe.named_parameters():
        torch.testing.assert_close(param.grad, expected[name])


@pytest.mark.parametrize("options", [{"schedule": "auto"}, {"split": "auto"}])
def test_stages_made_by_hand_are_refused(options: dict[str, Any]) -> None:
    stages = [PipelineStage(m, i, 3, CPU) for i, m in enumerate(mlp(3))]
    with pytest.raises(PartitionError, match=r"measures a model or a list of layers, not Pipeline"):
        Pipeline(stages, loss_fn=F.mse_loss, example=EXAMPLE, ranks=3, **options)


def test_sizes_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_measure", None)
    with pytest.raises(ScheduleError, match=r"microbatches=0 must be a whole number from 1 on"):
        Pipeline(layers(), schedule="auto", example=EXAMPLE, ranks=2, n_microbatches=0)


class Pair(nn.Linear):
    """A layer that returns two values, or takes them as one."""

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return super().forward(value), value
        first, second = value
        return super().forward(first + second)


def test_layers_of_a_list_are_measured_as_they_run() -> None:
    """A layer that returns a tuple passes it on as one value, as the stages do."""
    pipe = Pipeline(
        [Pair(DIM, DIM), Pair(DIM, DIM)],
        loss_fn=F.mse_loss, schedule="auto", example=EXAMPLE, n_microbatches=2,
    )  # fmt: skip
    inputs, target = features(6, 0)
    assert pipe.step(inputs, target=target) > 0


def test_measuring_leaves_no_trace() -> None:
    model = layers()
    inputs, target = features(6, 0)
    F.mse_loss(model(inputs), target).backward()
    before = copy.deepcopy(model.state_dict())
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    torch.manual_seed(7)
    random.seed(7)
    Pipeline(model, loss_fn=F.mse_loss, schedule="auto", example=EXAMPLE, ranks=2)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1] == random.random()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    kept = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(kept) == len(grads) > 0
    assert all(map(torch.equal, kept, grads))


def test_the_memory_limit_is_kept() -> None:
    stages = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)]
    # What the loss keeps counts with the last stage.
    loss_fn = lambda output: F.mse_loss(output, torch.zeros_like(output))  # noqa: E731
    blocks = profile(stages, EXAMPLE, loss_fn=loss_fn).blocks
    least = max(block.activation_bytes for block in blocks)
    assert least == blocks[1].activation_bytes
    options: dict[str, Any] = {"example": EXAMPLE, "ranks": 2, "n_microbatches": 8}
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule="auto", memory_limit=least, **options)
    held = [act.op for act in pipe.program.ranks[1] if isinstance(act, Action)]
    # One microbatch at a time on the rank that has room for one.
    changes = [op is Op.FORWARD for op in held if op in (Op.FORWARD, *RELEASES)]
    assert changes == [True, False] * 8
    with pytest.raises(ScheduleError, match=f"no program meets memory_limit={least - 1}") as caught:
        Pipeline(stages, loss_fn=F.mse_loss, schedule="auto", memory_limit=least - 1, **options)
    # It recomputes by itself where that helps: there is nothing to pass.
    assert "recompute=" not in str(caught.value) and "offload=" not in str(caught.value)


def test_a_tight_limit_is_met_by_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep stages with narrow boundaries: two in flight fit where one keeps its input alone."""
    # As they would be measured where nothing else runs.
    monkeypatch.setattr(
        auto, "stage_costs", lambda stages: replace(stage_costs(stages), **EVEN_TIMES)
    )
    stages = [mlp(8) for _ in range(2)]
    plain = copy.deepcopy(stages)
    blocks = profile(stages, EXAMPLE, loss_fn=None).blocks
    limit = 1.5 * max(block.activation_bytes for block in blocks)
    options: dict[str, Any] = {"example": EXAMPLE, "ranks": 2, "n_microbatches": 8}
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule="auto", memory_limit=limit, **options)
    assert any(act.op is Op.RECOMPUTE for act in pipe.program.actions())
    inputs, target = features(16, 0)
    loss = pipe.step(inputs, target=target)
    expected = plain_step(
        nn.Sequential(*plain), F.mse_loss, inputs, target=target, n_microbatches=8
    )
    assert loss is not None and torch.equal(loss, expected.loss)
    for ours, theirs in zip(stages, plain, strict=True):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_the_predicted_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock.auto"):
        Pipeline(
            layers(),
            loss_fn=F.mse_loss,
            schedule="auto",
            example=EXAMPLE,
            ranks=2,
            n_microbatches=2,
        )
    (told,) = [record.getMessage() for record in caplog.records]
    assert "predicted, at least" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2}, "pass example="),
        ({"example": EXAMPLE}, "pass ranks="),
        ({"example": EXAMPLE, "ranks": 2, "split": [2, 4]}, "leave split= out"),
        (
            {"example": EXAMPLE, "ranks": 2, "schedule": "1f1b", "memory_limit": 5},
            "is for schedule",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((PartitionError, ScheduleError), match=message):
        Pipeline(layers(), loss_fn=F.mse_loss, **{"schedule": "auto", **options})


def train(rank: int, num_ranks: int) -> str:
    """One rank: train as one device does; returns the program that it runs."""
    auto.SEARCH_S = 1.0  # this process's own
    both = Twins(layers(), F.mse_loss, schedule="auto", example=EXAMPLE, n_microbatches=4)
    assert both.pipe.is_distributed
    inputs, target = features(12, 0)
    both.step(inputs, target=target)
    return " | ".join(" ".join(map(str, steps)) for steps in both.pipe.program.ranks)


def test_all_processes_run_the_program_of_the_first() -> None:
    programs = [outcome.result() for outcome in run_ranks(train, 2)]
    assert programs[0] == programs[1]


def measure(rank: int, num_ranks: int) -> list[float]:
    """What one rank measures of the link, and what it predicts where that is slow."""
    auto.SEARCH_S = 1.0  # this process's own
    link = measure_link(torch.distributed.group.WORLD, CPU)
    auto.measure_link = lambda *_: Link(latency_s=1.0, bandwidth=link.bandwidth)
    options = {"schedule": "auto", "example": EXAMPLE, "n_microbatches": 4}
    pipe = Pipeline(layers(), loss_fn=F.mse_loss, **options)
    return [link.latency_s, link.bandwidth, pipe._forecast.step_s]


def test_messages_between_processes_count() -> None:
    here, there = (outcome.result() for outcome in run_ranks(measure, 2))
    assert here == there
    latency_s, bandwidth, step_s = here
    assert 0 < latency_s < 1.0
    assert 1e6 < bandwidth < 1e12
    assert step_s >= 2.0  # to the other stage and back


# --- one measurement for all --------------------------------------------------------------------


CALLS: list[float] = []  # when a slow layer of this process was called


class Slow(nn.Linear):
    """A layer that takes a while."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(DIM, DIM)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(time.monotonic())
        time.sleep(self.pause_s)
        return super().forward(x)


def cut_in_rows(rank: int, num_ranks: int, schedule: str) -> tuple[list[str], str]:
    """One rank of two pipelines over equal models, in each of which other layers are slow."""
    auto.SEARCH_S = 0.5  # this process's own
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    is_first = mesh["replica"].get_local_rank() == 0
    slow = (0, 1) if is_first else (4, 5)
    model = nn.Sequential(*(Slow(0.01 if i in slow else 0.0) for i in range(6)))
    group = mesh["pipeline"].get_group()
    for _ in range(2):  # the second is measured anew
        pipe = Pipeline(
            model,
            loss_fn=F.mse_loss,
            schedule=schedule,
            split="auto",
            example=EXAMPLE,
            n_microbatches=4,
            group=group,
        )
    return [name for name, _ in pipe.named_parameters()], str(pipe.program.ranks)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_replicas_are_cut_alike(schedule: str) -> None:
    outcomes = [outcome.result() for outcome in run_ranks(cut_in_rows, 4, schedule)]
    assert outcomes[:2] == outcomes[2:]
    assert outcomes[0][0] != outcomes[1][0]


def measured_when(rank: int, num_ranks: int) -> tuple[float, float]:
    """The first and the last call of a layer while it is measured."""
    model = nn.Sequential(*(Slow(0.01) for _ in range(2)))
    Pipeline(model, loss_fn=F.mse_loss, split="auto", example=EXAMPLE, n_microbatches=2)
    return min(CALLS), max(CALLS)


def test_all_ranks_measure_at_once() -> None:
    (here, end), (there, other_end) = (o.result() for o in run_ranks(measured_when, 2))
    shared_s = min(end, other_end) - max(here, there)
    assert shared_s > 0.8 * (end - here)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_the_forecast_counts_runtime_and_optimizer(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    options: dict[str, Any] = {"example": EXAMPLE, "split": "auto", "schedule": schedule}
    pipe = Pipeline(model, loss_fn=F.mse_loss, ranks=2, n_microbatches=4, **options)
    assert pipe.forecast is not None
    assert 0 < pipe.forecast.optimizer_s < pipe.forecast.step_s < 1.0
    monkeypatch.setattr(auto, "_runtime_s", lambda spec: 1.0)
    monkeypatch.setattr(auto, "_update_s", lambda device: 1.0)
    pipe = Pipeline(model, loss_fn=F.mse_loss, ranks=2, n_microbatches=4, **options)
    assert pipe.forecast is not None
    num_bytes = sum(param.nbytes for param in model.parameters())
    assert pipe.forecast.optimizer_s == num_bytes
    # Of one process: two stages, four microbatches, a forward and a backward.
    assert 16.0 < pipe.forecast.step_s < 17.0
    assert sum(pipe.forecast.peak_bytes) > 4 * num_bytes
    assert Pipeline(model, loss_fn=F.mse_loss, ranks=2).forecast is None


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_frozen_parameters_take_no_gradient_and_no_update(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_update_s", lambda device: 1.0)
    model = layers()
    model.block2.append(nn.Sequential(nn.Linear(DIM, 1 << 16), nn.Linear(1 << 16, DIM)))
    model.block2[-1].requires_grad_(False)
    pipe = Pipeline(
        model,
        loss_fn=F.mse_loss,
        ranks=2,
        n_microbatches=4,
        example=EXAMPLE,
        split="auto",
        schedule=schedule,
    )
    frozen = sum(param.nbytes for param in model.block2[-1].parameters())
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert pipe.forecast is not None
    assert pipe.forecast.optimizer_s == trained
    assert frozen < sum(pipe.forecast.peak_bytes) < 3 * frozen
