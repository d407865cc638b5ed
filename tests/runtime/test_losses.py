"""Losses, metrics, targets and outputs; ready microbatches; how batches are split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import (
    Pipeline,
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleError,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    StageError,
    TensorChunkSpec,
)
from penstock.schedule.registry import family
from tests.agreement import TRAINING, Twins
from tests.compare import assert_same, plain_step, snapshot
from tests.models import DIM, features, mlp

SCHEDULES = pytest.mark.parametrize("schedule", TRAINING)


def twins(schedule: str = "1f1b", loss_fn: Any = F.mse_loss, mbs: int = 3, **options: Any) -> Twins:
    return Twins(mlp(4), loss_fn, schedule=schedule, ranks=2, n_microbatches=mbs, **options)


# --- what the loss function returns ----------------------------------------------------------


@SCHEDULES
def test_a_loss_with_metrics(schedule: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return F.mse_loss(output, target), {"rows": len(output), "out": output.detach().sum()}

    both = twins(schedule, loss_fn)
    for step in range(2):
        inputs, target = features(7, step)
        expected = both.step(inputs, target=target)
        assert [m["rows"] for m in both.pipe.metrics] == [3, 2, 2]
        for got, wanted in zip(both.pipe.metrics, expected.metrics, strict=True):
            assert torch.equal(got["out"], wanted["out"])
    both.pipe.eval(inputs, target=target)
    assert [m["rows"] for m in both.pipe.metrics] == [3, 2, 2]


@SCHEDULES
def test_keyword_arguments_of_the_loss(schedule: str) -> None:
    def loss_fn(output: Tensor, target: Tensor, *, power: int, weights: Tensor) -> Tensor:
        return ((output - target).abs() ** power * weights).mean()

    both = twins(schedule, loss_fn)
    inputs, target = features(6, 0)
    both.step(inputs, target=target, loss_kwargs={"power": 3, "weights": torch.rand(DIM)})


@SCHEDULES
def test_a_loss_whose_backward_writes_into_its_gradient(schedule: str) -> None:
    """Each microbatch begins with a gradient of its own."""

    def doubled(output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        loss.register_hook(lambda grad: grad.mul_(2))
        return loss

    both = twins(schedule, doubled)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element(shape: tuple[int, ...]) -> None:
    both = twins(loss_fn=lambda out, target: F.mse_loss(out, target).reshape(shape))
    inputs, target = features(6, 0)
    loss = both.pipe.step(inputs, target=target)
    plain_step(both.plain, F.mse_loss, inputs, target=target, n_microbatches=3)
    assert loss.shape == ()
    both.compare()


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (lambda out, target: (out - target) ** 2, r"a tensor of shape \(2, 6\)"),
        (lambda out, target: 0.5, r"0\.5"),
        (lambda out, target: None, "None"),
        (lambda out, target: (F.mse_loss(out, target), 1, 2), "expected a scalar tensor"),
        (lambda out, target: F.mse_loss(out, target).detach(), "detached"),
        (lambda out, target: F.mse_loss(out, target) * 1j, r"complex64\), expected a real one"),
    ],
)
def test_values_that_are_no_loss(loss_fn: Any, told: str) -> None:
    inputs, target = features(6, 0)
    with pytest.raises(StageError, match=told) as caught:
        twins(loss_fn=loss_fn).pipe.step(inputs, target=target)
    assert (caught.value.stage, caught.value.microbatch, caught.value.action) == (1, 0, "1F0")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_losses_keep_their_dtype(dtype: torch.dtype) -> None:
    """The mean is of that dtype too, and the scale is applied in it, as ``loss / n`` would be."""
    both = twins(loss_fn=lambda out, target: F.mse_loss(out, target).to(dtype))
    inputs, target = features(6, 0)
    both.step(inputs, target=target)
    assert both.pipe.losses[0].dtype is dtype


@SCHEDULES
def test_a_nonfinite_loss_is_passed_on(schedule: str) -> None:
    """It is the user's to see (a gradient scaler skips such steps); it is no failure."""
    both = twins(schedule)
    inputs, target = features(6, 0)
    target[3] = float("nan")
    loss = both.pipe.step(inputs, target=target)
    plain_step(both.plain, F.mse_loss, inputs, target=target, n_microbatches=3)
    assert loss.isnan()
    assert [x.isnan().item() for x in both.pipe.losses] == [False, True, False]
    both.compare()


# --- targets ---------------------------------------------------------------------------------


