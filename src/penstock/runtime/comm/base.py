"""How ranks reach each other: the protocol that the runtime speaks, whatever lies below.

Two planes. Tensors travel on the *data plane*: between each ordered pair of ranks in the order in
which they are sent. Notes (short byte strings: descriptions, agreements) travel on the *control
plane*, likewise in order. Nothing here knows stages, microbatches or programs.
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
    """A receive that has been posted."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors, once they have come (on CUDA: once the current stream may use them)."""
        ...


class Transport(Protocol):
    """One rank's connection to the others.

    Attributes:
        rank: this rank, from 0.
        num_ranks: how many there are.
        number: which of the schedules over these ranks it serves, from 0.
    """

    rank: int
    num_ranks: int
    number: int

    def begin(self, what: str) -> None:
        """A call begins: every rank makes it, so that what takes all of them can be set up.

        Args:
            what: the call, as a message would name it; the same on every rank.
        """
        ...

    def end(self) -> None:
        """The step is over; nothing is waited for until the next one."""
        ...

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors to ``peer``; held until they are gone, then dropped."""
        ...

    def release(self, peer: int, num_messages: int) -> None:
        """Let go of the first ``num_messages`` messages that went to ``peer`` in this step: they
        have arrived."""
        ...

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        """Post the receive of the next tensors from ``peer``, into buffers made now."""
        ...

    def send_metadata(self, peer: int, note: bytes) -> None:
        """Send a note to ``peer``."""
        ...

    def recv_metadata(self, peer: int) -> bytes:
        """The next note from ``peer``; blocks until it is here."""
        ...

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        """``numbers`` as ``root`` has them; every rank passes equally many, and blocks."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` on every rank by the sum of all; waits for all, as ``barrier``."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here, so that none leaves a step in which another one fails."""
        ...

    def all_gather_ints(self, number: int) -> list[int]:
        """Every rank's number, by rank; every rank calls it."""
        ...

    def all_gather_bytes(self, note: bytes) -> list[bytes]:
        """Every rank's note, by rank; every rank calls it."""
        ...

    def register_peers(self, peers: Iterable[int]) -> None:
        """Messages will go to and come from these ranks, each of which is told so as well: be
        connected with them before the next step."""
        ...

    def allow_unbounded_sends(self, relaxed: bool) -> None:
        """Whether sends may pile up: while receives are posted late, waiting for one could
        block both ends."""
        ...

    def drain(self) -> None:
        """Wait until all that was sent is gone."""
        ...

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Share failures with the ranks of these groups, too: stages here are replicated or
        sharded over them."""
        ...

    def waiting_for_replicas(self) -> AbstractContextManager[None]:
        """What is waited for within is those ranks: by torch, under the eye of this transport."""
        ...

    def fail(self, error: BaseException) -> PenstockError | None:
        """This rank has met ``error``: tell the others, or learn who failed first.

        Returns:
            What to raise here: another rank's failure, where that was the cause; None where the
            error is this rank's own.
        """
        ...

    def close(self) -> None:
        """Let go of threads and groups made for this connection."""
        ...


def empty_tensors(metas: Sequence[TensorMeta], device: torch.device) -> list[Tensor]:
    """Uninitialised tensors for these to arrive in."""
    return [torch.empty(meta.wire_shape, dtype=meta.dtype, device=device) for meta in metas]
