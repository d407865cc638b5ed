"""The transport interface of the runtime, and the queue of receives from one peer.

The *data plane* moves tensors, the *control plane* bytes and integers, such as metadata. Both
preserve the order of messages between each ordered pair of ranks. ``loopback.py`` is the smallest
transport, ``c10d.py`` that over ``torch.distributed``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._torch_compat import is_shared
from penstock.errors import PenstockError
from penstock.stage.boundary import TensorMeta
from penstock.stage.stage import MicrobatchState

__all__ = ["MIN_REUSED_BYTES", "MetasOf", "PendingReceive", "RecvBuffers", "RecvQueue", "Transport"]

# Smaller buffers are not reused: allocating one costs less than the search, and leaves no gaps.
MIN_REUSED_BYTES = 128 << 10
# Limit on the buffers that are looked at for one that is free.
MAX_LOOKS = 64

PendingReceive: TypeAlias = Callable[[], Sequence[Tensor]]
"""A posted receive. A call waits for the tensors; on CUDA, it makes the current stream wait."""


class Transport(ABC):
    """One rank's connection to the other ranks. By default nothing is awaited and nothing fails.

    Attributes:
        schedule_index: the index of the schedule among all schedules over the same ranks, from 0.
    """

    rank: int
    schedule_index: int = 0
    has_warned = False  # of a batch that differs from the first rank's

    def begin(self, call: str) -> None:
        """Begin a collective call, named alike on every rank."""

    def end(self) -> None:
        """End the call; no waits until the next call."""

    def fail(self, error: BaseException) -> PenstockError | None:
        """Publish this rank's failure; returns the exception to raise in place of ``error`` if
        another rank's failure was the cause."""
        return None

    def close(self) -> None:
        """Stop the threads of this connection."""

    @abstractmethod
    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors to ``peer``, and keep them alive until they are sent."""

    @abstractmethod
    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        """Post a receive of the next tensors from ``peer``."""

    def release(self, peer: int, num_messages: int) -> None:
        """Release the step's first ``num_messages`` messages to ``peer``, which have arrived."""

    def register_peers(self, peers: Iterable[int]) -> None:
        """Register peers for tensor exchange before the next call; both peers must register."""

    def allow_unbounded_sends(self, allowed: bool) -> None:
        """Allow unlimited sends in flight, as needed while receives are posted late."""

    def drain(self) -> None:
        """Wait until all sends have completed."""

    @abstractmethod
    def send_metadata(self, peer: int, data: bytes) -> None:
        """Send metadata to ``peer``."""

    @abstractmethod
    def recv_metadata(self, peer: int) -> bytes:
        """Wait for the next metadata from ``peer``."""

    @abstractmethod
    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        """Broadcast integers from ``root``; every rank passes a list of the same length."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks in place; also a barrier."""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather every rank's bytes, by rank; about a hundred cost one collective, more cost two.

        Raises:
            ScheduleError: the ranks are in different calls; raised on every rank.
        """

    def barrier(self) -> None:
        """Wait for all ranks, so that no rank leaves a step in which another rank fails."""

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Publish failures to the groups that replicate or shard stages, and watch theirs."""

    def waiting_for_replicas(self) -> AbstractContextManager[None]:
        """A watched context in which torch waits for replicas."""
        return nullcontext()


class RecvBuffers:
    """The buffers of a step's receives; each serves again once nothing else refers to its memory.

    The system's allocator would fill the gap of a freed buffer with small tensors, and take new
    memory for the next buffer. A tensor that the user keeps keeps its buffer.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, deque[Tensor]] = defaultdict(deque)

    def take(self, meta: TensorMeta, device: torch.device) -> Tensor:
        """A tensor of uninitialized memory as ``meta`` describes it."""
        num_bytes = meta.num_bytes
        buffers = self._by_size[num_bytes]
        for _ in range(min(len(buffers), MAX_LOOKS)):
            buffers.rotate(-1)
            if not is_shared(buffers[-1]):
                break
        else:
            # More memory is needed: give back what other shapes have left.
            for size, others in self._by_size.items():
                if size != num_bytes:
                    self._by_size[size] = deque(filter(is_shared, others))
            buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        # A tensor of its own, not a view: it gets a version counter and gradients of its own.
        taken = torch.empty(0, dtype=meta.dtype, device=device)
        return taken.set_(buffers[-1].untyped_storage(), 0, meta.wire_shape)  # type: ignore[call-overload, no-any-return]

    def clear(self) -> None:
        """Free the buffers that no tensor uses; the others are freed with their tensors."""
        self._by_size.clear()


MetasOf: TypeAlias = Callable[[MicrobatchState, bytes | None], Sequence[TensorMeta] | None]
"""Returns the cached metadata of a message, or None; then called with the peer's bytes."""


class RecvQueue:
    """The receives from ``peer`` whose metadata is unknown, in the order of the peer's sends.

    A receive is posted directly if its metadata is cached and none is deferred. Otherwise (a new
    shape id of ``shape_ids.py``, resent metadata, dynamic shapes) it is posted late: the wait that
    needs it receives its metadata and posts it. Later receives queue behind it, which preserves
    the order on the wire.
    """

    def __init__(self, transport: Transport, peer: int, device: torch.device) -> None:
        self.peer = peer
        self.deferred: deque[_DeferredReceive] = deque()  # oldest first
        self._transport = transport
        self._device = device

    def defer(self, metas_of: MetasOf, state: MicrobatchState) -> PendingReceive:
        """Defer the receive of the next message until it, or a later receive, is waited for."""
        self.deferred.append(_DeferredReceive(metas_of, state))
        return partial(self._wait, self.deferred[-1])

    def _wait(self, receive: _DeferredReceive) -> Sequence[Tensor]:
        """Post ``receive`` and the ones before it, and wait for its tensors."""
        while receive.posted is None:
            oldest = self.deferred.popleft()
            metas = oldest.metas_of(oldest.state, None)
            if metas is None:
                data = self._transport.recv_metadata(self.peer)
                metas = oldest.metas_of(oldest.state, data)
            assert metas is not None
            oldest.posted = self._transport.receive(self.peer, metas, self._device)
        return receive.posted()


@dataclass(slots=True)
class _DeferredReceive:
    metas_of: MetasOf
    state: MicrobatchState
    posted: PendingReceive | None = None
