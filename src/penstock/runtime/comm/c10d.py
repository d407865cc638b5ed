"""Base of the transports over ``torch.distributed``: control plane, connections, failures.

    GlooTransport   tensors on the CPU    the user's group, or a gloo group of the same ranks
    NcclTransport   tensors on CUDA       two NCCL groups, and a gloo group for the control plane

A failure leaves no rank hanging. During longer waits a watchdog reads the error store
(``runtime/failure.py``) and aborts the wait if another rank has failed. Torch cannot interrupt a
blocked wait, so that each transport implements ``abort``.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _torch_compat
from penstock.cause import key_of, store_of, withdraw_note
from penstock.errors import PenstockError
from penstock.runtime.agreement import pack_header, unpack_headers
from penstock.runtime.comm.base import PendingReceive
from penstock.runtime.failure import FailureReporter, calls_over
from penstock.runtime.watchdog import Peers, Watchdog, Whom
from penstock.stage.boundary import TensorMeta

__all__ = ["C10dTransport", "InFlightSends", "control_group"]

METADATA_TAG = 0x5E8
RELAY_TAG = 0x5E9
DATA_TAG = 0x5E7
METADATA_BYTES = 4096
# Limit on a wait in torch that the watchdog could not abort.
MAX_OVERTIME_S = 5.0
# Torch's own timeout of a control group.
CONTROL_TIMEOUT_S = 1800.0
# Torch stores timeouts as integers.
MAX_TIMEOUT_S = 1e7


class InFlightSends:
    """The possibly incomplete sends to one peer, oldest first, with references to their tensors."""

    __slots__ = ("num_bytes", "num_messages", "sends")

    def __init__(self) -> None:
        # (message number within the step, work, tensor)
        self.sends: deque[tuple[int, Any, Tensor]] = deque()
        self.num_bytes = 0
        self.num_messages = 0

    def add(self, work: Any, tensor: Tensor) -> None:
        """Add a send of the latest message."""
        self.sends.append((self.num_messages, work, tensor))
        self.num_bytes += tensor.nbytes

    def drop_first(self) -> None:
        """Drop the oldest send."""
        self.num_bytes -= self.sends.popleft()[2].nbytes

    def clear(self) -> None:
        """Drop all sends, at the end of a step."""
        self.sends.clear()
        self.num_bytes = self.num_messages = 0


class Received:
    """A receive posted over a process group."""

    __slots__ = ("_peer", "_tensors", "_transport", "_works")

    def __init__(
        self, transport: C10dTransport, peer: int, tensors: Sequence[Tensor], works: Sequence[Any]
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._tensors = tensors
        self._works = works

    def wait(self) -> Sequence[Tensor]:
        """Wait for the tensors."""
        self._transport.wait_for_message(self._works, self._tensors, self._peer)
        return self._tensors


class C10dTransport(ABC):
    """One rank's transport over process groups; see ``base.Transport``.

    Args:
        group: the pipeline's group; its ranks are the pipeline's ranks.
        device: the device of the stages' tensors.
        number: the number of earlier schedules over this group; the same on all ranks.
        timeout_s: the limit on any wait, in seconds.
    """

    # True if torch itself may wait anywhere, so that the watchdog also reads between waits.
    always_watched = False

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, timeout_s: float
    ) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.number = number
        self._group = group
        self._control: Any = None
        self._device = device
        self._in_flight: defaultdict[int, InFlightSends] = defaultdict(InFlightSends)
        self._metadata: defaultdict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
        # References to the latest collective's tensors. Gloo's threads may drop theirs long
        # after the wait. Dropping the last one at exit would abort the process.
        self._collected: Sequence[Tensor] = ()
        self._sends_are_unbounded = False
        self._calls = calls_over(group)
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._replicas: tuple[dist.ProcessGroup, ...] = ()
        self._failures = FailureReporter(group, number)
        self._watchdog = Watchdog(timeout_s, self.abort)
        # Torch's timeout of the user's group; the watchdog acts earlier.
        self._limit: tuple[timedelta, ...] = (
            timedelta(seconds=min(timeout_s + MAX_OVERTIME_S, MAX_TIMEOUT_S)),
        )

    # --- what a backend does -----------------------------------------------------------------

    @abstractmethod
    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """See ``Transport``."""

    @abstractmethod
    def release(self, peer: int, num_messages: int) -> None:
        """See ``Transport``."""

    @abstractmethod
    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        """See ``Transport``."""

    @abstractmethod
    def abort(self, whom: Whom) -> None:
        """Abort the main thread's wait for ``whom``; called in the watchdog's thread."""

    def connect(self) -> None:
        """Create missing groups and connections; a collective call."""
        return

    def register_peers(self, peers: Iterable[int]) -> None:
        """See ``Transport``; a no-op for gloo, whose pairs are all connected."""
        return

    def wait_for_message(self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int) -> None:
        """Wait until ``tensors`` are sent to ``peer`` or received from ``peer``."""
        self.wait_for(works, peer)

    # --- calls -------------------------------------------------------------------------------

    def begin(self, what: str) -> None:
        self._calls.begin(what)
        withdraw_note(self._group)
        if self._control is None:
            if not _torch_compat.takes_cpu_tensors(self._group):
                self._await_all_ranks()
            self._control = control_group(self._group)
            self._watch()
        self._watchdog.start()
        self.connect()

    def _watch(self) -> None:
        always = self.always_watched or bool(self._replicas)
        self._watchdog.watch(self._failures.errors.aside(), always=always)

    def end(self) -> None:
        self._failures.note_success()
        self._watchdog.rest()

    def close(self) -> None:
        self._watchdog.stop()

    def _await_all_ranks(self) -> None:
        """Wait, watched, until every rank is about to create a group; torch's wait is unwatched."""
        store, key = store_of(self._group), key_of(self._group, f"{self.number}/here")
        errors = self._failures.errors
        store.add(key, 1)
        end = time.monotonic() + self._watchdog.timeout_s
        while store.add(key, 0) < self.num_ranks:
            self._watchdog.timed_out = time.monotonic() > end
            has_failed = errors.read(patient=True) is not None or errors.is_lost
            if has_failed or self._watchdog.timed_out:
                self._watchdog.note_broken(Peers.ALL_RANKS)
                raise RuntimeError("ranks are missing where a group is made")
            time.sleep(max(0.02, errors.pace_s))

    # --- waits, watched ----------------------------------------------------------------------

    def post(self, start: Callable[[], Any], whom: Whom) -> Any:
        """Start a work by ``start``; a failure to start is recorded as an aborted wait."""
        try:
            return start()
        except NotImplementedError:
            raise  # torch can't send this kind of tensor
        except RuntimeError:
            self._watchdog.note_broken(whom)
            raise

    def wait_for(self, works: Sequence[Any], whom: Whom) -> None:
        """Wait, watched, for works that depend on ``whom``."""
        watchdog = self._watchdog
        watchdog.waiting_for = (works, whom)
        for work in works:
            work.wait(*self._limit)
        watchdog.waiting_for = None

    def drain(self) -> None:
        for peer, in_flight in self._in_flight.items():
            works, tensors = [x[1] for x in in_flight.sends], [x[2] for x in in_flight.sends]
            self.wait_for_message(works, tensors, peer)
            in_flight.clear()
        for peer, metadata in self._metadata.items():
            self.wait_for([work for work, _ in metadata], peer)
            metadata.clear()

    def allow_unbounded_sends(self, allowed: bool) -> None:
        self._sends_are_unbounded = allowed

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        groups = tuple(group for group in groups if group.size() > 1)
        if groups != self._replicas:
            self._replicas = groups
            self._failures.add_replicas(groups)
            self._watch()

    @contextlib.contextmanager
    def waiting_for_replicas(self) -> Iterator[None]:
        self._watchdog.waiting_for = ((), Peers.REPLICAS)
        yield
        self._watchdog.waiting_for = None

    @contextlib.contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """A watched context in which torch waits for the other ranks."""
        self._watchdog.waiting_for = ((), Peers.ALL_RANKS)
        try:
            yield
        except Exception as error:
            if not self._is_broken_wait(error):
                self._watchdog.waiting_for = None
            raise
        self._watchdog.waiting_for = None

    # --- control plane -----------------------------------------------------------------------

    def _collect(self, start: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        self._calls.collectives += 1
        self._collected = tensors
        self.wait_for((self.post(start, Peers.ALL_RANKS),), Peers.ALL_RANKS)

    def send_metadata(self, peer: int, data: bytes) -> None:
        # The first message has a fixed size and starts with the length. Longer metadata continues
        # in a second message.
        head = len(data).to_bytes(8, "little") + data[: METADATA_BYTES - 8]
        self._send_bytes(peer, head.ljust(METADATA_BYTES, b"\0"))
        if len(data) > METADATA_BYTES - 8:
            self._send_bytes(peer, data[METADATA_BYTES - 8 :])

    def _send_bytes(self, peer: int, data: bytes) -> None:
        self._send_control(peer, _as_tensor(data), METADATA_TAG)

    def _send_control(self, peer: int, tensor: Tensor, tag: int) -> None:
        # The peer may read it late, unordered with tensors, so it is kept until the step ends.
        work = self.post(lambda: self._control.send([tensor], peer, tag), peer)
        self._metadata[peer].append((work, tensor))

    def recv_metadata(self, peer: int) -> bytes:
        head = self._recv_bytes(peer, METADATA_BYTES)
        length = int.from_bytes(head[:8], "little")
        data = head[8 : 8 + length]
        return data + self._recv_bytes(peer, length - len(data)) if length > len(data) else data

    def _recv_bytes(self, peer: int, length: int) -> bytes:
        tensor = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._recv_control(peer, tensor, METADATA_TAG)
        return bytes(tensor.tolist())

    def _recv_control(self, peer: int, tensor: Tensor, tag: int) -> None:
        self.wait_for((self.post(lambda: self._control.recv([tensor], peer, tag), peer),), peer)

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        # Passed from rank to rank like the first microbatch, so that no rank waits for later ranks.
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        before, after = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        if self.rank != root:
            self._recv_control(before, tensor, RELAY_TAG)
        if after != root:
            self._send_control(after, tensor, RELAY_TAG)
        shared: list[int] = tensor.tolist()
        return shared

    def all_reduce(self, tensor: Tensor) -> None:
        self._collect(lambda: self._control.allreduce([tensor]), (tensor,))

    def barrier(self) -> None:
        # A group that also has NCCL would run a device barrier.
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        self._collect(lambda: self._control.barrier(options), self._collected)

    def all_gather_ints(self, number: int) -> list[int]:
        # Gloo aborts processes that gather unequal tensors. Gather the header first.
        return unpack_headers(self._all_gather(pack_header(number, self._calls.what)))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self.all_gather_ints(len(data))
        parts = self._all_gather(_as_tensor(data.ljust(max(lengths), b"\0")))
        return [bytes(p.tolist())[:length] for p, length in zip(parts, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self._collect(lambda: self._control.allgather([parts], [tensor]), (*parts, tensor))
        return parts

    # --- failures ----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> PenstockError | None:
        waited_for = self._watchdog.stop()
        if isinstance(error, PenstockError):
            # No wait failed, unless torch waited for replicas within an action.
            is_broken = self._replicas and self._is_broken_wait(error.__cause__)
            waited_for = ((), Peers.REPLICAS) if is_broken else None
        elif not isinstance(error, RuntimeError):
            waited_for = None  # Ctrl-C may reach a waiting rank
        return self._failures.resolve(error, waited_for, self._watchdog)

    def _is_broken_wait(self, error: BaseException | None) -> bool:
        """True if ``error`` is a wait ended by the watchdog or by a process's death."""
        return self._watchdog.has_aborted or _torch_compat.is_lost_connection(error)


# NCCL group → its gloo group of the same ranks, made once, with weak references.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for CPU tensors; a collective call.

    All calls over ``group`` share the control group. So ranks in different calls exchange headers
    and detect the difference.
    """
    if _torch_compat.takes_cpu_tensors(group):
        return group
    if group not in _control_groups:
        ranks, name = dist.get_process_group_ranks(group), key_of(group, "control")
        _control_groups[group] = _torch_compat.make_group(
            ranks, "gloo", name, timeout_s=CONTROL_TIMEOUT_S
        )
    return _control_groups[group]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
