"""Schedules with a copy of the model for each of two directions, all ranks in one process.

Here both copies of a stage are one module, so that autograd sums their gradients. They are summed
in the schedule's order, even and odd microbatches mixed: in the plain loop's, but for rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import Pipeline, PipelineStage, ScheduleError, StageError, build
from penstock.schedule.registry import family
from tests.agreement import BIDIRECTIONAL, ROUNDING, Twins
from tests.models import CASES, features

# Chimera takes many numbers: each of ranks, and of microbatches, with each of the models in turn.
GRID = [
    pytest.param(name, ranks, microbatches, case, id=f"{name}-P{ranks}-M{microbatches}-{case}")
    for name in BIDIRECTIONAL
    for i, ranks in enumerate((2, 4, 6))
    for j, microbatches in enumerate((2, 3, 4, 5, 8, 12))
    if family(name).nearest(ranks, microbatches) == (ranks, microbatches)
    for k, case in enumerate(("mlp", "gpt", "lstm"))
    if name != "chimera" or (i + j + k) % 3 == 0
]


def twins(case: str, schedule: str, ranks: int, microbatches: int, **options: Any) -> Twins:
    made = CASES[case]
    return Twins(
        made.make(max(ranks, 3)),
        made.loss_fn,
        schedule=schedule,
        ranks=ranks,
        n_microbatches=microbatches,
        tolerance=ROUNDING,
        **options,
    )


@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "case"), GRID)
def test_gradients_are_those_of_one_device(
    schedule: str, ranks: int, microbatches: int, case: str
) -> None:
    both = twins(case, schedule, ranks, microbatches)
    for step, rows in enumerate((2 * microbatches, 2 * microbatches + 1, microbatches)):
        inputs, target = CASES[case].batch(rows, step)
        both.step(inputs, target=target)  # losses by microbatch too, and gradients that pile up
    both.descend()
    inputs, target = CASES[case].batch(2 * microbatches, 9)
    both.step(inputs, target=target)


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_fewer_rows_than_microbatches(schedule: str) -> None:
    """Each direction needs a row; without one, nothing has run and the next step may follow."""
    both = twins("mlp", schedule, 2, 4)
    for step, rows in enumerate((4, 2, 1, 3, 5)):
        inputs, target = CASES["mlp"].batch(rows, step)
        if rows == 1:
            with pytest.raises(ScheduleError, match="1 microbatch for 2 copies of the model"):
                both.pipe.step(inputs, target=target)
        else:
            both.step(inputs, target=target)
            both.eval(CASES["mlp"].batch(2, step)[0])


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_outputs_are_merged_in_the_order_of_microbatches(schedule: str) -> None:
    both = twins("mlp", schedule, 2, 6)
    inputs, target = CASES["mlp"].batch(9, 0)
    both.eval(inputs)
    out = both.pipe._schedule.step(inputs, target=target)
    torch.testing.assert_close(out, both.plain(inputs))


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_changing_shapes(schedule: str) -> None:
    both = twins("gpt", schedule, 2, 4, dynamic_shapes=True)
    for step, length in enumerate((5, 3, 7)):
        inputs, target = CASES["gpt"].batch(8, step)
        both.step(inputs[:, :length], target=target[:, :length])


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_batch_norm_counts_every_microbatch_once(schedule: str) -> None:
    """Gradients and counts are the plain loop's; a plain average is, too, but for rounding."""
    model = CASES["convnet"].make(4)
    for layer in model:
        layer.norm.momentum = None
    both = Twins(
        model,
        F.mse_loss,
        schedule=schedule,
        ranks=2,
        n_microbatches=6,
        tolerance=ROUNDING,
    )
    inputs, target = CASES["convnet"].batch(12, 0)
    both.step(inputs, target=target)
    counts = {n: b.item() for n, b in both.pipe.named_buffers() if n.endswith("batches_tracked")}
    assert set(counts.values()) == {6}


def test_names_and_state_are_the_plain_models() -> None:
    both = twins("gpt", "dualpipe", 2, 4)
    plain = dict(both.plain.named_parameters())
    assert [name for name, _ in both.pipe.named_parameters()] == list(plain)
    assert both.pipe.state_dict().keys() == both.plain.state_dict().keys()
    changed = {name: value + 1 for name, value in both.plain.state_dict().items()}
    both.pipe.load_state_dict(changed)
    for name, param in both.pipe.named_parameters():
        assert torch.equal(param, plain[name] + 1)


def test_each_stage_of_the_model_is_held_twice() -> None:
    both = twins("mlp", "chimera", 4, 4)
    assert [stage.stage_index for stage in both.pipe.stages] == list(range(8))
    for stage in both.pipe.stages[4:]:
        assert stage.submod is both.pipe.stages[stage.stage_index - 4].submod


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_copies_made_by_hand_are_kept_equal(schedule: str) -> None:
    """Real copies in one process: they take the first one's values, and sum their gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(2)]
    copies = [nn.Linear(6, 6) for _ in range(2)]
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    plain.load_state_dict(nn.Sequential(*layers).state_dict())
    stages = [PipelineStage(m, i, 4, torch.device("cpu")) for i, m in enumerate(layers + copies)]
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule=schedule, ranks=2, n_microbatches=4)
    inputs, target = features(8, 0)
    for _ in range(2):
        pipe.step(inputs, target=target)
        for mb, wanted in zip(inputs.chunk(4), target.chunk(4), strict=True):
            (F.mse_loss(plain(mb), wanted) / 4).backward()
    for layer, twin, expected in zip(layers, copies, plain, strict=True):
        assert torch.equal(layer.weight, twin.weight)
        assert layer.weight.grad is not None and twin.weight.grad is not None
        assert torch.equal(layer.weight.grad, twin.weight.grad)
        assert layer.weight.grad is not twin.weight.grad
        torch.testing.assert_close(layer.weight.grad, expected.weight.grad)
        torch.testing.assert_close(twin.bias.grad, expected.bias.grad)


def test_a_program_of_two_directions_runs_as_any_other() -> None:
    program = build("chimera", ranks=2, microbatches=5)
    both = Twins(CASES["mlp"].make(4), CASES["mlp"].loss_fn, schedule=program, tolerance=ROUNDING)
    inputs, target = CASES["mlp"].batch(10, 0)
    both.step(inputs, target=target)


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_stages_in_a_number_that_does_not_fit_are_refused(schedule: str) -> None:
    model = CASES["mlp"].make(4)
    with pytest.raises(ScheduleError, match="nearest that do are ranks=4 and microbatches=8"):
        Pipeline(model, schedule=schedule, ranks=3, n_microbatches=8)
    with pytest.raises(ScheduleError, match=r"4 stages, but .* on 2 ranks .* needs 2"):
        Pipeline(model, schedule=schedule, ranks=2, n_microbatches=8, split=[1, 1, 1, 1], virtual=1)


@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_missing_inputs_and_targets_are_an_error(schedule: str) -> None:
    both = twins("mlp", schedule, 2, 4)
    inputs, target = CASES["mlp"].batch(8, 0)
    with pytest.raises(StageError, match="no inputs"):
        both.pipe.step(target=target)
    with pytest.raises(StageError, match="no target"):
        twins("mlp", schedule, 2, 4).pipe.step(inputs)