def test_targets_of_any_tree() -> None:
    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        wanted, (weight, power) = target["wanted"], target["how"]
        return ((output - wanted).abs() ** power * weight).mean()

    both = twins(loss_fn=loss_fn)
    inputs, wanted = features(7, 0)
    both.step(inputs, target={"wanted": wanted, "how": (torch.rand(7, 1), 2)})


class Size(nn.Module):
    """A loss of the output alone."""

    def forward(self, output: Tensor) -> Tensor:
        return output.square().mean()


@pytest.mark.parametrize("loss_fn", [Size(), Size().forward, lambda output: output.mean()])
def test_a_loss_of_one_argument_needs_no_target(loss_fn: Any) -> None:
    inputs, _ = features(6, 0)
    assert twins(loss_fn=loss_fn).pipe.step(inputs).isfinite()


def test_a_missing_target_is_an_error_before_anything_runs() -> None:
    both = twins()
    inputs, target = features(6, 0)
    with pytest.raises(StageError, match="no target"):
        both.pipe.step(inputs)
    assert all(p.grad is None for p in both.pipe.parameters())
    # Nothing has run, so nothing is broken.
    both.step(inputs, target=target)


def test_missing_inputs_are_an_error_before_anything_runs() -> None:
    both = twins()
    inputs, target = features(6, 0)
    with pytest.raises(StageError, match="no inputs"):
        both.pipe.step(target=target)
    with pytest.raises(StageError, match=r"no inputs.* train\(False\) of its modules"):
        both.pipe.eval()
    both.step(inputs, target=target)


def test_no_training_without_gradients() -> None:
    both = twins()
    inputs, target = features(6, 0)
    with torch.no_grad(), pytest.raises(StageError, match="no_grad"):
        both.pipe.step(inputs, target=target)
    both.step(inputs, target=target)


# --- ready microbatches ----------------------------------------------------------------------


@SCHEDULES
def test_ready_microbatches(schedule: str) -> None:
    """Of whatever sizes; each loss counts alike, as in the plain loop over them."""
    both = twins(schedule)
    for step, sizes in enumerate([(2, 2, 2), (4, 1, 3), (1, 1, 1)]):
        pairs = [features(rows, 10 * step + i) for i, rows in enumerate(sizes)]
        both.step(arg_mbs=[(x,) for x, _ in pairs], target_mbs=[y for _, y in pairs])
        out = both.pipe.eval(arg_mbs=[(x,) for x, _ in pairs])
        assert out.shape == (sum(sizes), DIM)


