"""Measured latency and bandwidth between neighbouring ranks.

round 0   0 ↔ 1   2 ↔ 3   4 ↔ 5     a small message there and back, then a large one
round 1       1 ↔ 2   3 ↔ 4
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Link", "measure_link"]

LARGE_BYTES = 1 << 20
# The number of round trips; the fastest counts, since a rank may have waited in the others.
NUM_TRIPS = 5
# Lower bound on the bandwidth term's share of a large message's time.
MIN_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest connection between neighbouring ranks.

    Args:
        latency_s: the time of the smallest message, in seconds.
        bandwidth: bytes per second, in addition to the latency.
    """

    latency_s: float
    bandwidth: float


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Time messages between neighbours; a collective call with the same result on all ranks.

    Args:
        group: the ranks.
        device: the device of the tensors.
    """
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (1, LARGE_BYTES)]
    slowest = torch.zeros(len(messages), dtype=torch.float64, device=device)
    for parity in (0, 1):
        starts = group.rank() % 2 == parity
        peer = group.rank() + (1 if starts else -1)
        if 0 <= peer < group.size():
            times = [_trip_s(group, message, peer, starts=starts) for message in messages]
            slowest = slowest.max(torch.tensor(times, dtype=torch.float64, device=device))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    small_s, large_s = slowest.tolist()
    # On a busy machine the small message may have taken as long as the large one.
    bytes_s = max(large_s - small_s, MIN_SHARE * large_s)
    return Link(latency_s=small_s, bandwidth=LARGE_BYTES / bytes_s)


def _trip_s(group: dist.ProcessGroup, message: Tensor, peer: int, *, starts: bool) -> float:
    """The one-way time of a message, in seconds."""
    best_s = float("inf")
    for _ in range(1 + NUM_TRIPS):  # the first message makes the connection
        started = time.perf_counter()
        for sends in (starts, not starts):
            move = group.send if sends else group.recv
            move([message], peer, 0).wait()
            if message.device.type != "cpu":
                torch.accelerator.synchronize(message.device)
        best_s = min(best_s, (time.perf_counter() - started) / 2)
    return best_s
