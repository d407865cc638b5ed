"""The transport interface of the runtime.

A transport has two planes. The *data plane* moves tensors. The *control plane* moves bytes and
integers, such as metadata and consistency checks. Both preserve the order of messages between each
ordered pair of ranks. The interface does not depend on stages, microbatches or programs.

A new transport implements ``Transport``. ``loopback.py`` is the smallest example; ``c10d.py`` is
the base of the transports over ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PenstockError
from penstock.stage.boundary import TensorMeta

__all__ = ["PendingReceive", "Transport", "empty_tensors"]


class PendingReceive(Protocol):
    """A posted receive."""

    def wait(self) -> Sequence[Tensor]:
        """Wait for the tensors; on CUDA, make the current stream wait."""
        ...


class Transport(Protocol):
    """One rank's connection to the other ranks.

    Attributes:
        rank: this rank, from 0.
        num_ranks: the number of ranks.
        number: the index of the schedule among all schedules over the same ranks, from 0.
    """

    rank: int
    num_ranks: int
    number: int

    def begin(self, what: str) -> None:
        """Begin a collective call; the first one connects the ranks.

        Args:
            what: the call's name in messages; the same on every rank.
        """
        ...

    def end(self) -> None:
        """End the call; no waits until the next call."""
        ...

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors to ``peer``, and keep them alive until they are sent."""
        ...

    def release(self, peer: int, num_messages: int) -> None:
        """Release the step's first ``num_messages`` messages to ``peer``, which have arrived."""
        ...

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        """Post a receive of the next tensors from ``peer`` into new buffers."""
        ...

    def send_metadata(self, peer: int, data: bytes) -> None:
        """Send metadata to ``peer``."""
        ...

    def recv_metadata(self, peer: int) -> bytes:
        """Wait for the next metadata from ``peer``."""
        ...

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        """Broadcast integers from ``root``; every rank passes a list of the same length."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks in place; also a barrier."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks, so that no rank leaves a step in which another rank fails."""
        ...

    def all_gather_ints(self, number: int) -> list[int]:
        """Gather every rank's integer, by rank.

        Raises:
            ScheduleError: the ranks are in different calls; raised on every rank.
        """
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather every rank's bytes, by rank; raises as ``all_gather_ints``."""
        ...

    def register_peers(self, peers: Iterable[int]) -> None:
        """Register peers for tensor exchange before the next call; both peers must register."""
        ...

    def allow_unbounded_sends(self, allowed: bool) -> None:
        """Allow unlimited sends in flight. While receives are posted late, because their metadata
        is unknown, waiting for a send could block both peers."""
        ...

    def drain(self) -> None:
        """Wait until all sends have completed."""
        ...

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Publish failures to the groups that replicate or shard stages, and watch theirs."""
        ...

    def waiting_for_replicas(self) -> AbstractContextManager[None]:
        """A watched context in which torch waits for replicas."""
        ...

    def fail(self, error: BaseException) -> PenstockError | None:
        """Publish this rank's failure, or find the first cause.

        Returns:
            The exception to raise if another rank's failure was the cause; None if ``error``
            itself is the cause.
        """
        ...

    def close(self) -> None:
        """Stop the threads of this connection."""
        ...


def empty_tensors(metas: Sequence[TensorMeta], device: torch.device) -> list[Tensor]:
    """Allocate uninitialized receive buffers."""
    return [torch.empty(meta.wire_shape, dtype=meta.dtype, device=device) for meta in metas]
