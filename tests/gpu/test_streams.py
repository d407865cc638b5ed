"""Streams of one device: what overlaps, what is timed, and that the host waits for nothing."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import Pipeline, build
from penstock.schedule.action import Op
from penstock.schedule.rules import COMPUTE
from tests.compare import assert_same, snapshot
from tests.gpu.device import DEVICE, GPU
from tests.models import gpt, token_loss, tokens

pytestmark = GPU


def wide(stages: int, width: int = 512) -> list[nn.Module]:
    """Stages that take a while, and much memory that comes and goes."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
        .double()
        .to(DEVICE)
        for _ in range(stages)
    ]


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


def ready(name: str) -> tuple[Pipeline, Any, Any]:
    program = build(name, ranks=2, microbatches=6)
    model = gpt(max(3, program.num_stages)).to(DEVICE)
    pipe = Pipeline(model, loss_fn=token_loss, schedule=program, device=DEVICE)
    inputs, target = (t.to(DEVICE) for t in tokens(12, 0))
    for _ in range(2):
        pipe.step(inputs, target=target)
    return pipe, inputs, target


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-zb", "zbv", "dualpipev", "po-f"])
def test_the_host_waits_for_nothing_in_a_step(name: str) -> None:
    pipe, inputs, target = ready(name)
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
    pipe, inputs, target = ready("dualpipev")
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
        not torch.equal(tensor, before[name])
        for name, tensor in after.items()
        if name.startswith("gradient")
    ]
    assert all(changed)