class Scaled(nn.Linear):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class AllScaled(nn.Sequential):
    """The plain model: every stage is given the keyword arguments."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        for module in self:
            x = module(x, scale=scale)
        return x


@SCHEDULES
def test_ready_keyword_microbatches(schedule: str) -> None:
    torch.manual_seed(0)
    num_stages = 2 * family(schedule).default_virtual
    plain = AllScaled(*(Scaled(DIM, DIM) for _ in range(num_stages)))
    modules = copy.deepcopy(plain)
    stages = [PipelineStage(m, i, num_stages, torch.device("cpu")) for i, m in enumerate(modules)]
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule=schedule, ranks=2, n_microbatches=3)
    for step, sizes in enumerate([(2, 2, 2), (4, 1, 3)]):
        pairs = [features(rows, 10 * step + i) for i, rows in enumerate(sizes)]
        ready: dict[str, Any] = {
            "arg_mbs": [(x,) for x, _ in pairs],
            "kwarg_mbs": [{"scale": 1 + torch.rand(rows, 1)} for rows in sizes],
            "target_mbs": [y for _, y in pairs],
        }
        expected = plain_step(plain, F.mse_loss, **ready)
        assert torch.equal(pipe.step(**ready), expected.loss)
        assert_same(snapshot(modules), snapshot(plain))
        assert torch.equal(pipe.eval(**ready), torch.cat(expected.outputs))
        assert all(map(torch.equal, pipe.losses, expected.losses))


def test_a_loss_may_not_call_the_pipeline_that_it_is_computed_in() -> None:
    pipes: list[Pipeline] = []
    teacher = Pipeline(mlp(2), ranks=2, n_microbatches=1)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        known = pipes[0].eval(target) if pipes else teacher.eval(target)
        return F.mse_loss(output, known)

    pipe = Pipeline(mlp(2), loss_fn=loss_fn, ranks=2, n_microbatches=2)
    inputs, target = features(2, 0)
    pipe.step(inputs, target=target)  # another one, all in this process
    pipes.append(pipe)
    with pytest.raises(ScheduleError, match=r"stage 1, .*within a step of the same .* target="):
        pipe.step(inputs, target=target)


def test_ready_microbatches_of_the_wrong_number() -> None:
    both = twins()
    pairs = [features(2, i) for i in range(4)]
    args, targets = [(x,) for x, _ in pairs], [y for _, y in pairs]
    with pytest.raises(
        ValueError, match="4 ready microbatches in arg_mbs, expected 1 to n_microbatches=3"
    ):
        both.pipe.step(arg_mbs=args, target_mbs=targets)
    with pytest.raises(ValueError, match="4 ready microbatches in target_mbs"):
        both.pipe.step(arg_mbs=args[:3], target_mbs=targets)
    with pytest.raises(TypeError, match="arg_mbs is a generator, expected a list"):
        both.pipe.step(arg_mbs=(mb for mb in args), target_mbs=targets)
    both.step(arg_mbs=args[:3], target_mbs=targets[:3])


def test_fewer_ready_microbatches_than_the_schedule_has() -> None:
    """As many run as are given: those of the last, shorter step of an epoch."""
    both = twins(mbs=4)
    for num in (4, 2, 1, 4):
        pairs = [features(2, i) for i in range(num)]
        both.step(arg_mbs=[(x,) for x, _ in pairs], target_mbs=[y for _, y in pairs])
        assert len(both.pipe.losses) == num


def test_a_batch_with_fewer_rows_than_microbatches() -> None:
    """A loss and metrics per row; the empty microbatches have neither."""
    mse = nn.functional.mse_loss
    pipe = twins(mbs=4, loss_fn=lambda out, wanted: (mse(out, wanted), len(out))).pipe
    for rows in (3, 4):
        inputs, target = features(rows, 0)
        loss = pipe.step(inputs, target=target)
        assert torch.equal(loss, torch.stack(pipe.losses).mean())
        assert len(pipe.losses) == rows and pipe.metrics == [1] * rows


# --- the schedule classes, for what only they offer ------------------------------------------


def schedule_of(cls: Any, modules: list[nn.Module], **options: Any) -> PipelineSchedule:
    """All stages on one rank, which needs no process group."""
    device = torch.device("cpu")
    stages = [PipelineStage(m, i, len(modules), device) for i, m in enumerate(modules)]
    schedule: PipelineSchedule = cls(stages if len(stages) > 1 else stages[0], **options)
    return schedule


def test_the_losses_fill_the_callers_list() -> None:
    schedule = schedule_of(ScheduleGPipe, [mlp(1)], n_microbatches=3, loss_fn=F.mse_loss)
    inputs, target = features(6, 0)
    losses: list[Tensor] = [torch.tensor(7.0)] * 9
    schedule.step(inputs, target=target, losses=losses)
    assert len(losses) == 3
    assert not any(loss.requires_grad for loss in losses)
    schedule.eval(inputs, target=target, losses=losses)
    assert len(losses) == 3
    schedule.eval(inputs, losses=losses)
    assert losses == []


@pytest.mark.parametrize("cls", [ScheduleGPipe, Schedule1F1B])
def test_outputs_are_merged_on_demand(cls: Any) -> None:
    model = mlp(1)
    schedule = schedule_of(cls, [model], n_microbatches=3, loss_fn=F.mse_loss)
    inputs, target = features(7, 0)
    out = schedule.step(inputs, target=target)
    with torch.no_grad():
        assert torch.equal(out, torch.cat([model(x) for x in inputs.tensor_split(3)]))
    assert not out.requires_grad
    assert schedule.step(inputs, target=target, return_outputs=False) is None


def test_without_a_loss_a_step_runs_forward_only() -> None:
    model = mlp(1)
    schedule = schedule_of(ScheduleGPipe, [model], n_microbatches=2)
    inputs, _ = features(4, 0)
    assert schedule.step(inputs).shape == (4, DIM)
    assert all(p.grad is None for p in model.parameters())


def test_other_dimensions_are_split_and_merged() -> None:
    """Sequences first, batch second; and an argument that every microbatch gets whole."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(DIM, DIM)

        def forward(self, x_TBD: Tensor, table: Tensor, *, gain: Tensor) -> Tensor:
            return self.rnn(x_TBD)[0] @ table * gain

    model = Recurrent()
    schedule = schedule_of(
        ScheduleGPipe,
        [model],
        n_microbatches=2,
        args_chunk_spec=(TensorChunkSpec(1), None),
        kwargs_chunk_spec={"gain": TensorChunkSpec(1)},
        output_merge_spec=TensorChunkSpec(1),
        loss_fn=None,
    )
    x, table, gain = torch.randn(4, 5, DIM), torch.randn(DIM, DIM), torch.randn(1, 5, 1)
    out = schedule.step(x, table, gain=gain)
    with torch.no_grad():
        halves = [
            model(x[:, :3], table, gain=gain[:, :3]),
            model(x[:, 3:], table, gain=gain[:, 3:]),
        ]
    assert torch.equal(out, torch.cat(halves, dim=1))


