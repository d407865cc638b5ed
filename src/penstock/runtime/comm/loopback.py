"""The transport within one process and one thread: messages wait in lists.

The runtime interleaves the ranks such that each send precedes its receive
(``check.global_order``). A receive before its send is therefore an internal error.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import InternalError, PenstockError
from penstock.stage.boundary import TensorMeta

__all__ = ["LoopbackTransport", "loopback"]

Edge = tuple[int, int]  # (sending rank, receiving rank)


@dataclass(slots=True)
class _Mailboxes:
    """The messages of all ranks, by pair of ranks."""

    # By message number, since receives may be posted early and awaited out of order.
    tensors: defaultdict[Edge, dict[int, Sequence[Tensor]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    num_sent: defaultdict[Edge, int] = field(default_factory=lambda: defaultdict(int))
    num_posted: defaultdict[Edge, int] = field(default_factory=lambda: defaultdict(int))
    metadata: defaultdict[Edge, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    # Broadcast integers, from the root to each later rank.
    ints: defaultdict[Edge, deque[list[int]]] = field(default_factory=lambda: defaultdict(deque))


class _LoopbackReceive:
    __slots__ = ("_edge", "_mailboxes", "_number")

    def __init__(self, mailboxes: _Mailboxes, edge: Edge, number: int) -> None:
        self._mailboxes = mailboxes
        self._edge = edge
        self._number = number

    def wait(self) -> Sequence[Tensor]:
        try:
            return self._mailboxes.tensors[self._edge].pop(self._number)
        except KeyError:
            source, target = self._edge
            raise InternalError(
                f"message {self._number} from rank {source} to rank {target} is waited for "
                "before it is sent"
            ) from None


class LoopbackTransport:
    """One rank's transport, made by ``loopback``; see ``base.Transport``.

    All ranks are built from the same arguments, so that collectives return this rank's own value.
    """

    def __init__(self, mailboxes: _Mailboxes, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.number = 0
        self._mailboxes = mailboxes

    def begin(self, what: str) -> None: ...

    def end(self) -> None: ...

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        edge = (self.rank, peer)
        number = self._mailboxes.num_sent[edge]
        self._mailboxes.num_sent[edge] = number + 1
        self._mailboxes.tensors[edge][number] = tensors

    def release(self, peer: int, num_messages: int) -> None: ...

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> _LoopbackReceive:
        edge = (peer, self.rank)
        number = self._mailboxes.num_posted[edge]
        self._mailboxes.num_posted[edge] = number + 1
        return _LoopbackReceive(self._mailboxes, edge, number)

    def send_metadata(self, peer: int, data: bytes) -> None:
        self._mailboxes.metadata[self.rank, peer].append(data)

    def recv_metadata(self, peer: int) -> bytes:
        return self._mailboxes.metadata[peer, self.rank].popleft()

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        if self.rank != root:
            return self._mailboxes.ints[root, self.rank].popleft()
        for peer in range(self.num_ranks):
            if peer != root:
                self._mailboxes.ints[root, peer].append(list(numbers))
        return list(numbers)

    def all_reduce(self, tensor: Tensor) -> None:
        # Ranks run in turn, so that an earlier rank would need the tensor of a later one.
        raise InternalError("ranks in one process sum by themselves")

    def barrier(self) -> None: ...

    def all_gather_ints(self, number: int) -> list[int]:
        return [number] * self.num_ranks

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.num_ranks

    def register_peers(self, peers: Iterable[int]) -> None: ...

    def allow_unbounded_sends(self, allowed: bool) -> None: ...

    def drain(self) -> None: ...

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None: ...

    def waiting_for_replicas(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fail(self, error: BaseException) -> PenstockError | None:
        return None

    def close(self) -> None: ...


def loopback(num_ranks: int) -> list[LoopbackTransport]:
    """Make the transports of ``num_ranks`` ranks in this process."""
    mailboxes = _Mailboxes()
    return [LoopbackTransport(mailboxes, rank, num_ranks) for rank in range(num_ranks)]
