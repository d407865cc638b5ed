"""All ranks on one device: the gradients of the plain loop on that device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import build, draw_step_seed, microbatch_rng
from penstock.schedule.passes import offload, recompute
from tests.gpu.device import DEVICE, GPU, on_device, train, twins
from tests.models import CASES, DIM, convnet, features, gpt, images, mlp, token_loss, tokens
from tests.sequences import causal, compare_steps

pytestmark = GPU

FAMILIES = [each for each in penstock.schedules() if each.name != "forward-only"]
ALL = [
    pytest.param(each, ranks, id=f"{each.name}-P{ranks}") for each in FAMILIES for ranks in (2, 4)
]


def program_of(each: Any, ranks: int) -> penstock.Program:
    ranks, microbatches = each.nearest(ranks, 8)
    return build(each.name, ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize(("each", "ranks"), ALL)
def test_every_family_trains_right(each: Any, ranks: int) -> None:
    program = program_of(each, ranks)
    if "splits" in each.options:
        layers = causal(max(4, program.num_stages)).to(DEVICE)
        compare_steps(layers, program, length=6, rows=2, device=DEVICE)
        return
    stages = program.placement.num_model_stages
    both = twins(gpt(max(3, stages)), token_loss, program)
    train(both, tokens, rows=2 * program.num_microbatches)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "zbv", "dualpipev"])
def test_buffers_are_written_once(name: str) -> None:
    program = build(name, ranks=2, microbatches=4)
    both = twins(convnet(max(3, program.num_stages)), F.mse_loss, program)
    train(both, images, rows=8)


@pytest.mark.parametrize("way", [recompute, offload])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
def test_recomputed_and_offloaded_activations_train_right(name: str, way: Any) -> None:
    """Offloaded activations go through pinned memory, on streams beside the compute."""
    program = way(build(name, ranks=2, microbatches=6))
    both = twins(gpt(max(3, program.num_stages)), token_loss, program)
    train(both, tokens, rows=12, steps=6)


def test_offloaded_activations_are_gone_from_the_device() -> None:
    peaks = {}
    for way in (None, offload):
        program = build("gpipe", ranks=1, microbatches=8)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)])
        pipe = penstock.Pipeline(
            [model], loss_fn=F.mse_loss, schedule=way(program) if way else program, device=DEVICE
        )
        batch = torch.randn(8 * 2048, 1024, device=DEVICE)
        pipe.step(batch, target=batch)  # makes gradients, and what libraries keep
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipe.step(batch, target=batch)
        torch.cuda.synchronize()
        peaks[way] = torch.cuda.max_memory_allocated() - before
        del pipe, model, batch
    # Copies run beside the compute: some microbatches are on both sides at once.
    assert peaks[offload] < 0.75 * peaks[None]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
def test_masks_are_the_plain_loops(name: str) -> None:
    """With ``microbatch_rng`` the device's generator draws what it draws in the plain loop."""
    num = 4
    program = build(name, ranks=2, microbatches=num)
    layers = [
        nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.4)) for _ in range(program.num_stages)
    ]
    both = twins(nn.Sequential(*layers), F.mse_loss, program, microbatch_rng=True)
    inputs, target = on_device(features(2 * num, 0))
    torch.manual_seed(5)
    expected, seed = [], draw_step_seed()
    for number, (x, wanted) in enumerate(zip(inputs.chunk(num), target.chunk(num), strict=True)):
        with microbatch_rng(seed, number, device=DEVICE):
            loss = F.mse_loss(both.plain(x), wanted)
        (loss / num).backward()
        expected.append(loss.detach())
    state = torch.cuda.get_rng_state()
    torch.manual_seed(5)
    both.pipe.step(inputs, target=target)
    torch.testing.assert_close(both.pipe.losses, expected, rtol=1e-12, atol=0)
    both.compare()
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_device_may_be_named_without_its_number_and_be_the_default() -> None:
    program = build("zb-h1", ranks=2, microbatches=4)
    both = twins(mlp(2), F.mse_loss, program)
    assert both.pipe.stages[0].device == torch.device(DEVICE.type, torch.cuda.current_device())
    inputs, target = on_device(features(8, 0))
    with DEVICE:
        both.step(inputs, target=target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_cross(dtype: torch.dtype) -> None:
    case = CASES["mlp"]
    pipe = penstock.Pipeline(
        case.make(4).to(DEVICE).to(dtype),
        loss_fn=case.loss_fn,
        schedule="1f1b",
        ranks=4,
        n_microbatches=4,
        device=DEVICE,
    )
    inputs, target = (t.to(DEVICE).to(dtype) for t in features(8, 0))
    loss = pipe.step(inputs, target=target)
    assert loss.dtype is dtype and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pipe.parameters())
