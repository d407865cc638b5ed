"""Receives from one peer, posted in the order in which the peer sends.

A receive is posted as soon as the metadata of its message is known. Unknown metadata (the first
message of its shape, or shapes that may always change) is waited for first; the receives behind it
wait in the queue, which keeps the order on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.runtime.comm.base import PendingReceive, Transport
from penstock.stage.microbatch_state import MicrobatchState
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["DeferredReceive", "RecvQueue"]

# The metadata of a microbatch's message, if known; if not, called again with the peer's bytes.
Expect: TypeAlias = Callable[[MicrobatchState, bytes | None], Sequence[TensorMeta] | None]


class DeferredReceive:
    """A receive that can't be posted yet."""

    __slots__ = ("_expect", "_pending", "_queue", "_state")

    def __init__(self, queue: RecvQueue, expect: Expect, state: MicrobatchState) -> None:
        self._queue = queue
        self._expect = expect
        self._state = state
        self._pending: PendingReceive | None = None

    def post(self) -> None:
        """Post the receive, waiting for its metadata if that is needed."""
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
        device: where the tensors go.
    """

    def __init__(self, transport: Transport, peer: int, device: torch.device) -> None:
        self.transport = transport
        self.peer = peer
        self._device = device
        self._deferred: deque[DeferredReceive] = deque()

    def expect(self, expect: Expect, state: MicrobatchState) -> PendingReceive:
        """Post the receive of the next message, or defer it until its metadata is known."""
        metas = None if self._deferred else expect(state, None)
        if metas is not None:
            return self.receive(metas)
        receive = DeferredReceive(self, expect, state)
        self._deferred.append(receive)
        return receive

    def receive(self, metas: Sequence[TensorMeta]) -> PendingReceive:
        """Post one receive."""
        return self.transport.receive(self.peer, metas, self._device)

    def post_next(self) -> None:
        """Post the oldest deferred receive."""
        self._deferred.popleft().post()
