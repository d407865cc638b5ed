"""The transport over torch.distributed: gloo for CPU tensors, NCCL for CUDA ones.

Data plane: the user's process group. On NCCL every direction has a group of its own, so that a
send never queues behind a receive of the same pair. Control plane: a gloo group, always.

Nobody hangs: a watcher thread looks at the board (``failure.py``) whenever this rank has waited
for longer than a moment. Nothing in torch wakes a blocked gloo wait from outside, but a receive
that times out closes its pair, and then all that waits on the pair fails at once; so that is what
the watcher does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.cause import as_error, cause_of
from penstock.errors import PeerError, PenstockError, Where
from penstock.runtime import torch_private
from penstock.runtime.failure import Board
from penstock.runtime.transport import empty_tensors
from penstock.stage.announcing import note_key, withdraw
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["C10dTransport"]

DATA_TAG = 0x5E7
NOTE_TAG = 0x5E8
RELAY_TAG = 0x5E9
POKE_TAG = 0x5EA
NOTE_BYTES = 4096
# Sends to one peer may pile up to so many bytes (and at least two, and at most so many) before the
# oldest is waited for: held sends are memory, but waiting costs a switch of threads, which small
# messages are not worth. The programs that run are free of deadlock even where a send blocks.
MAX_HELD_BYTES = 16 << 20
MAX_HELD_SENDS = 256
LOOK_INTERVAL_S = 0.2

Wait: TypeAlias = tuple[Sequence[Any], int | None]  # works, peer


class _Receipt:
    __slots__ = ("_peer", "_tensors", "_transport", "_works")

    def __init__(
        self, transport: C10dTransport, peer: int, tensors: list[Tensor], works: list[Any]
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._tensors = tensors
        self._works = works

    def wait(self) -> Sequence[Tensor]:
        self._transport.wait_for(self._works, self._peer)
        return self._tensors


class _Held:
    """Sends to one peer that are on their way, oldest first, and how many messages went before."""

    __slots__ = ("num_bytes", "num_sent", "sends")

    def __init__(self) -> None:
        # The number of its message, counted from the step's start; the work; the tensor.
        self.sends: deque[tuple[int, Any, Tensor]] = deque()
        self.num_bytes = 0
        self.num_sent = 0

    def add(self, work: Any, tensor: Tensor) -> None:
        self.sends.append((self.num_sent, work, tensor))
        self.num_bytes += tensor.nbytes

    def drop_first(self) -> None:
        self.num_bytes -= self.sends.popleft()[2].nbytes

    def drop_all(self) -> None:
        self.sends.clear()
        self.num_bytes = 0
        self.num_sent = 0


class C10dTransport:
    """One rank's connection over process groups.

    Args:
        group: the pipeline's group; its ranks are the pipeline's ranks.
        device: where the stages' tensors live.
        key: names the schedule, alike on all ranks: failures of one do not reach another.
        timeout_s: how long any wait may take.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, key: str, timeout_s: float
    ) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._group = group
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._up = self._down = self._control = group
        self._connected = False
        self._held: defaultdict[int, _Held] = defaultdict(_Held)
        self._notes: defaultdict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
        self._is_relaxed = False
        self._store: Any = group.get_group_store()
        self._key = f"penstock/{key}"
        self._board = Board(self._store, self._key, note_key(group))
        self._watcher = _Watcher(self, timeout_s)

    def connect(self) -> None:
        """Make the groups that are missing. Every rank calls it at the same point."""
        if self._connected:
            return
        self._connected = True
        ranks = dist.get_process_group_ranks(self._group)
        if self._on_cuda:
            self._down = _new_group(ranks, "nccl")
        if not torch_private.takes_cpu_tensors(self._group):
            self._control = _new_group(ranks, "gloo")

    # --- data plane --------------------------------------------------------------------------

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        held = self._held[peer]
        group = self._up if peer > self.rank else self._down
        held.num_sent += 1
        for tensor in tensors:
            try:
                work = group.send([tensor], peer, DATA_TAG)
            except RuntimeError:
                self._watcher.note_broken(peer)
                raise
            held.add(work, tensor)
        while held.num_bytes > MAX_HELD_BYTES or len(held.sends) > MAX_HELD_SENDS:
            if self._is_relaxed or len(held.sends) <= 2:
                return
            if self._on_cuda:  # waiting would stall the compute stream
                return
            self.wait_for((held.sends[0][1],), peer)
            held.drop_first()

    def release(self, peer: int, num_messages: int) -> None:
        held = self._held[peer]
        sends = held.sends
        while sends and sends[0][0] <= num_messages:
            if not self._on_cuda:
                self.wait_for((sends[0][1],), peer)  # no wait: the tensor has arrived
            held.drop_first()

    def receive(self, peer: int, metas: Sequence[TensorMeta], device: torch.device) -> _Receipt:
        group = self._up if peer < self.rank else self._down
        tensors = empty_tensors(metas, device)
        try:
            works = [group.recv([t], peer, DATA_TAG) for t in tensors]
        except RuntimeError:
            self._watcher.note_broken(peer)
            raise
        return _Receipt(self, peer, tensors, works)

    def relax(self, relaxed: bool) -> None:
        self._is_relaxed = relaxed

    def drain(self) -> None:
        for peer, held in self._held.items():
            self.wait_for([work for _, work, _ in held.sends], peer)
            held.drop_all()
        for peer, notes in self._notes.items():
            self.wait_for([work for work, _ in notes], peer)
            notes.clear()

    def wait_for(self, works: Sequence[Any], peer: int | None) -> None:
        """Wait for ``works``, under the watcher's eye."""
        watcher = self._watcher
        watcher.waiting_for = (works, peer)
        for work in works:
            work.wait()
        watcher.waiting_for = None

    # --- control plane -----------------------------------------------------------------------

    def send_note(self, peer: int, note: bytes) -> None:
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
        self._notes[peer].append((self._control.send([tensor], peer, tag), tensor))

    def receive_note(self, peer: int) -> bytes:
        head = self._receive_bytes(peer, NOTE_BYTES)
        length = int.from_bytes(head[:8], "little")
        note = head[8 : 8 + length]
        return note + self._receive_bytes(peer, length - len(note)) if length > len(note) else note

    def _receive_bytes(self, peer: int, length: int) -> bytes:
        tensor = torch.empty(length, dtype=torch.uint8)
        self.wait_for((self._control.recv([tensor], peer, NOTE_TAG),), peer)
        return bytes(tensor.tolist())

    def share_numbers(self, numbers: Sequence[int], root: int) -> list[int]:
        # From rank to rank, as the first microbatch will go: no rank waits for later ones.
        tensor = torch.tensor(numbers, dtype=torch.int64)
        before, after = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        if self.rank != root:
            self.wait_for((self._control.recv([tensor], before, RELAY_TAG),), before)
        if after != root:
            self._note(after, tensor, RELAY_TAG)
        shared: list[int] = tensor.tolist()
        return shared

    def add_up(self, tensor: Tensor) -> None:
        group = self._up if tensor.is_cuda else self._control
        self.wait_for((group.allreduce([tensor]),), None)

    def meet(self) -> None:
        self.wait_for((self._control.barrier(),), None)

    def gather_notes(self, note: bytes) -> list[bytes]:
        lengths = self._gather(torch.tensor([len(note)]))
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(note.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = self._gather(padded)
        return [
            bytes(t.tolist())[: int(length)] for t, length in zip(gathered, lengths, strict=True)
        ]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self.wait_for((self._control.allgather([parts], [tensor]),), None)
        return parts

    # --- failure -----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> PenstockError | None:
        waited_for = self._watcher.stop()
        if isinstance(error, PenstockError):
            waited_for = None  # something else failed, not the wait
        self._board.is_lost |= self._watcher.lost_the_store
        found = self._board.read()
        if found is None and waited_for is not None and not self._watcher.timed_out:
            # A wait broke: its peer may have failed a moment before it could say so.
            found = _poll(self._board.read, for_s=2.0)
        if found is None:
            if waited_for is not None:
                error = self._broken_wait(error, waited_for)
            cause = cause_of(error, self.rank)
            stands = self._board.write(cause)
            if stands == cause:
                return error if isinstance(error, PeerError) else None
            found = stands
        if found.rank == self.rank:
            return None
        return as_error(found)

    def _broken_wait(self, error: BaseException, waited_for: Wait) -> PeerError:
        _, peer = waited_for
        whom = "the other ranks" if peer is None else f"rank {peer}"
        if self._watcher.timed_out:
            told = (
                f"no word from {whom} within {self._watcher.timeout_s:g} s, and no rank reports a "
                "failure; pass a longer timeout_s if a step may take so long"
            )
        elif self._board.is_lost:
            told = "the store that joins the ranks is gone; the process that holds it (the group's "
            told += f"rank 0, most often) may have died. This rank was waiting for {whom} ({error})"
        else:
            told = f"the connection to {whom} broke; its process may have died ({error})"
        raised = PeerError(told, where=Where(rank=self.rank))
        raised.__cause__ = error
        return raised

    def wake(self, peer: int | None) -> None:
        """Break the wait of the main thread for ``peer`` (None: for whomever). Called by the
        watcher, in its own thread."""
        peers = [r for r in range(self.num_ranks) if r != self.rank] if peer is None else [peer]
        for other in peers:
            with contextlib.suppress(RuntimeError):
                scrap = torch.empty(1, dtype=torch.uint8)
                self._control.recv([scrap], other, POKE_TAG).wait(timedelta(milliseconds=1))
        if self._on_cuda:
            for group in (self._up, self._down):
                with contextlib.suppress(RuntimeError):
                    group.abort()

    def store_clone(self) -> Board:
        """A board for another thread."""
        return Board(self._store.clone(), self._key, note_key(self._group))

    def close(self) -> None:
        self._watcher.stop()

    def begin(self) -> None:
        withdraw(self._group)
        self.connect()
        self._watcher.start()

    def end(self) -> None:
        self._watcher.rest()


class _Watcher:
    """Looks at the board from a thread of its own while the main thread waits.

    Attributes:
        waiting_for: what the main thread waits for, and from which peer (None: several); None
            while it does not wait. Each wait is a tuple of its own, so that two looks tell one
            long wait from two short ones, and the main thread need not look at the clock.
        timed_out: whether a wait took longer than it may.
        lost_the_store: whether the store is gone.
    """

    def __init__(self, transport: C10dTransport, timeout_s: float) -> None:
        self.waiting_for: Wait | None = None
        self.timed_out = False
        self.lost_the_store = False
        self._transport = transport
        self.timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._look, name="penstock-watcher", daemon=True)
            self._thread.start()
        self._awake.set()

    def rest(self) -> None:
        """No step is running: nothing to look at."""
        self._awake.clear()

    def note_broken(self, peer: int) -> None:
        """A message could not even be posted: as if it had been waited for in vain."""
        self.waiting_for = ((), peer)

    def stop(self) -> Wait | None:
        """End the thread; returns what the main thread was waiting for, if it was."""
        self._stopped.set()
        self._awake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        waiting, self.waiting_for = self.waiting_for, None
        return waiting

    def _look(self) -> None:
        board = self._transport.store_clone()
        seen: Wait | None = None
        since = 0.0
        while not self._stopped.wait(LOOK_INTERVAL_S):
            self._awake.wait()
            waiting = self.waiting_for
            if waiting is None or waiting is not seen:
                seen, since = waiting, time.monotonic()
                continue
            waited_s = time.monotonic() - since
            if waited_s > self.timeout_s:
                self.timed_out = True
            elif board.read() is None and not board.is_lost:
                continue
            self.lost_the_store = board.is_lost
            if self.waiting_for is waiting:
                self._transport.wake(waiting[1])


def _poll(read: Callable[[], Any], *, for_s: float) -> Any:
    """What ``read`` finds within ``for_s`` seconds, or None."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        found = read()
        if found is not None:
            return found
        time.sleep(0.05)
    return None


def _new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
