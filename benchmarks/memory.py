"""Peak memory of 1F1B over the number of microbatches, with 8 MB across every boundary.

The stages keep nothing for their backward, so that what is measured is what the runtime holds:
receive buffers, held sends, outputs and gradients on their way. Each measurement is the growth of
the process's peak resident memory over what it held before the schedule was made, with the
system's allocator as it is. Linux only.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from benchmarks.figures import Figure
from tests.processes import run_ranks

__all__ = ["measure_memory"]

ROWS, WIDTH = 512, 4096
MEGABYTES = ROWS * WIDTH * 4 / 2**20
FEW, SOME, MANY = 8, 64, 256
RANKS, REPEATS = 2, 3


class Shift(nn.Module):
    """Adds a parameter: autograd keeps no tensor for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.bias


def measure_memory() -> list[Figure]:
    """Penstock's growth with the microbatches, and what it holds over what torch holds."""
    group = f"peak memory, 1F1B, {MEGABYTES:.0f} MB per message"
    few, many = (_peaks("penstock", num) for num in (FEW, MANY))
    ours, torchs = (_peaks(library, SOME) for library in ("penstock", "torch"))
    figures = []
    for rank in range(RANKS):
        figures += [
            Figure(
                group=group,
                name=f"M = {MANY}, rank {rank}",
                over=f"M = {FEW}",
                value=many[rank] / few[rank],
                bound=1.05,
            ),
            Figure(
                group=group,
                name=f"M = {SOME}, rank {rank}",
                over="torch",
                value=ours[rank] / torchs[rank],
                bound=0.3,
            ),
            Figure(
                group=group,
                name=f"M = {MANY}, rank {rank}",
                over="before the step",
                value=many[rank] / 2**20,
                unit="MB",
            ),
        ]
    return figures


def _peaks(library: str, num_microbatches: int) -> list[int]:
    """The median peak of each rank, in bytes: how much of a message is there in time varies."""
    runs = [
        run_ranks(_peak_bytes, RANKS, library, num_microbatches, timeout_s=600)
        for _ in range(REPEATS)
    ]
    return [median(outcome.result() for outcome in of_rank) for of_rank in zip(*runs, strict=True)]


# --- in each process -----------------------------------------------------------------------------


def _peak_bytes(rank: int, num_ranks: int, library: str, num_microbatches: int) -> int:
    warnings.simplefilter("ignore")
    source: Any = penstock
    if library == "torch":
        import torch.distributed.pipelining as source
    # One microbatch's memory, seen as all of them: the user's batch is not what is measured.
    inputs = torch.zeros(1, ROWS, WIDTH).expand(num_microbatches, -1, -1)
    target = torch.zeros(num_microbatches, 1)
    module = Shift()
    # Touched before: libraries load and threads start at the first of everything.
    (module(inputs[:1]).mean()).backward()
    dist.barrier()
    before = _reset_peak()
    stage = source.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = source.Schedule1F1B(stage, num_microbatches, loss_fn=_loss)
    # As many microbatches in all, however many a step has. What is resident of a buffer depends on
    # how much of its message has come, so a peak over few is lower by chance.
    for _ in range(2 * MANY // num_microbatches):
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=target, losses=[], return_outputs=False)
    peak = _status_bytes("VmHWM") - before
    dist.barrier()
    return peak


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :1, :1].sum() - target.sum()) ** 2


def _reset_peak() -> int:
    """Forget the peak so far; returns what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; this measurement needs Linux")