def test_outputs_of_any_kind_are_left_alone_unless_asked_for() -> None:
    """Such as a model's own class of outputs, which nothing could merge."""

    class Opaque:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Any:
            return Opaque(self.linear(x))

    both = Twins(
        [*mlp(1), Last()],
        lambda out, target: F.mse_loss(out.value, target),
        schedule="1f1b",
        ranks=2,
        n_microbatches=2,
    )
    inputs, target = features(5, 0)
    both.step(inputs, target=target)


def test_several_stages_on_the_only_rank() -> None:
    modules = list(mlp(3))
    schedule = schedule_of(ScheduleInterleaved1F1B, modules, n_microbatches=2, loss_fn=F.mse_loss)
    inputs, target = features(5, 0)
    out = schedule.step(inputs, target=target)
    with torch.no_grad():
        whole = nn.Sequential(*modules)
        assert torch.equal(out, torch.cat([whole(x) for x in inputs.tensor_split(2)]))
    assert all(p.grad is not None for p in whole.parameters())


# --- evaluation ------------------------------------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize("train_first", [False, True])
def test_evaluation_keeps_no_graph_and_touches_no_gradient(
    schedule: str, train_first: bool
) -> None:
    both = twins(schedule)
    inputs, target = features(6, 0)
    if train_first:
        both.step(inputs, target=target)
    before = [None if p.grad is None else p.grad.clone() for p in both.pipe.parameters()]
    seen: list[bool] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        leaves = [x for x in (*args, output) if isinstance(x, Tensor)]
        leaves += [x for part in (*args, output) if isinstance(part, tuple) for x in part]
        seen.extend(x.requires_grad for x in leaves)
        seen.append(torch.is_grad_enabled())

    for stage in both.pipe.stages:
        stage.submod.register_forward_hook(note)
    out = both.pipe.eval(inputs, target=target)
    assert len(both.pipe.losses) == 3
    assert not out.requires_grad
    assert seen
    assert not any(seen)
    with torch.no_grad():
        outs = [both.plain(x) for x in inputs.tensor_split(3)]
        losses = [F.mse_loss(o, t) for o, t in zip(outs, target.tensor_split(3), strict=True)]
    assert torch.equal(out, torch.cat(outs))
    assert all(map(torch.equal, both.pipe.losses, losses))
    after = [p.grad for p in both.pipe.parameters()]
    assert [g is None for g in after] == [g is None for g in before]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True) if a is not None)


def test_evaluation_in_inference_mode() -> None:
    both = twins()
    inputs, target = features(6, 0)
    both.step(inputs, target=target)
    with torch.inference_mode():
        out = both.pipe.eval(inputs)
    assert out.shape == (6, DIM)
    both.step(inputs, target=target)


def test_forward_only_as_a_schedule() -> None:
    model = mlp(4)
    pipe = Pipeline(model, schedule="forward-only", ranks=2, virtual=2, n_microbatches=3)
    inputs, _ = features(6, 0)
    with torch.no_grad():
        expected = torch.cat([model(x) for x in inputs.tensor_split(3)])
    assert torch.equal(pipe.eval(inputs), expected)
    assert all(p.grad is None for p in model.parameters())


def test_forward_only_evaluates_losses_and_refuses_to_train() -> None:
    model = mlp(2)
    pipe = Pipeline(model, loss_fn=F.mse_loss, schedule="forward-only", ranks=2, n_microbatches=3)
    inputs, target = features(6, 0)
    with pytest.raises(ScheduleError, match=r"forward-only has no backward; call eval\(\)"):
        pipe.step(inputs, target=target)
    with torch.no_grad():
        parts = zip(inputs.tensor_split(3), target.tensor_split(3), strict=True)
        expected = [F.mse_loss(model(x), y) for x, y in parts]
    # The refusal has broken nothing.
    pipe.eval(inputs, target=target)
    assert all(map(torch.equal, pipe.losses, expected))
