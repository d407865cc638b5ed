"""All ranks in one process and one thread: messages are kept in lists until they are asked for.

The runtime plays the ranks in an order in which nothing ever waits (``check.global_order``); a
message that is not there when it is waited for is therefore a fault of ours, not a delay.
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
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["LoopbackTransport", "loopback"]

Edge = tuple[int, int]  # from rank, to rank


@dataclass(slots=True)
class _Fabric:
    """What lies between the ranks."""

    # Per edge, the messages by number: receives may be posted early and waited for out of order.
    messages: defaultdict[Edge, dict[int, Sequence[Tensor]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    num_sent: defaultdict[Edge, int] = field(default_factory=lambda: defaultdict(int))
    num_posted: defaultdict[Edge, int] = field(default_factory=lambda: defaultdict(int))
    notes: defaultdict[Edge, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    # Shared numbers wait, per root and rank, for the ranks that come after the root.
    numbers: defaultdict[Edge, deque[list[int]]] = field(default_factory=lambda: defaultdict(deque))


class _LoopbackReceive:
    __slots__ = ("_edge", "_fabric", "_number")

    def __init__(self, fabric: _Fabric, edge: Edge, number: int) -> None:
        self._fabric = fabric
        self._edge = edge
        self._number = number

    def wait(self) -> Sequence[Tensor]:
        try:
            return self._fabric.messages[self._edge].pop(self._number)
        except KeyError:
            source, target = self._edge
            raise InternalError(
                f"message {self._number} from rank {source} to rank {target} is waited for "
                "before it is sent"
            ) from None


class LoopbackTransport:
    """One rank's end of the fabric. Made by ``loopback``."""

    def __init__(self, fabric: _Fabric, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.number = 0
        self._fabric = fabric

    def begin(self, what: str) -> None:
        pass

    def end(self) -> None:
        pass

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        edge = (self.rank, peer)
        number = self._fabric.num_sent[edge]
        self._fabric.num_sent[edge] = number + 1
        self._fabric.messages[edge][number] = tensors

    def release(self, peer: int, num_messages: int) -> None:
        pass

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> _LoopbackReceive:
        edge = (peer, self.rank)
        number = self._fabric.num_posted[edge]
        self._fabric.num_posted[edge] = number + 1
        return _LoopbackReceive(self._fabric, edge, number)

    def send_metadata(self, peer: int, note: bytes) -> None:
        self._fabric.notes[self.rank, peer].append(note)

    def recv_metadata(self, peer: int) -> bytes:
        return self._fabric.notes[peer, self.rank].popleft()

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        if self.rank != root:
            return self._fabric.numbers[root, self.rank].popleft()
        for peer in range(self.num_ranks):
            if peer != root:
                self._fabric.numbers[root, peer].append(list(numbers))
        return list(numbers)

    def all_reduce(self, tensor: Tensor) -> None:
        # Each rank in turn would need what later ones have; who plays all ranks adds up itself.
        raise InternalError("nothing is added up over ranks in one process")

    def barrier(self) -> None:
        pass

    # One process: every rank is built from the same arguments, so all would say the same.

    def all_gather_ints(self, number: int) -> list[int]:
        return [number] * self.num_ranks

    def all_gather_bytes(self, note: bytes) -> list[bytes]:
        return [note] * self.num_ranks

    def register_peers(self, peers: Iterable[int]) -> None:
        pass

    def allow_unbounded_sends(self, relaxed: bool) -> None:
        pass

    def drain(self) -> None:
        pass

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        pass

    def waiting_for_replicas(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fail(self, error: BaseException) -> PenstockError | None:
        return None

    def close(self) -> None:
        pass


def loopback(num_ranks: int) -> list[LoopbackTransport]:
    """The ends of a fabric that joins ``num_ranks`` ranks in this process."""
    fabric = _Fabric()
    return [LoopbackTransport(fabric, rank, num_ranks) for rank in range(num_ranks)]
