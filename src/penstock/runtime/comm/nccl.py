"""What NCCL asks of a transport beside what gloo does.

A connection between two ranks is made when both first send or receive over it, and until then the
host waits. In a step, ranks would wait so for each other in circles: one in its first send, the
other in another one. So connections are made before the first step, pair by pair in one order:

    rank 0   0-1  0-2  0-3
    rank 1   0-1            1-2  1-3
    rank 2        0-2       1-2       2-3
    rank 3             0-3       1-3  2-3

Of the pairs that are not made yet the first in this order is always one that both ranks are at.
After that the host waits for nothing; works only order streams. It therefore runs ahead of the
device, and what it has sent is held until the device has sent it.

Where the device has but one queue for all streams (``CUDA_DEVICE_MAX_CONNECTIONS=1``), what waits
at its head holds up all behind it: a receive would hold up the compute that the peer waits for. So
messages then go in one order per pair of ranks, as over one channel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.schedule.channels import Channels

__all__ = ["as_wire", "channels_of", "make_connections", "pairs_of"]

# The kinds of numbers that NCCL moves by name. All others it moves as bytes.
_KNOWN = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    }
)


def as_wire(tensor: Tensor) -> Tensor:
    """A contiguous tensor as NCCL moves it: the same memory, wherever it is not conjugated.

    Example:
        >>> as_wire(torch.zeros(3, dtype=torch.complex64)).shape
        torch.Size([24])
    """
    if tensor.dtype in _KNOWN:
        return tensor
    return tensor.resolve_conj().reshape(-1).view(torch.uint8)


def channels_of(device: torch.device) -> Channels:
    """How messages travel between the ranks of programs that run on such a device."""
    has_one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return Channels(per_pair=device.type == "cuda" and has_one_queue)


def pairs_of(rank: int, peers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The pairs of a rank with its peers, in the order in which all ranks make connections.

    Example:
        >>> list(pairs_of(1, [3, 0, 2]))
        [(0, 1), (1, 2), (1, 3)]
    """
    return iter(sorted((min(rank, peer), max(rank, peer)) for peer in peers))


def make_connections(
    rank: int,
    peers: Iterable[int],
    up: dist.ProcessGroup,
    down: dist.ProcessGroup,
    device: torch.device,
    watched: Callable[[Callable[[], object], int], None],
) -> None:
    """Make the connections with ``peers``, both ways: every one of them does so, too.

    Args:
        rank: this rank.
        peers: the ranks to connect with.
        up: the group over which lower ranks send to higher ones.
        down: the group over which higher ranks send to lower ones.
        device: where tensors live.
        watched: is called with what to call, and the peer that it may wait for.
    """
    scrap = torch.zeros(1, device=device)
    for low, high in pairs_of(rank, peers):
        peer = high if rank == low else low
        for group, source in ((up, low), (down, high)):
            exchange = group.send if rank == source else group.recv
            watched(partial(_complete, exchange, scrap, peer), peer)


def _complete(exchange: Callable[..., Any], tensor: Tensor, peer: int) -> None:
    exchange([tensor], peer, 0).wait()
