"""How fast messages are between neighbouring ranks, measured.

    round 0   0 ↔ 1   2 ↔ 3   4 ↔ 5     a small message there and back, then a large one
    round 1       1 ↔ 2   3 ↔ 4

It knows ranks and devices, and nothing of what the messages are for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Link", "measure_link"]

LARGE_BYTES = 1 << 20
# How often a message goes there and back; the quickest counts, since others had to wait.
NUM_TRIPS = 5
# Of a large message's time, what is its bytes' at the least.
MIN_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest connection between neighbouring ranks.

    Args:
        latency_s: how long the smallest message takes, in seconds.
        bandwidth: how many more bytes a message may have for each second more.
    """

    latency_s: float
    bandwidth: float


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Send messages to and fro; every rank calls it, and comes to the same figures.

    Args:
        group: the ranks.
        device: where the tensors that they send each other live.
    """
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (1, LARGE_BYTES)]
    slowest = torch.zeros(len(messages), dtype=torch.float64, device=device)
    for first in (0, 1):
        asks = group.rank() % 2 == first
        peer = group.rank() + (1 if asks else -1)
        if 0 <= peer < group.size():
            times = [_trip_s(group, message, peer, asks=asks) for message in messages]
            slowest = slowest.max(torch.tensor(times, dtype=torch.float64, device=device))
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([slowest], options).wait()
    small_s, large_s = slowest.tolist()
    # On a busy machine the small one may have taken as long.
    bytes_s = max(large_s - small_s, MIN_SHARE * large_s)
    return Link(latency_s=small_s, bandwidth=LARGE_BYTES / bytes_s)


def _trip_s(group: dist.ProcessGroup, message: Tensor, peer: int, *, asks: bool) -> float:
    """How long a message takes one way, in seconds."""
    best_s = float("inf")
    for _ in range(1 + NUM_TRIPS):  # the first one makes the connection
        started = time.perf_counter()
        for sends in (asks, not asks):
            move = group.send if sends else group.recv
            move([message], peer, 0).wait()
            if message.device.type != "cpu":
                torch.accelerator.synchronize(message.device)
        best_s = min(best_s, (time.perf_counter() - started) / 2)
    return best_s
