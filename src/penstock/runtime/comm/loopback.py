"""The transport within one process and one thread: messages wait in lists.

The runtime interleaves the ranks such that each send precedes its receive
(``check.global_order``). A receive before its send is therefore an internal error.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock.errors import InternalError
from penstock.runtime.comm.base import PendingReceive, Transport
from penstock.stage.boundary import TensorMeta

__all__ = ["LoopbackTransport", "loopback"]


@dataclass(slots=True)
class _Edge:
    """The messages from one rank to another."""

    # By message number, since receives may be posted early and awaited out of order.
    tensors: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    num_sent: int = 0
    num_posted: int = 0
    metadata: deque[bytes] = field(default_factory=deque)

    def wait(self, number: int) -> Sequence[Tensor]:
        if number not in self.tensors:
            raise InternalError(f"message {number} is waited for before it is sent")
        return self.tensors.pop(number)


class LoopbackTransport(Transport):
    """One rank's transport, made by ``loopback``. One process speaks for all ranks, so that
    collectives return its own value."""

    def __init__(self, edges: defaultdict[tuple[int, int], _Edge], rank: int) -> None:
        self.rank = rank
        self._edges = edges  # by sending and receiving rank

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        edge = self._edges[self.rank, peer]
        edge.tensors[edge.num_sent] = tensors
        edge.num_sent += 1

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        edge = self._edges[peer, self.rank]
        edge.num_posted += 1
        return partial(edge.wait, edge.num_posted - 1)

    def send_metadata(self, peer: int, data: bytes) -> None:
        self._edges[self.rank, peer].metadata.append(data)

    def recv_metadata(self, peer: int) -> bytes:
        return self._edges[peer, self.rank].metadata.popleft()

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        return list(numbers)

    def all_reduce(self, tensor: Tensor) -> None:
        """Does nothing: one tensor holds the sum of all ranks."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


def loopback(num_ranks: int) -> list[LoopbackTransport]:
    """Make the transports of ``num_ranks`` ranks in this process."""
    edges: defaultdict[tuple[int, int], _Edge] = defaultdict(_Edge)
    return [LoopbackTransport(edges, rank) for rank in range(num_ranks)]
