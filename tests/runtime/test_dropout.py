"""Dropout in every stage: with ``microbatch_rng`` the masks are the plain loop's.

Whatever the schedule, the cut, the placement and the transport; and the generator that the user
sees is left as the plain loop leaves it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import Pipeline, build, draw_step_seed, microbatch_rng
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError
from penstock.schedule.passes import recompute
from penstock.schedule.registry import family
from tests.agreement import BIDIRECTIONAL, ROUNDING, TRAINING, virtuals
from tests.dropout import MICROBATCHES, compare_dropout, dropping, plain_steps
from tests.models import DIM, features, token_loss
from tests.sequences import causal, token_batch

GRID = [
    pytest.param(each.name, ranks, virtual, id=f"{each.name}-P{ranks}-V{virtual}")
    for each in penstock.schedules()
    if each.name in TRAINING
    for ranks in (1, 2, 3)
    for virtual in virtuals(each)[:2]
]


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), GRID)
def test_masks_are_the_plain_loops(schedule: str, ranks: int, virtual: int) -> None:
    compare_dropout(max(6, ranks * virtual), schedule=schedule, ranks=ranks, virtual=virtual)


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_masks_are_the_plain_loops_in_two_directions(schedule: str) -> None:
    compare_dropout(4, schedule=schedule, ranks=2, tolerance=ROUNDING)


def test_uneven_cuts_draw_alike() -> None:
    compare_dropout(6, schedule="1f1b", ranks=3, split=[1, 4, 1])


def test_recomputation_draws_the_same_numbers() -> None:
    program = build("1f1b", ranks=2, microbatches=MICROBATCHES)
    compare_dropout(4, schedule=recompute(program), ranks=2)


@pytest.mark.parametrize(
    "made", [penstock.Schedule1F1B, penstock.ScheduleLoopedBFS, penstock.ScheduleZBVZeroBubble]
)
def test_schedules_as_classes_take_the_option(made: Any) -> None:
    virtual = family(made.schedule_name).default_virtual
    layers = dropping(virtual)
    stages = [PipelineStage(m, i, virtual, torch.device("cpu")) for i, m in enumerate(layers)]
    schedule = made(
        stages if virtual > 1 else stages[0], MICROBATCHES, F.mse_loss, microbatch_rng=True
    )
    expected, _ = plain_steps(copy.deepcopy(layers), 1)
    torch.manual_seed(5)
    inputs, target = features(2 * MICROBATCHES, 0)
    schedule.step(inputs, target=target)
    assert all(map(torch.equal, schedule.losses, expected))


def test_microbatches_and_steps_draw_apart() -> None:
    ones, drawn = torch.ones(64), []
    torch.manual_seed(0)
    for _ in range(3):
        seed = draw_step_seed()
        for microbatch in range(3):
            with microbatch_rng(seed, microbatch):
                drawn.append(F.dropout(ones))
    assert len({tuple(mask.tolist()) for mask in drawn}) == 9


def test_evaluation_draws_nothing_and_takes_no_seed() -> None:
    pipe = Pipeline(
        dropping(2), loss_fn=F.mse_loss, ranks=2, n_microbatches=2, microbatch_rng=True
    ).train(False)
    state = torch.get_rng_state()
    assert pipe.eval(features(4, 0)[0]).shape == (4, DIM)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failing_forward_leaves_the_generator_as_it_was() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            raise RuntimeError("on purpose")

    pipe = Pipeline([Failing()], loss_fn=F.mse_loss, n_microbatches=1, microbatch_rng=True)
    torch.manual_seed(1)
    draw_step_seed()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with pytest.raises(penstock.StageError, match="on purpose"):
        pipe.step(torch.ones(1), target=torch.ones(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_boundaries_given_in_advance_are_refused() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), input_args=torch.ones(1, 2))
    with pytest.raises(ScheduleError, match="leave input_args and output_args out"):
        Pipeline([stage], loss_fn=F.mse_loss, n_microbatches=1, microbatch_rng=True)


def test_sequence_chunks_draw_alike_on_any_number_of_ranks() -> None:
    found = []
    for ranks in (1, 2, 4):
        model = causal(4)
        layers = [model[0], nn.Dropout(0.3), model[1], nn.Dropout(0.3), model[2], model[3]]
        pipe = Pipeline(
            nn.Sequential(*layers),
            loss_fn=token_loss,
            schedule="seq1f1b",
            ranks=ranks,
            n_microbatches=2,
            microbatch_rng=True,
        )
        torch.manual_seed(2)
        inputs, target = token_batch(2, 4, 0)
        pipe.step(inputs, target=target)
        found.append([param.grad for param in pipe.parameters()])
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))
