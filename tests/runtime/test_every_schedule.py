"""Every schedule, on any number of ranks, stages and microbatches: the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.schedule.registry import family
from tests.agreement import TRAINING, Twins, virtuals
from tests.compare import plain_step
from tests.models import CASES

GRID = [
    pytest.param(each.name, ranks, virtual, id=f"{each.name}-P{ranks}-V{virtual}")
    for each in penstock.schedules()
    if each.name in TRAINING
    for ranks in range(1, 5)
    for virtual in virtuals(each)
]


def twins(case: str, schedule: str, ranks: int, virtual: int, mbs: int, **options: Any) -> Twins:
    made = CASES[case]
    model = made.make(max(ranks * virtual, 3))
    return Twins(
        model,
        made.loss_fn,
        schedule=schedule,
        ranks=ranks,
        virtual=virtual,
        n_microbatches=mbs,
        **options,
    )


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), GRID)
def test_any_number_of_microbatches(schedule: str, ranks: int, virtual: int) -> None:
    """Fewer than ranks, and not a multiple of them, are as good as any; so are uneven rows."""
    # Every schedule meets all of them, on one number of ranks or another.
    for mbs in ((1, 8), (2, 5), (3, 8), (1, 5))[ranks - 1]:
        both = twins("mlp", schedule, ranks, virtual, mbs)
        # Gradients pile up from step to step, as they do on one device.
        for step, rows in enumerate((2 * mbs + 1, mbs)):
            inputs, target = CASES["mlp"].batch(rows, step)
            both.step(inputs, target=target)


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), GRID)
def test_fewer_rows_than_microbatches(schedule: str, ranks: int, virtual: int) -> None:
    """A short last batch has a microbatch per row, and its loss is the mean over these."""
    both = twins("mlp", schedule, ranks, virtual, 5)
    for step, rows in enumerate((3, 6, 1)):
        inputs, target = CASES["mlp"].batch(rows, step)
        both.step(inputs, target=target)
        assert len(both.pipe.losses) == min(rows, 5)
        both.eval(CASES["mlp"].batch((4, 2)[step % 2], step)[0])


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), GRID)
def test_models(schedule: str, ranks: int, virtual: int) -> None:
    """Batch norm with its buffers; attention and embeddings; recurrence."""
    # Every schedule meets all of them, on one number of ranks or another.
    case, mbs = ("convnet", "gpt", "lstm")[(ranks + virtual) % 3], 3
    both = twins(case, schedule, ranks, virtual, mbs)
    for step in range(2):
        inputs, target = CASES[case].batch(2 * mbs + 1, step)
        both.step(inputs, target=target)
        both.descend()


@pytest.mark.parametrize("schedule", TRAINING)
def test_each_module_is_called_once_per_microbatch(schedule: str) -> None:
    """No extra forward finds out the shapes, neither at first nor after switching to eval."""
    both = twins("mlp", schedule, 2, family(schedule).default_virtual, 3)
    calls = [0] * len(both.pipe.stages)

    def count(stage: int) -> Any:
        def hook(*_: object) -> None:
            calls[stage] += 1

        return hook

    for stage in both.pipe.stages:
        stage.submod.register_forward_hook(count(stage.stage_index))
    inputs, target = CASES["mlp"].batch(6, 0)
    for turn in range(3):
        both.pipe.step(inputs, target=target)
        assert calls == [6 * turn + 3] * len(calls)
        both.pipe.eval(inputs)
        assert calls == [6 * turn + 6] * len(calls)


@pytest.mark.parametrize("schedule", TRAINING)
def test_gradients_of_the_plain_sum(schedule: str) -> None:
    """``scale_grads=False`` sums the microbatches' gradients, and leaves the losses alone."""
    virtual = family(schedule).default_virtual
    both = twins("mlp", schedule, 2, virtual, 3, scale_grads=False)
    for step in range(2):
        inputs, target = CASES["mlp"].batch(7, step)
        both.step(inputs, target=target)


@pytest.mark.parametrize("schedule", TRAINING)
def test_batch_norm_counts_every_microbatch_once(schedule: str) -> None:
    virtual = family(schedule).default_virtual
    both = twins("convnet", schedule, 2, virtual, 4)
    inputs, target = CASES["convnet"].batch(8, 0)
    both.step(inputs, target=target)
    counts = {n: b.item() for n, b in both.pipe.named_buffers() if n.endswith("batches_tracked")}
    assert len(counts) == max(2 * virtual, 3)
    assert set(counts.values()) == {4}
    # Batch statistics belong to training: evaluating in eval mode leaves them.
    both.pipe.train(False)
    both.plain.train(False)
    both.eval(inputs)


@pytest.mark.parametrize("schedule", TRAINING)
def test_dropout_in_one_stage_draws_as_the_plain_loop(schedule: str) -> None:
    """Every stage runs its microbatches in order, so what one stage draws is what it would draw.

    Where several stages draw, they do so in the schedule's order, which is not the plain one's:
    no pipeline can have the plain loop's numbers then, and this test has only one such stage.
    """
    virtual = family(schedule).default_virtual
    model = CASES["mlp"].make(2 * virtual)
    model[1].append(nn.Dropout(0.5))
    both = Twins(
        model,
        CASES["mlp"].loss_fn,
        schedule=schedule,
        ranks=2,
        virtual=virtual,
        n_microbatches=5,
    )
    inputs, target = CASES["mlp"].batch(10, 0)
    state = torch.get_rng_state()
    loss = both.pipe.step(inputs, target=target)
    torch.set_rng_state(state)
    expected = plain_step(both.plain, both.loss_fn, inputs, target=target, n_microbatches=5)
    assert torch.equal(loss, expected.loss)
    both.compare()
    assert not torch.equal(torch.get_rng_state(), state), "nothing was drawn"
