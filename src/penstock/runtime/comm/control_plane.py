"""Notes and numbers between ranks, over a gloo group: what is said beside the tensors.

It knows neither what notes tell nor how a wait for them is watched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.group_log import Calls
from penstock.runtime.watcher import Others, Whom

__all__ = ["ControlPlane", "head_of", "numbers_in"]

NOTE_TAG = 0x5E8
RELAY_TAG = 0x5E9
NOTE_BYTES = 4096
# Of what every rank begins to gather with: a number, and the call that it is in.
NUMBER_BYTES, HEAD_BYTES = 16, 128


class ControlPlane(ABC):
    """This half of a transport (see ``transport.py``); its other half keeps what it needs."""

    rank: int
    num_ranks: int
    # The group; and what is on its way, by peer, to be waited for at the end of the step.
    _control: dist.ProcessGroup
    _notes: dict[int, list[tuple[Any, Tensor]]]
    # What was last reduced or gathered. Gloo's threads may be the last to let go of it, long after
    # the wait is over, if nobody held it; they need the interpreter then, and where that is going
    # down, they abort the process.
    _collected: Sequence[Tensor] = ()
    # This process's calls over the ranks, of which the last is the one that it is in.
    _calls: Calls

    @abstractmethod
    def post(self, start: Callable[[], Any], whom: Whom) -> Any:
        """What ``start`` begins with ``whom``; where it can't even begin, their loss is noted."""

    @abstractmethod
    def wait_for(self, works: Sequence[Any], whom: Whom) -> None:
        """Wait for ``works``, under the watcher's eye."""

    def _await(self, start: Callable[[], Any], whom: Whom) -> None:
        self.wait_for((self.post(start, whom),), whom)

    def _collect(self, start: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        self._calls.meetings += 1
        self._collected = tensors
        self._await(start, Others.RANKS)

    def send_metadata(self, peer: int, note: bytes) -> None:
        # The first message has a fixed size and names the note's length; a longer note goes on
        # in a second message.
        head = len(note).to_bytes(8, "little") + note[: NOTE_BYTES - 8]
        self._send_bytes(peer, head.ljust(NOTE_BYTES, b"\0"))
        if len(note) > NOTE_BYTES - 8:
            self._send_bytes(peer, note[NOTE_BYTES - 8 :])

    def _send_bytes(self, peer: int, data: bytes) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._note(peer, tensor, NOTE_TAG)

    def _note(self, peer: int, tensor: Tensor, tag: int) -> None:
        # Notes are read when they are needed, in no order with messages: they stay to the end.
        work = self.post(lambda: self._control.send([tensor], peer, tag), peer)
        self._notes[peer].append((work, tensor))

    def recv_metadata(self, peer: int) -> bytes:
        head = self._receive_bytes(peer, NOTE_BYTES)
        length = int.from_bytes(head[:8], "little")
        note = head[8 : 8 + length]
        return note + self._receive_bytes(peer, length - len(note)) if length > len(note) else note

    def _receive_bytes(self, peer: int, length: int) -> bytes:
        tensor = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._await(lambda: self._control.recv([tensor], peer, NOTE_TAG), peer)
        return bytes(tensor.tolist())

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        # From rank to rank, as the first microbatch will go: no rank waits for later ones.
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        before, after = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        if self.rank != root:
            self._await(lambda: self._control.recv([tensor], before, RELAY_TAG), before)
        if after != root:
            self._note(after, tensor, RELAY_TAG)
        shared: list[int] = tensor.tolist()
        return shared

    def barrier(self) -> None:
        # Of a group that has NCCL, too, a barrier of the host's, not of the device's.
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        self._calls.meetings += 1
        self._await(lambda: self._control.barrier(options), Others.RANKS)

    def all_gather_ints(self, number: int) -> list[int]:
        """Every rank's number, by rank; every rank calls it.

        Ranks in different calls would gather what does not match, over which gloo ends processes:
        so whatever is gathered begins with this.

        Raises:
            ScheduleError: ranks are in different calls; the same on every rank.
        """
        return numbers_in(self._gather(head_of(number, self._calls.what)))

    def all_gather_bytes(self, note: bytes) -> list[bytes]:
        lengths = self.all_gather_ints(len(note))
        padded = torch.frombuffer(bytearray(note.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        gathered = self._gather(padded)
        return [_bytes(t)[:length] for t, length in zip(gathered, lengths, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self._collect(lambda: self._control.allgather([parts], [tensor]), (*parts, tensor))
        return parts


def head_of(number: int, what: str) -> Tensor:
    """What a rank begins to gather with: a number, and the call that it is in."""
    head = number.to_bytes(NUMBER_BYTES, "little", signed=True) + what.encode()
    head = head[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
    return torch.frombuffer(bytearray(head), dtype=torch.uint8)


def numbers_in(gathered: Sequence[Tensor]) -> list[int]:
    """The numbers of every rank's head.

    Raises:
        ScheduleError: the calls differ.
    """
    heads = list(map(_bytes, gathered))
    calls = [each[NUMBER_BYTES:].rstrip(b"\0").decode(errors="ignore") for each in heads]
    if len(set(calls)) > 1:
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise ScheduleError(
            f"rank 0 is in {calls[0]}, and rank {other} in {calls[other]}: call them in the "
            "same order on every rank"
        )
    return [int.from_bytes(each[:NUMBER_BYTES], "little", signed=True) for each in heads]


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
