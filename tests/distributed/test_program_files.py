"""Two processes play a program that each has read from a file of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from penstock import (
    PipelineScheduleMulti,
    PipelineStage,
    Schedule1F1B,
    ScheduleProgram,
    save_csv,
)
from tests.processes import run_ranks

DIM = 4
CPU = torch.device("cpu")


def files_of_their_own(rank: int, num_ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(num_ranks)])
    batch, target = torch.randn(4, DIM), torch.randn(4, DIM)
    expected = torch.autograd.grad(
        nn.functional.mse_loss(model(batch), target), [*model.parameters()]
    )
    stage = PipelineStage(model[rank], rank, num_ranks, CPU)
    base = Schedule1F1B(stage, 2, nn.MSELoss())
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        save_csv(base.program, file.name)
        loaded = PipelineScheduleMulti([stage], 2, nn.MSELoss())
        loaded._load_csv(file.name, "compute_comms")
        given = ScheduleProgram([stage], Path(file.name), nn.MSELoss())
    for schedule in (loaded, given):
        stage.submod.zero_grad()
        schedule.step(*((batch,) if rank == 0 else ()), target=target)
        for param, grad in zip(model[rank].parameters(), expected[2 * rank :], strict=False):
            torch.testing.assert_close(param.grad, grad)
    dist.barrier()


def test_files_may_be_called_otherwise_on_every_rank() -> None:
    for outcome in run_ranks(files_of_their_own, 2):
        outcome.result()
