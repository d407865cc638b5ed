"""The protocol between ranks that the runtime speaks over any transport.

Two planes. Tensors travel on the *data plane*, between each ordered pair of ranks in the order in
which they are sent. Bytes and integers (metadata, agreements) travel on the *control plane*,
likewise in order. The protocol knows no stages, microbatches or programs.

A new transport implements ``Transport``: ``loopback.py`` is the smallest one; ``c10d.py`` is the
base of those over ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PenstockError
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["PendingReceive", "Transport", "empty_tensors"]


class PendingReceive(Protocol):
    """A posted receive."""

    def wait(self) -> Sequence[Tensor]:
        """Wait for the tensors; on CUDA, let the current stream wait for them."""
        ...


class Transport(Protocol):
    """One rank's connection to the other ranks.

    Attributes:
        rank: this rank, from 0.
        num_ranks: the number of ranks.
        number: the number of its schedule among those over the same ranks, from 0.
    """

    rank: int
    num_ranks: int
    number: int

    def begin(self, what: str) -> None:
        """Begin a call of all ranks, and connect them at the first one.

        Args:
            what: the call as messages name it; the same on every rank.
        """
        ...

    def end(self) -> None:
        """End the call; nothing is waited for until the next one."""
        ...

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors to ``peer``; they are held until they are sent."""
        ...

    def release(self, peer: int, num_messages: int) -> None:
        """Drop the first ``num_messages`` messages of this step to ``peer``, which arrived."""
        ...

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        """Post the receive of the next tensors from ``peer``, into new buffers."""
        ...

    def send_metadata(self, peer: int, data: bytes) -> None:
        """Send bytes to ``peer``."""
        ...

    def recv_metadata(self, peer: int) -> bytes:
        """Wait for the next bytes from ``peer``."""
        ...

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        """Return the integers of ``root``; every rank passes equally many."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` by the sum over all ranks; waits for all, as ``barrier`` does."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks, so that none leaves a step in which another one fails."""
        ...

    def all_gather_ints(self, number: int) -> list[int]:
        """Return every rank's integer, by rank.

        Raises:
            ScheduleError: the ranks are in different calls; the same on every rank.
        """
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; raises as ``all_gather_ints``."""
        ...

    def register_peers(self, peers: Iterable[int]) -> None:
        """Announce ranks to exchange tensors with, before the next call; both ends do so."""
        ...

    def allow_unbounded_sends(self, allowed: bool) -> None:
        """Let sends pile up without waiting for one. While receives are posted late, because
        their metadata is not known yet, such a wait could block both ends."""
        ...

    def drain(self) -> None:
        """Wait until everything is sent."""
        ...

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Share failures with the ranks of groups that replicate or shard stages."""
        ...

    def waiting_for_replicas(self) -> AbstractContextManager[None]:
        """Let the watchdog watch a block in which torch waits for replicas."""
        ...

    def fail(self, error: BaseException) -> PenstockError | None:
        """Publish this rank's failure, or find the rank that failed first.

        Returns:
            The exception to raise here: another rank's failure, if that was the cause; None if
            the cause is ``error`` itself.
        """
        ...

    def close(self) -> None:
        """End the threads of this connection."""
        ...


def empty_tensors(metas: Sequence[TensorMeta], device: torch.device) -> list[Tensor]:
    """Uninitialised tensors to receive into."""
    return [torch.empty(meta.wire_shape, dtype=meta.dtype, device=device) for meta in metas]
