"""A queue that posts receives from one peer in the order of the peer's sends.

A receive is posted as soon as its metadata is cached. Otherwise (the first message of a shape, or
dynamic shapes) the receive is deferred until its metadata arrives. Later receives wait behind it in
the queue, which preserves the order on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.runtime.comm.base import PendingReceive, Transport
from penstock.stage.boundary import TensorMeta
from penstock.stage.stage import MicrobatchState

__all__ = ["DeferredReceive", "Expect", "RecvQueue"]

# Returns cached metadata of a message, or None; then called again with the peer's bytes.
Expect: TypeAlias = Callable[[MicrobatchState, bytes | None], Sequence[TensorMeta] | None]


class DeferredReceive:
    """A receive that waits for its metadata, or for an earlier receive."""

    __slots__ = ("_expect", "_pending", "_queue", "_state")

    def __init__(self, queue: RecvQueue, expect: Expect, state: MicrobatchState) -> None:
        self._queue = queue
        self._expect = expect
        self._state = state
        self._pending: PendingReceive | None = None

    def post(self) -> None:
        """Post the receive; waits for its metadata if necessary."""
        metas = self._expect(self._state, None)
        if metas is None:
            data = self._queue.transport.recv_metadata(self._queue.peer)
            metas = self._expect(self._state, data)
        assert metas is not None
        self._pending = self._queue.receive(metas)

    def wait(self) -> Sequence[Tensor]:
        """Wait for the tensors."""
        while self._pending is None:
            self._queue.post_next()
        return self._pending.wait()


class RecvQueue:
    """The receives from one peer.

    Args:
        transport: this rank's connection.
        peer: the rank that sends.
        device: the device of the receive buffers.

    Attributes:
        deferred: the receives that wait for metadata, in order; without any, the receive of cached
            metadata is posted at once.
    """

    def __init__(self, transport: Transport, peer: int, device: torch.device) -> None:
        self.transport = transport
        self.peer = peer
        self._device = device
        self.deferred: deque[DeferredReceive] = deque()

    def defer(self, expect: Expect, state: MicrobatchState) -> DeferredReceive:
        """Defer the receive of the next message until its metadata and earlier receives allow."""
        receive = DeferredReceive(self, expect, state)
        self.deferred.append(receive)
        return receive

    def receive(self, metas: Sequence[TensorMeta]) -> PendingReceive:
        """Post one receive."""
        return self.transport.receive(self.peer, metas, self._device)

    def post_next(self) -> None:
        """Post the oldest deferred receive."""
        self.deferred.popleft().post()
