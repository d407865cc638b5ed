"""Short scripts of users, run by two processes: what is the same script on every rank."""

from __future__ import annotations

import functools
import gc
import logging.handlers
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import (
    Pipeline,
    PipelineStage,
    ScheduleForwardOnly,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
)
from tests.processes import run_ranks

DIM = 4
CPU = torch.device("cpu")
mse = nn.functional.mse_loss


def batch() -> Tensor:
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(1))


def make_layers(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num)]


def plain(num: int) -> nn.Sequential:
    """The whole model, with the gradients of its mean loss."""
    model = nn.Sequential(*make_layers(num))
    mse(model(batch()), batch()).backward()
    return model


def is_same(module: nn.Module, wanted: nn.Module) -> bool:
    pairs = zip(module.parameters(), wanted.parameters(), strict=True)
    return all(
        p.grad is not None and q.grad is not None and torch.allclose(p.grad, q.grad, atol=1e-6)
        for p, q in pairs
    )


# --- what each rank does -----------------------------------------------------------------------


def stages_of_all_ranks(schedule: str, num: int) -> list[bool]:
    made: list[weakref.ref[nn.Module]] = []

    def stages() -> list[PipelineStage]:
        layers = make_layers(num)
        made.extend(map(weakref.ref, layers))
        return [PipelineStage(layer, i, num, CPU) for i, layer in enumerate(layers)]

    pipe = Pipeline(stages(), loss_fn=mse, schedule=schedule, n_microbatches=4, timeout_s=20)
    gc.collect()
    held = [i for i, ref in enumerate(made) if ref() is not None]
    loss = pipe.step(batch(), target=batch())
    wanted = plain(num)
    return [
        held == [stage.stage_index for stage in pipe.stages],
        len(held) == num // 2,
        torch.allclose(loss, mse(wanted(batch()), batch())),
        all(is_same(stage.submod, wanted[stage.stage_index]) for stage in pipe.stages),
    ]


def stages_that_share() -> list[bool]:
    """One object in two stages, of which each rank keeps one."""
    first, last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    last.weight = first.weight
    stages = [PipelineStage(layer, i, 2, CPU) for i, layer in enumerate((first, last))]
    pipe = Pipeline(stages, loss_fn=mse, n_microbatches=4, timeout_s=20)
    pipe.step(batch(), target=batch())
    (grad,) = [p.grad for name, p in pipe.named_parameters() if name == "weight"]
    twin = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    for module, source in zip(twin, (first, last), strict=True):
        module.load_state_dict(source.state_dict())
    mse(twin[1](twin[0](batch())), batch()).backward()
    wanted = [layer.weight.grad for layer in twin]
    assert grad is not None and wanted[0] is not None and wanted[1] is not None
    return [torch.allclose(grad, wanted[0] + wanted[1], atol=1e-6)]


def forwards_alone(rank: int, cls: Any, context: Callable[[], Any]) -> list[bool]:
    schedule = cls(PipelineStage(make_layers(2)[rank], rank, 2, CPU), 4, timeout_s=20)
    with context():
        out = [schedule.step(*((batch(),) if rank == 0 else ())) for _ in range(2)][-1]
    if rank == 0:
        return [out is None]
    return [torch.equal(out, torch.cat([plain(2)(rows) for rows in batch().chunk(4)]))]


def peers_in_a_v(rank: int) -> list[bool]:
    """Rank 0 holds stages 0 and 3; by hand stages lie as the schedule has them, or as one says."""
    example = torch.ones(2, DIM)

    def stage(index: int) -> PipelineStage:
        return PipelineStage(
            nn.Linear(DIM, DIM), index, 4, CPU, input_args=example, output_args=example
        )

    stages = [stage(rank), stage(3 - rank)]
    alone = stage(3 - rank)
    turns = [op.peer for op in alone.get_fwd_recv_ops(0)]
    alone.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
    ScheduleZBVZeroBubble(stages, 4, mse, timeout_s=20)
    return [
        turns == [rank],
        [op.peer for op in alone.get_fwd_recv_ops(0)] == [1],
        [op.peer for op in stages[1].get_fwd_recv_ops(0)] == [1],
    ]


def remarks(script: Callable[[], object]) -> list[str]:
    """What is logged meanwhile."""
    told = logging.handlers.BufferingHandler(100)
    told.setLevel(logging.WARNING)
    logging.getLogger("penstock").addHandler(told)
    script()
    logging.getLogger("penstock").removeHandler(told)
    return [record.getMessage() for record in told.buffer]


def batches_that_differ(rank: int) -> list[bool]:
    """As a sampler deals them out; a rank may pass what is not used, and is told once."""

    def train(*inputs: Tensor, later: int = 0) -> None:
        pipe = Pipeline(make_layers(2), loss_fn=mse, split=[1, 1], n_microbatches=2)
        for step in range(6):
            pipe.step(*(each + later * (step > 2) for each in inputs), target=batch())

    same, others = remarks(lambda: train(batch())), remarks(lambda: train(batch() + rank))
    none = remarks(lambda: train(*(() if rank else (batch(),))))
    later = remarks(lambda: train(batch(), later=rank))
    said = "rank 1 was given other inputs than rank 0"
    told = [[said in each for each in found] == [True] * rank for found in (others, later)]
    return [same == none == [], *told]


def one_model_in_two_pipelines(rank: int) -> list[bool]:
    """Cut alike they train the same; cut otherwise, the trained state has to be handed on."""
    model = nn.Sequential(*make_layers(4))

    def made(schedule: str) -> Pipeline:
        return Pipeline(model, loss_fn=mse, schedule=schedule, n_microbatches=2)

    def loss(pipe: Pipeline) -> Tensor:
        pipe.eval(batch(), target=batch())
        return torch.stack(pipe.losses)

    first, alike = made("1f1b"), made("gpipe")
    first.step(batch(), target=batch())
    with torch.no_grad():
        for param in first.parameters():
            param -= param.grad
    other = made("zbv")
    other.load_state_dict(first.state_dict(full=True))
    return [torch.equal(loss(first), loss(alike)), torch.equal(loss(first), loss(other))]


def play(rank: int, num_ranks: int) -> dict[str, list[bool]]:
    every: dict[str, Callable[[], list[bool]]] = {
        "stages of all ranks, 1f1b": lambda: stages_of_all_ranks("1f1b", 2),
        "stages of all ranks, zbv": lambda: stages_of_all_ranks("zbv", 4),
        "stages that share": stages_that_share,
        "forward only": lambda: forwards_alone(rank, ScheduleForwardOnly, torch.enable_grad),
        "forward only, no grad": lambda: forwards_alone(rank, ScheduleForwardOnly, torch.no_grad),
        "gpipe without a loss, no grad": lambda: forwards_alone(rank, ScheduleGPipe, torch.no_grad),
        "peers in a V": lambda: peers_in_a_v(rank),
        "batches that differ": lambda: batches_that_differ(rank),
        "one model in two pipelines": lambda: one_model_in_two_pipelines(rank),
    }
    return {name: script() for name, script in every.items()}


SCRIPTS = (
    "stages of all ranks, 1f1b",
    "stages of all ranks, zbv",
    "stages that share",
    "forward only",
    "forward only, no grad",
    "gpipe without a loss, no grad",
    "peers in a V",
    "batches that differ",
    "one model in two pipelines",
)


@functools.cache
def told() -> list[dict[str, list[bool]]]:
    return [outcome.result() for outcome in run_ranks(play, 2)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_documented_result_on_every_rank(name: str) -> None:
    for rank, right in enumerate(told()):
        assert all(right[name]), f"rank {rank}: {right[name]}"
