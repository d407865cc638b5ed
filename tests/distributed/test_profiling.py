"""A step under torch.profiler: no message is left on its way when the profiler stops."""

from __future__ import annotations

import gc

import torch
from torch import nn

from penstock import PipelineStage, Schedule1F1B
from tests.processes import run_ranks

DIM = 4


def profile_steps(rank: int, num_ranks: int) -> list[bool]:
    """Steps and evaluations, each under a profiler of its own."""
    stage = PipelineStage(nn.Linear(DIM, DIM), rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
    batch = torch.ones(8, DIM)
    seen = []
    for run in (schedule.step, *[schedule.eval] * 8):
        with torch.profiler.profile() as profiler:
            run(*((batch,) if rank == 0 else ()), target=batch)
        # What a message writes to a profiler that is gone shows when memory is next walked.
        gc.collect()
        names = {event.name for event in profiler.events()}
        seen.append(f"penstock.{rank}F3" in names)
    return seen


def test_steps_can_be_profiled_one_by_one() -> None:
    """A send that was waited for in the next step ended its profiler range in freed memory."""
    for outcome in run_ranks(profile_steps, 2, timeout_s=120):
        assert outcome.result() == [True] * 9
