"""Several schedules over the same stages: none disturbs another, made or run at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from penstock import PipelineStage, ScheduleProgram, build, draw_step_seed, microbatch_rng
from tests.compare import assert_same, plain_step, snapshot
from tests.models import DIM, features, mlp, token_loss
from tests.sequences import causal, compare_steps, token_batch

CPU = torch.device("cpu")
MICROBATCHES = 4


def stages_of(modules: list[nn.Module]) -> list[PipelineStage]:
    return [PipelineStage(module, i, len(modules), CPU) for i, module in enumerate(modules)]


def made(name: str, stages: list[PipelineStage], loss_fn: Any, **options: Any) -> ScheduleProgram:
    program = build(name, ranks=1, microbatches=MICROBATCHES, virtual=len(stages))
    return ScheduleProgram(stages, program, loss_fn, **options)


def dropping() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)]


def test_an_evaluation_schedule_beside_one_with_microbatch_rng() -> None:
    modules = dropping()
    plain = nn.Sequential(*copy.deepcopy(modules))
    stages = stages_of(modules)
    training = made("looped-bfs", stages, mse_loss, microbatch_rng=True)
    evaluation = made("looped-bfs", stages, mse_loss)
    for step in range(2):
        inputs, target = features(MICROBATCHES, step)
        torch.manual_seed(step)
        seed = draw_step_seed()
        for mb in range(MICROBATCHES):
            with microbatch_rng(seed, mb):
                output = plain(inputs[mb : mb + 1])
            loss = mse_loss(output, target[mb : mb + 1])
            torch.autograd.backward(loss / MICROBATCHES)
        torch.manual_seed(step)
        training.step(inputs, target=target)
        evaluation.eval(inputs)
        assert_same(snapshot(nn.Sequential(*modules)), snapshot(plain))


def test_an_evaluation_schedule_beside_one_that_splits_sequences() -> None:
    """The other one splits sequences otherwise, and the one of the first goes on."""
    modules = list(causal(4))
    halves = build("seq1f1b", ranks=1, microbatches=2, splits=2)
    thirds = build("seq1f1b", ranks=1, microbatches=2, splits=3)
    whole = penstock.Pipeline(nn.Sequential(*modules), loss_fn=token_loss, schedule=halves)
    stages = list(whole.stages)
    training = ScheduleProgram(stages, halves, token_loss)
    evaluation = ScheduleProgram(stages, thirds, token_loss)
    inputs, target = token_batch(2, 6, 0)
    training.step(inputs, target=target)
    alone = [param.grad.clone() for param in whole.parameters() if param.grad is not None]
    output = evaluation.eval(inputs)
    torch.testing.assert_close(output, training.eval(inputs))
    whole.zero_grad()
    training.step(inputs, target=target)
    evaluation.eval(inputs)
    again = [param.grad for param in whole.parameters() if param.grad is not None]
    assert alone
    torch.testing.assert_close(again, alone, rtol=0, atol=0)
    compare_steps(causal(4), halves, length=6)


@pytest.mark.parametrize("second", ["looped-bfs", "interleaved-zb"])
def test_two_schedules_in_turn(second: str) -> None:
    """Made of other families and numbers of microbatches, with other losses."""
    modules = list(mlp(2))
    plain = nn.Sequential(*copy.deepcopy(modules))
    stages = stages_of(modules)

    def half(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target) / 2

    losses: list[Callable[..., Any]] = [mse_loss, half]
    programs = [
        build("interleaved-1f1b", ranks=1, microbatches=4, virtual=2),
        build(second, ranks=1, microbatches=2, virtual=2),
    ]
    schedules = [
        ScheduleProgram(stages, program, loss_fn)
        for program, loss_fn in zip(programs, losses, strict=True)
    ]
    for step in range(4):
        inputs, target = features(4 if step % 2 == 0 else 6, step)
        which = step % 2
        num = programs[which].num_microbatches
        plain_step(plain, losses[which], inputs, target=target, n_microbatches=num)
        schedules[which].step(inputs, target=target)
        schedules[1 - which].eval(inputs)
        assert_same(snapshot(nn.Sequential(*modules)), snapshot(plain))


def test_a_schedule_leaves_stages_as_they_are() -> None:
    stages = stages_of(list(mlp(2)))
    made("looped-bfs", stages, None, microbatch_rng=True)
    assert [(stage.chunks, stage.has_backward) for stage in stages] == [(None, True)] * 2
    stages[0].forward_one_chunk(MICROBATCHES, (torch.ones(1, DIM),))
