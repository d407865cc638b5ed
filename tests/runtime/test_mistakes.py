"""What users get wrong, over loopback: the error's type, and a message that says what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import (
    PartitionError,
    PenstockError,
    Pipeline,
    PipelineStage,
    Program,
    Schedule1F1B,
    ScheduleError,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleProgram,
    StageError,
)
from penstock.schedule.placement import linear
from penstock.schedule.text import load_csv, parse_csv

DIM = 4
CPU = torch.device("cpu")
BATCH = torch.ones(8, DIM)
mse = nn.functional.mse_loss


def make_stages(indices: list[int], num_stages: int) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(DIM, DIM), i, num_stages, CPU) for i in indices]


def make_pipe(**options: Any) -> Pipeline:
    options = {"loss_fn": mse, "schedule": "1f1b", "n_microbatches": 4, "ranks": 2} | options
    return Pipeline([nn.Linear(DIM, DIM) for _ in range(options.pop("layers", 2))], **options)


# --- stages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Schedule1F1B(make_stages([0], 2)[0], 4, mse),
            "1f1b: virtual=2 stages per rank do not work; 1 does, and any number does with .*"
            "interleaved-1f1b",
        ),
        (
            lambda: ScheduleInterleaved1F1B(make_stages([1, 0], 2), 4, mse),
            r"stage indices \[1, 0\]: pass each stage once, in rising order",
        ),
        (
            lambda: ScheduleInterleaved1F1B(make_stages([0, 0], 2), 4, mse),
            r"stage indices \[0, 0\]: pass each stage once",
        ),
        (
            lambda: ScheduleInterleaved1F1B(make_stages([0], 2), 4, mse),
            r"rank 0 needs the stages \[0, 1\] .*was given \[0\]",
        ),
        (
            lambda: ScheduleLoopedBFS(make_stages([0], 1) + make_stages([1], 2), 4, mse),
            r"the stages disagree on num_stages: \[1, 2\]",
        ),
        (lambda: ScheduleInterleaved1F1B([], 4, mse), "a rank was given no stage"),
        (
            lambda: Schedule1F1B(nn.Linear(1, 1), 4, mse),  # type: ignore[arg-type]
            "a Linear was given as a stage, expected a PipelineStage",
        ),
        (
            lambda: Schedule1F1B(make_stages([0], 1), 4, mse),  # type: ignore[arg-type]
            "a list was given as a stage, expected a PipelineStage",
        ),
        (
            lambda: ScheduleLoopedBFS(make_stages([0], 1)[0], 4, mse),  # type: ignore[arg-type]
            "a PipelineStage was given alone, expected a list",
        ),
        (
            lambda: Schedule1F1B(make_stages([0], 1)[0], 4, "mse"),  # type: ignore[arg-type]
            r"loss_fn is 'mse', expected a callable: loss_fn\(output, target\)",
        ),
        (
            lambda: Schedule1F1B(make_stages([0], 1)[0], 0, mse),
            "1f1b: microbatches=0 must be a whole number from 1 on",
        ),
        (
            lambda: Schedule1F1B(make_stages([0], 1)[0], 2.0, mse),  # type: ignore[arg-type]
            "1f1b: microbatches=2.0 must be a whole number from 1 on",
        ),
    ],
)
def test_stages_that_do_not_fit(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        make()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": 3, "split": [1, 1, 1]}, "3 stages, but 1f1b on 2 ranks with 1 per rank needs"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'; the schedules are: forward-only, gpi"),
        ({"schedule": "1f1"}, r"there is no schedule '1f1'; did you mean '1f1b'\?"),
        ({"schedule": "zbv", "virtual": 3, "layers": 6}, "zbv: virtual=3 .* 2 does"),
        ({"schedule": "gpipe", "virtual": 2, "layers": 4}, "gpipe: virtual=2 .* 1 does"),
        ({"n_microbatches": 0}, "1f1b: microbatches=0 must be a whole number from 1 on"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": -1}, "ranks"),
        ({"schedule": "dualpipev", "n_microbatches": 0, "layers": 4}, "microbatches=0 must be"),
        (
            {"schedule": penstock.build("1f1b", ranks=2, microbatches=3)},
            "n_microbatches=4, but the program given as schedule has 3",
        ),
        ({"loss_fn": 3}, "loss_fn is 3, expected a callable"),
        *(
            ({"timeout_s": each}, f"timeout_s={each!r}: expected a number of seconds above 0")
            for each in (None, "5", 0, -1.0, True, math.nan)
        ),
    ],
)
def test_numbers_out_of_a_familys_rules(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        make_pipe(**options)


# --- steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pipeline(nn.Sequential(), ranks=2), "the nn.Sequential is empty: there is nothin"),
        (lambda: Pipeline([], ranks=2), "the list of modules or stages is empty"),
        (
            lambda: Pipeline(make_stages([0], 1)[0]),  # type: ignore[arg-type]
            "the model is a PipelineStage, expected a module, a list of modules, or a list of Pip",
        ),
        (
            lambda: make_pipe(split=[1.0, 1.0]),
            r"split=\[1.0, 1.0\]: expected .* or the number of its layers",
        ),
    ],
)
def test_models_and_splits_that_are_none(make: Callable[[], object], said: str) -> None:
    with pytest.raises(PartitionError, match=said):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: penstock.simulate("1f1b"),
            r"simulate\(\) takes a program, not '1f1b'; penstock.b",
        ),  # type: ignore[arg-type]
        (
            lambda: penstock.check("1f1b"),  # type: ignore[arg-type]
            r"check\(\) takes a program, not '1f1b'; penstock.b",
        ),
        (
            lambda: penstock.save_csv(None, "nowhere.csv"),  # type: ignore[arg-type]
            r"save_csv\(\) takes a program, not None; penstock.b",
        ),
        (
            lambda: penstock.simulate(penstock.build("1f1b", ranks=1, microbatches=1), {}),  # type: ignore[arg-type]
            r"simulate\(\) takes costs, not {}; penstock.Costs\(",
        ),
        (
            lambda: penstock.search("cheap", ranks=2, microbatches=2),  # type: ignore[arg-type]
            r"search\(\) takes costs, not 'cheap'; penstock.Costs\(",
        ),
        (
            lambda: ScheduleProgram(make_stages([0], 1), "1f1b", mse),  # type: ignore[arg-type]
            r"ScheduleProgram takes a program, not '1f1b'; penstock.build\('1f1b', ranks=",
        ),
        (
            lambda: penstock.get_schedule_class("eager-1f1b"),
            r"no class of its own; .*ScheduleProgram\(stages, penstock.build\('eager-1f1b', .*"
            r"Pipeline\(model, schedule='eager-1f1b'",
        ),
    ],
)
def test_values_that_are_no_program(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        make()


def test_other_inputs_than_declared() -> None:
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"), input_args=torch.ones(3, 4))
    schedule = Schedule1F1B(stage, 2, mse)
    with pytest.raises(PenstockError, match=r"input is float32\[2,4\], expected float32\[3,4\]"):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_no_end_to_waiting() -> None:
    assert make_pipe(timeout_s=math.inf).step(BATCH, target=BATCH) is not None


def vector(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean(dim=1)


def detached(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target).detach()


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (vector, r"returned a tensor of shape \(2,\), expected a scalar tensor, or \(scalar"),
        (lambda out, _: 0.5, "returned 0.5, expected a scalar tensor"),
        (lambda out, _: None, "returned None, expected a scalar tensor"),
        (lambda out, _: (out.sum(), 1, 2), "expected a scalar tensor, or .scalar tensor, metrics"),
        (lambda out, _: (0.5, {}), "returned 0.5, expected a scalar tensor"),
        (lambda out, _: torch.fft.fft(out).sum(), r"complex number \(torch.complex64\), expected"),
        (detached, "does not depend on any parameter that requires grad, .* detached it"),
        (lambda out: out.sum(), "TypeError: .*positional argument"),
    ],
)
def test_losses_that_are_none(loss_fn: Any, said: str) -> None:
    with pytest.raises(StageError, match=f"rank 1, stage 1, microbatch 0, action 1F0: .*{said}"):
        make_pipe(loss_fn=loss_fn).step(BATCH, target=BATCH)


def test_a_loss_with_metrics_is_accepted() -> None:
    pipe = make_pipe(loss_fn=lambda out, target: (mse(out, target), len(out)))
    loss = pipe.step(BATCH, target=BATCH)
    assert loss is not None and loss.shape == ()
    assert pipe.metrics == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda pipe: pipe.step(BATCH), StageError, r"no target.*passes target= \(or target_mbs="),
        (lambda pipe: pipe.step(target=BATCH), StageError, "no inputs: the rank of the first"),
        (lambda pipe: pipe.eval(), StageError, "no inputs: the rank of the first stage passes"),
        (
            lambda pipe: pipe.step(BATCH[:3], target=BATCH),
            ValueError,
            r"8 rows of a tensor of shape \(8, 4\) and 3 of .* are cut at different places for 4 m",
        ),
        (
            lambda pipe: pipe.step(arg_mbs=[(BATCH,)] * 5, target=BATCH),
            ValueError,
            "5 ready microbatches in arg_mbs, expected 1 to n_microbatches=4",
        ),
        (
            lambda pipe: pipe.step(arg_mbs=[(BATCH,)] * 4, target_mbs=[BATCH] * 2),
            ValueError,
            "2 ready microbatches in target_mbs, .* as many in each list",
        ),
        (
            lambda pipe: pipe.step(BATCH[:3], target_mbs=[BATCH[:1]] * 4),
            ValueError,
            "3 rows beside 4 ready microbatches",
        ),
        (
            lambda pipe: pipe.step(BATCH, arg_mbs=[(BATCH,)] * 4, target=BATCH),
            ValueError,
            "arg_mbs was given beside a batch; pass a batch, .* or ready",
        ),
        (
            lambda pipe: pipe.step(BATCH, target=BATCH, target_mbs=[BATCH] * 4),
            ValueError,
            "target_mbs was given beside a batch",
        ),
        (
            lambda pipe: pipe.step(BATCH, target=BATCH, a=1, kwarg_mbs=[{}] * 4),
            ValueError,
            "kwarg_mbs was given beside a batch",
        ),
        (
            lambda pipe: pipe.step(arg_mbs=[BATCH] * 4, target=BATCH),
            TypeError,
            r"arg_mbs holds a Tensor, expected a tuple, such as \(x,\) of a call's arguments",
        ),
        (
            lambda pipe: pipe.step(BATCH, kwarg_mbs=[{}, (), {}, {}], target=BATCH),
            TypeError,
            "kwarg_mbs holds a tuple, expected a dict",
        ),
        (
            lambda pipe: pipe.step(BATCH, target=BATCH, losses=()),
            TypeError,
            "losses is a tuple, expected a list, to be filled",
        ),
        (
            lambda pipe: pipe.step(BATCH[:, :2], target=BATCH),
            StageError,
            "rank 0, stage 0, microbatch 0, action 0F0: RuntimeError: .*mat1 and mat2",
        ),
        (
            lambda pipe: pipe.step(BATCH, BATCH, target=BATCH),
            StageError,
            "rank 0, stage 0, microbatch 0, action 0F0: TypeError: .*positional argument",
        ),
    ],
)
def test_steps_without_required_arguments(
    call: Callable[[Pipeline], object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        call(make_pipe())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients(context: Callable[[], Any]) -> None:
    pipe = make_pipe()
    with context(), pytest.raises(StageError, match=r"runs under no_grad; use eval\(\)"):
        pipe.step(BATCH, target=BATCH)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cls", [penstock.ScheduleGPipe, penstock.ScheduleForwardOnly])
def test_a_step_that_trains_nothing_needs_no_gradients(
    cls: Callable[..., Any], context: Callable[[], Any]
) -> None:
    (stage,) = make_stages([0], 1)
    with context():
        torch.testing.assert_close(cls(stage, 4).step(BATCH), stage.submod(BATCH))


def test_a_step_can_compute_gradients_under_no_grad() -> None:
    (stage,) = make_stages([0], 1)
    schedule = ScheduleInterleaved1F1B([stage], 4, mse, backward_requires_autograd=False)
    with torch.no_grad():
        schedule.step(BATCH, target=BATCH)
    assert stage.submod.weight.grad is not None


def test_scaling_is_chosen_when_a_schedule_is_made() -> None:
    schedule = ScheduleInterleaved1F1B(make_stages([0], 1), 4, mse, scale_grads=False)
    with pytest.raises(AttributeError, match="scale_grads"):
        schedule.scale_grads = True  # type: ignore[misc]
    assert not schedule.scale_grads


@pytest.mark.parametrize(
    "mistake", ["no grad", "too few targets", "no target", "no inputs", "losses in a tuple"]
)
def test_a_mistake_found_before_anything_ran_does_no_harm(mistake: str) -> None:
    pipe = make_pipe()
    with pytest.raises((PenstockError, ValueError, TypeError)):
        match mistake:
            case "no grad":
                with torch.no_grad():
                    pipe.step(BATCH, target=BATCH)
            case "too few targets":
                pipe.step(BATCH, target=BATCH[:2])
            case "no target":
                pipe.step(BATCH)
            case "losses in a tuple":
                pipe.step(BATCH, target=BATCH, losses=())
            case "no inputs":
                pipe.step(target=BATCH)
    assert pipe.step(BATCH, target=BATCH) is not None
    assert pipe.eval(BATCH).shape == (8, DIM)


@pytest.mark.parametrize("kind", [KeyError, StopIteration])
def test_a_failure_in_a_step_stays(kind: type[Exception]) -> None:
    def burst(*_: object) -> None:
        raise kind("it burst")

    pipe = make_pipe()
    handle = next(pipe.parameters()).register_hook(burst)
    with pytest.raises(StageError, match=rf"{kind.__name__}: \W?it burst") as caught:
        pipe.step(BATCH, target=BATCH)
    assert isinstance(caught.value.__cause__, kind)
    assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (0, 0, 0)
    assert caught.value.action == "0B0"
    handle.remove()
    with pytest.raises(penstock.PeerError, match=r"an earlier step failed, .*it burst"):
        pipe.step(BATCH, target=BATCH)


# --- programs --------------------------------------------------------------------------------


def run(program: Program) -> None:
    """Give the program to a pipeline: reading it is one thing, running it another."""
    stages = make_stages(list(range(program.num_stages)), program.num_stages)
    pipe = Pipeline(stages, loss_fn=mse, schedule=program)
    pipe.step(BATCH, target=BATCH)


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n",  # backwards in another order than forwards
        "0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n",  # ranks in different orders
        "0F0,0I0,0W0\n1F0,1B0\n",
    ],
)
def test_a_good_csv_runs(text: str) -> None:
    run(parse_csv(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0Q0\n1F0,1B0\n", r"row 1, column 2: '0Q0' is not an action; expected a stage, one"),
        ("0F0,0B0\n1F0,1B0x\n", r"row 2, column 2: '1B0x' is not an action"),
        ("0F0,0B0 0B0\n1F0,1B0\n", r"row 1, column 2: '0B0 0B0' is not an action"),
        ("0F,0B0\n1F0,1B0\n", r"'0F' is not an action; expected a stage"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "rank 0, step 1 .0F0.: 0F0 again, first done at step 0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "0B0 again, first done at step 1; once is enough"),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", "0B1 is missing"),
        ("0F0,0B0,0B1\n1F0,1F1,1B0,1B1\n", "0F1 is missing"),
        ("0F0,0I0\n1F0,1B0\n", "0W0 is missing"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "0W0 gives nothing that 0B0 has not done"),
        ("0B0,0F0\n1F0,1B0\n", "0B0 needs 0F0 before it"),
        # Neither rank can start its second microbatch: each waits for the other.
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock: waits for 1B0 of rank 1"),
        # Each sends before it posts its receive: stuck wherever a send waits for that.
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
            r"rank 0, step 3 \(0SEND_F1\): deadlock: .*rank 1",
        ),
        (
            "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0RECV_B1,0B0,0B1\n"
            "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
            r"1RECV_F0 is posted as number 0 of the messages from rank 0; post 1RECV_F1 here",
        ),
        (
            "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n",
            "0RECV_B0 is missing",
        ),
    ],
)
def test_programs_from_text(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        run(parse_csv(text))


def test_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0 oops\n")
    with pytest.raises(ScheduleError, match=r"mine\.csv: row 1, column 2: '0B0 oops' is not an"):
        load_csv(path)


def test_a_program_for_other_ranks() -> None:
    program = penstock.build("1f1b", ranks=3, microbatches=2)
    with pytest.raises(
        ScheduleError, match=r"needs the stages \[0, 1, 2\] for 1f1b .*given \[0, 2\]"
    ):
        ScheduleProgram(make_stages([0], 3) + make_stages([2], 3), program, mse)


def test_a_program_of_another_placement_is_recognized_by_its_text() -> None:
    with pytest.raises(ScheduleError, match="2 rows; the placement has 3 ranks"):
        parse_csv(GOOD, placement=linear(3))


def test_a_batch_without_rows() -> None:
    pipe = Pipeline([nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss, n_microbatches=2, split=[1])
    with pytest.raises(ValueError, match=r"shape \(0, 2\) can.t be split into . microbatches"):
        pipe.step(torch.ones(0, 2), target=torch.ones(0, 2))


def test_another_pipelines_failure_within_a_module_has_the_place_of_both() -> None:
    def burst(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("it burst")

    teacher = make_pipe(loss_fn=burst)

    class Taught(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            teacher.step(BATCH, target=BATCH)
            return super().forward(x)

    pipe = Pipeline(
        [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), Taught(DIM, DIM)],
        loss_fn=mse,
        n_microbatches=4,
        ranks=3,
    )
    with pytest.raises(StageError, match=r"action 2F0: StageError: rank 1, .*1F0: Va") as told:
        pipe.step(BATCH, target=BATCH)
    assert (told.value.rank, told.value.action) == (2, "2F0")
