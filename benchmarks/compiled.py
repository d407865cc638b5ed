"""Step times of zero-bubble schedules on compiled blocks, beside torch's best schedule on them.

torch.distributed.pipelining refuses its zero-bubble schedules for compiled stages, so that 1F1B and
interleaved 1F1B are what its users have. All ways train the same eight blocks, in two processes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from benchmarks.figures import Figure
from benchmarks.split_backward import Block
from tests.processes import run_ranks

__all__ = ["measure_compiled_schedules"]

RANKS, BLOCKS, DIM, MICROBATCHES = 2, 8, 512, 8
SHAPE = (2, 128, DIM)  # of a microbatch
BOUND = 0.95
OURS = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
TORCHS = ("Schedule1F1B", "ScheduleInterleaved1F1B")


def measure_compiled_schedules(rounds: int) -> list[Figure]:
    """Our step times over those of torch's faster schedule.

    Args:
        rounds: how often every way is measured.
    """
    times = run_ranks(time_schedules, RANKS, rounds, timeout_s=1800)[0].result()
    best = min(TORCHS, key=lambda name: statistics.median(times[name]))
    figures = []
    for name in OURS:
        ratios = [a / b for a, b in zip(times[name], times[best], strict=True)]
        figures.append(
            Figure.median_of(
                ratios,
                group="step time, compiled blocks of dim 512",
                name=name.removeprefix("Schedule"),
                over=f"torch's {best.removeprefix('Schedule')}",
                bound=BOUND,
            )
        )
    return figures


def time_schedules(rank: int, num_ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each schedule, by round."""
    warnings.simplefilter("ignore")
    ways = {name: _way(name, rank) for name in (*OURS, *TORCHS)}
    expected: list[Tensor] = []
    for step, blocks in ways.values():
        for _ in range(3):
            for block in blocks.values():
                block.zero_grad()
            step()
        found = _gradients(blocks)
        expected = expected or found
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        order.append(order.pop(0))
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            ways[name][0]()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return times


def _way(schedule: str, rank: int) -> tuple[Callable[[], Any], dict[int, nn.Module]]:
    """A step of a schedule, and this rank's blocks by number."""
    source: Any = penstock
    if schedule in TORCHS:
        import torch.distributed.pipelining as source
    virtual = 1 if schedule == "Schedule1F1B" else 2
    num_stages = RANKS * virtual
    program = penstock.build(schedule, ranks=RANKS, microbatches=MICROBATCHES, virtual=virtual)
    per_stage = BLOCKS // num_stages
    blocks: dict[int, nn.Module] = {}
    stages = []
    for stage in program.placement.stages_of(rank):
        for i in range(stage * per_stage, (stage + 1) * per_stage):
            torch.manual_seed(i)
            blocks[i] = Block(DIM, 8)
            if source is penstock:
                penstock.compile_stage(blocks[i])
            else:
                blocks[i].compile()
        module = nn.Sequential(*list(blocks.values())[-per_stage:])
        stages.append(source.PipelineStage(module, stage, num_stages, torch.device("cpu")))
    made = getattr(source, schedule)(
        stages[0] if virtual == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    torch.manual_seed(0)
    inputs = torch.randn(MICROBATCHES * SHAPE[0], *SHAPE[1:])
    target = torch.randn_like(inputs)
    given = (inputs,) if 0 in blocks else ()
    labels = {"target": target, "losses": []} if BLOCKS - 1 in blocks else {}
    return lambda: made.step(*given, **labels, return_outputs=False), blocks


def _gradients(blocks: dict[int, nn.Module]) -> list[Tensor]:
    """The gradients of all blocks, of both ranks."""
    mine = {i: [p.grad for p in block.parameters()] for i, block in blocks.items()}
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    merged = {i: grads for each in everyone for i, grads in each.items()}
    return [grad for i in range(BLOCKS) for grad in merged[i]]
