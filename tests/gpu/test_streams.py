"""Streams of one device: what overlaps, what is timed, and that the host waits for nothing."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import Pipeline, build
from penstock.schedule.action import Op
from penstock.schedule.rules import COMPUTE
from penstock.testing.compare import assert_same, snapshot
from tests.gpu.device import DEVICE, GPU, SUMS, train, twins
from tests.models import gpt, token_loss, tokens

pytestmark = GPU

BLOCKS = [("dualpipev", 1), ("dualpipev", 2), ("dualpipe", 2)]
# In one process both directions of DualPipe share their parameters, and use them on two streams.
TWO_STREAMS = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


@TWO_STREAMS
@pytest.mark.parametrize(("name", "ranks"), BLOCKS)
def test_overlapped_blocks_train_right(name: str, ranks: int) -> None:
    program = build(name, ranks=ranks, microbatches=8)
    model = gpt(max(3, program.placement.num_model_stages))
    train(twins(model, token_loss, program, overlap=True), tokens, rows=16, steps=8)


def wide(stages: int, width: int = 512) -> list[nn.Module]:
    """Stages that take a while, and much memory that comes and goes."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
        .double()
        .to(DEVICE)
        for _ in range(stages)
    ]


@TWO_STREAMS
@pytest.mark.parametrize(("name", "ranks"), BLOCKS)
def test_overlap_changes_no_gradient_whatever_runs_when(name: str, ranks: int) -> None:
    """Many steps, without a wait between them, so that memory is used again at once."""
    found = []
    for overlap in (False, True):
        program = build(name, ranks=ranks, microbatches=8)
        pipe = Pipeline(
            nn.Sequential(*wide(program.placement.num_model_stages)),
            loss_fn=F.mse_loss,
            schedule=program,
            device=DEVICE,
            overlap=overlap,
        )
        generator = torch.Generator(DEVICE).manual_seed(1)
        for _ in range(20):
            batch = torch.randn(
                8 * 64, 512, generator=generator, device=DEVICE, dtype=torch.float64
            )
            pipe.step(batch, target=batch.flip(0))
        found.append(snapshot(pipe))
    assert_same(found[1], found[0], tolerance=SUMS)


def test_parts_of_a_block_run_at_once() -> None:
    """Kernels too small to fill the device: the times of a block's parts meet."""
    program = build("dualpipev", ranks=1, microbatches=8)
    pipe = Pipeline(
        nn.Sequential(*wide(2)), loss_fn=F.mse_loss, schedule=program, device=DEVICE, overlap=True
    )
    batch = torch.randn(8 * 4, 512, device=DEVICE, dtype=torch.float64)
    met = []
    for _ in range(5):
        # The host has to be ahead of the device, or kernels run as they are asked for.
        torch.cuda._sleep(int(2e8))
        pipe.step(batch, target=batch)
        spans = {span.action: span for span in pipe.trace().spans}
        blocks = [step.parts for step in program.ranks[0] if len(step.parts) == 2]
        met.append(
            sum(
                min(spans[one].end, spans[other].end) > max(spans[one].start, spans[other].start)
                for one, other in blocks
            )
        )
    assert max(met) > 0


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_a_trace_holds_the_devices_times(name: str) -> None:
    program = build(name, ranks=2, microbatches=4)
    pipe = Pipeline(
        nn.Sequential(*wide(program.num_stages)),
        loss_fn=F.mse_loss,
        schedule=program,
        device=DEVICE,
    )
    batch = torch.randn(4 * 256, 512, device=DEVICE, dtype=torch.float64)
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pipe.step(batch, target=batch)
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - begin
    trace = pipe.trace()
    compute = [span for span in trace.spans if span.action.op in COMPUTE]
    assert {span.action for span in compute} == {
        act for act in pipe.program.actions() if act.op in COMPUTE
    }
    assert 0.3 * wall_s < trace.makespan <= 1.01 * wall_s
    forwards = [span for span in compute if span.action.op is Op.FORWARD]
    assert all(span.end - span.start > 1e-6 for span in forwards)
    # One device plays both ranks: what they compute does not meet.
    compute.sort(key=lambda span: span.start)
    for one, other in pairwise(compute):
        assert one.end <= other.start + 1e-5


def ready(name: str, **options: Any) -> tuple[Pipeline, Any, Any]:
    program = build(name, ranks=2, microbatches=6)
    model = gpt(max(3, program.num_stages)).to(DEVICE)
    pipe = Pipeline(model, loss_fn=token_loss, schedule=program, device=DEVICE, **options)
    inputs, target = (t.to(DEVICE) for t in tokens(12, 0))
    for _ in range(2):
        pipe.step(inputs, target=target)
    return pipe, inputs, target


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-zb", "zbv", "dualpipev", "po-f"])
def test_the_host_waits_for_nothing_in_a_step(name: str, overlap: bool) -> None:
    pipe, inputs, target = ready(name, overlap=overlap)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        pipe.step(inputs, target=target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_the_host_runs_ahead(name: str) -> None:
    """A step returns while the device is still busy with what it was given before."""
    pipe, inputs, target = ready(name)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(int(2e9))
    busy.record()
    pipe.step(inputs, target=target)
    assert not busy.query()
    torch.cuda.synchronize()


def test_the_callers_stream_is_the_current_one_afterwards() -> None:
    pipe, inputs, target = ready("dualpipev", overlap=True)
    mine = torch.cuda.Stream()
    mine.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(mine):
        before = snapshot(pipe)
        pipe.step(inputs, target=target)
        assert torch.cuda.current_stream() == mine
        after = snapshot(pipe)
    torch.cuda.synchronize()
    again = snapshot(pipe)
    assert_same(again, after)
    changed = [
        not torch.equal(grad, before.grads[name])
        for name, grad in after.grads.items()
        if grad is not None
    ]
    assert all(changed)


def test_a_failing_step_leaves_the_callers_stream() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    program = build("dualpipev", ranks=1, microbatches=4)
    model = nn.Sequential(nn.Linear(4, 4), Failing()).to(DEVICE)
    pipe = Pipeline(model, loss_fn=F.mse_loss, schedule=program, device=DEVICE, overlap=True)
    before = torch.cuda.current_stream()
    with pytest.raises(penstock.StageError, match="on purpose"):
        pipe.step(torch.ones(8, 4, device=DEVICE), target=torch.ones(8, 4, device=DEVICE))
    assert torch.cuda.current_stream() == before


def test_overlap_holds_no_memory_by_how_far_the_host_is_ahead() -> None:
    """With ``record_stream`` memory would stay in use until the device comes to its last use."""
    peaks = []
    for cycles in (0, int(2e9)):
        program = build("dualpipev", ranks=2, microbatches=16)
        pipe = Pipeline(
            nn.Sequential(*wide(4)),
            loss_fn=F.mse_loss,
            schedule=program,
            device=DEVICE,
            overlap=True,
        )
        batch = torch.randn(16 * 64, 512, device=DEVICE, dtype=torch.float64)
        pipe.step(batch, target=batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda._sleep(cycles)
        pipe.step(batch, target=batch)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.01 * peaks[0], peaks
