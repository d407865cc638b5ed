"""Receives from one peer, posted in the order in which the peer sends.

A receive is posted as soon as it is known what will come. Where that is not known yet (the first
message of its shape, or shapes that may always change), a note is read first; the receives behind
it in the queue then wait their turn, so that the order on the wire is kept.
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

# For a microbatch's state, what will come, if known; if not, asked again with the peer's note.
Expect: TypeAlias = Callable[[MicrobatchState, bytes | None], Sequence[TensorMeta] | None]


class DeferredReceive:
    """A message whose receive can't be posted yet."""

    __slots__ = ("_expect", "_inbox", "_receipt", "_state")

    def __init__(self, inbox: RecvQueue, expect: Expect, state: MicrobatchState) -> None:
        self._inbox = inbox
        self._expect = expect
        self._state = state
        self._receipt: PendingReceive | None = None

    def post(self) -> None:
        """Post the receive, reading the peer's note first where that is needed."""
        metas = self._expect(self._state, None)
        if metas is None:
            note = self._inbox.transport.recv_metadata(self._inbox.peer)
            metas = self._expect(self._state, note)
        assert metas is not None
        self._receipt = self._inbox.receive(metas)

    def wait(self) -> Sequence[Tensor]:
        """The tensors, once they are here."""
        while self._receipt is None:
            self._inbox.post_next()
        return self._receipt.wait()


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
        self._waiting: deque[DeferredReceive] = deque()

    def expect(self, expect: Expect, state: MicrobatchState) -> PendingReceive:
        """Announce the next message: its receive is posted now if that is possible."""
        metas = None if self._waiting else expect(state, None)
        if metas is not None:
            return self.receive(metas)
        arrival = DeferredReceive(self, expect, state)
        self._waiting.append(arrival)
        return arrival

    def receive(self, metas: Sequence[TensorMeta]) -> PendingReceive:
        """Post one receive."""
        return self.transport.receive(self.peer, metas, self._device)

    def post_next(self) -> None:
        """Post the oldest receive that is still waiting for its description."""
        self._waiting.popleft().post()
