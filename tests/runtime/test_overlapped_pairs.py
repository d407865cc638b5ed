"""Overlapped pairs run by a user's function: same gradients, and errors for its mistakes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import OVERLAP_F_B, PipelineStage, ScheduleDualPipeV, _PipelineScheduleRuntime
from penstock.errors import PenstockError, ScheduleError
from tests.compare import plain_step
from tests.streams import recorded

CPU = torch.device("cpu")
DIM, MICROBATCHES = 4, 4

Part = Callable[[], None]


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)]


def make_schedule(layers: list[nn.Module]) -> ScheduleDualPipeV:
    stages = [PipelineStage(layer, i, 2, CPU) for i, layer in enumerate(layers)]
    return ScheduleDualPipeV(stages, MICROBATCHES, mse_loss)


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, DIM), torch.randn(8, DIM)


def in_threads(pair: Any, forward: Part, backward: Part) -> None:
    thread = threading.Thread(target=backward)
    thread.start()
    forward()
    thread.join()


def train(layers: list[nn.Module], schedule: Any) -> None:
    plain = nn.Sequential(*copy.deepcopy(layers))
    for step in range(2):
        inputs, target = batch(step)
        expected = plain_step(plain, mse_loss, inputs, target=target, n_microbatches=MICROBATCHES)
        schedule.step(inputs, target=target)
        assert torch.equal(schedule.losses.mean(), expected.loss)
    for mine, wanted in zip(nn.Sequential(*layers).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_the_parts_of_a_pair_may_run_in_two_threads_that_meet() -> None:
    meeting = threading.Barrier(2)
    seen: list[str] = []

    def meet(pair: Any, forward: Part, backward: Part) -> None:
        def run_backward() -> None:
            meeting.wait(10)
            backward()

        thread = threading.Thread(target=run_backward)
        thread.start()
        meeting.wait(10)
        forward()
        thread.join()
        seen.append(str(pair))

    layers = make_layers()
    schedule = make_schedule(layers)
    schedule.register_custom_function(OVERLAP_F_B, meet)
    train(layers, schedule)
    trace = schedule.trace()
    span_of = {span.action: span for span in trace.spans}
    assert sorted(map(str, span_of)) == sorted(map(str, schedule.program.actions()))
    assert len(span_of) == len(trace.spans)
    assert trace.overlapped_pairs
    for pair in trace.overlapped_pairs:
        one, two = (span_of[part] for part in pair.parts)
        assert one.start < one.end and two.start < two.end
    assert seen == [str(step) for step in schedule.program.ranks[0] if len(step.parts) > 1] * 2
    assert seen[0].endswith("OVERLAP_F_B")
    schedule.eval(batch(0)[0])
    schedule.trace()


def test_a_function_applies_to_a_program_loaded_later(tmp_path: Path) -> None:
    layers = make_layers()
    make_schedule(layers)._dump_csv(tmp_path / "v.csv", format="compute_only")
    stages = [PipelineStage(layer, i, 2, CPU) for i, layer in enumerate(layers)]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, mse_loss)
    pairs: list[str] = []

    def record(pair: Any, first: Part, second: Part) -> None:
        pairs.append(str(pair))
        first()
        second()

    schedule.register_custom_function("OVERLAP_F_B", record)
    schedule._load_csv(tmp_path / "v.csv")
    train(layers, schedule)
    assert pairs


class Bursts(nn.Module):
    """Fails in its second backward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.count)
        return x

    def count(self, grad: Tensor) -> None:
        self.num_backwards += 1
        if self.num_backwards == 2:
            raise ValueError("it burst")


def backward_first(pair: Any, forward: Part, backward: Part) -> None:
    backward()
    forward()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("function", [in_threads, backward_first])
def test_errors_of_a_part_are_raised_at_their_action(function: Any) -> None:
    """Of a part in a thread, and of one before which the other has not run."""
    layers = [*make_layers()[:1], nn.Sequential(Bursts(), nn.Linear(DIM, DIM))]
    schedule = make_schedule(layers)
    schedule.register_custom_function(OVERLAP_F_B, function)
    inputs, target = batch(0)
    with pytest.raises(PenstockError, match="ValueError: it burst") as raised:
        schedule.step(inputs, target=target)
    assert raised.value.where.action == "1B1"


def test_a_part_runs_on_the_steps_stream_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch) as recorder:
        schedule = make_schedule(make_layers())
        streams = []

        def in_a_thread_on_another_stream(pair: Any, forward: Part, backward: Part) -> None:
            def run_backward() -> None:
                recorder.switch(recorder.new())
                backward()
                streams.append(recorder.current())

            streams.append(recorder.current())
            thread = threading.Thread(target=run_backward)
            thread.start()
            thread.join()
            forward()

        schedule.register_custom_function(OVERLAP_F_B, in_a_thread_on_another_stream)
        inputs, target = batch(0)
        schedule.step(inputs, target=target)
    assert streams and len(set(map(id, streams))) == 1


def test_a_part_runs_under_the_steps_autocast_in_any_thread() -> None:
    layers, dtypes = make_layers(), set()
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    schedule = make_schedule(layers)
    schedule.register_custom_function(
        OVERLAP_F_B, lambda pair, forward, backward: in_threads(pair, backward, forward)
    )
    inputs, target = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        schedule.step(inputs, target=target)
    assert dtypes == {torch.bfloat16}


def raises(pair: Any, forward: Part, backward: Part) -> None:
    raise ValueError("mine")


def forgets(pair: Any, forward: Part, backward: Part) -> None:
    forward()


def repeats(pair: Any, forward: Part, backward: Part) -> None:
    forward()
    forward()


@pytest.mark.parametrize(
    ("function", "said", "at"),
    [
        (raises, "ValueError: mine", 0),
        (forgets, "has returned without calling it; it calls each part once", 1),
        (repeats, r"has called \d+F\d+ twice", 0),
        (lambda action, ctx: None, "takes 2 positional arguments but 3 were given", 0),
    ],
)
def test_errors_of_the_function_are_raised(
    function: Callable[..., None], said: str, at: int
) -> None:
    schedule = make_schedule(make_layers())
    schedule.register_custom_function(OVERLAP_F_B, function)
    pair = next(step for step in schedule.program.ranks[0] if len(step.parts) > 1)
    inputs, target = batch(0)
    with pytest.raises(PenstockError, match=said) as raised:
        schedule.step(inputs, target=target)
    assert raised.value.where.action == str(pair.parts[at])


def test_invalid_functions_for_overlapped_pairs_are_refused() -> None:
    schedule = make_schedule(make_layers())
    with pytest.raises(ScheduleError, match=r"FORWARD can't be given .* only OVERLAP_F_B"):
        schedule.register_custom_function("FORWARD", in_threads)
