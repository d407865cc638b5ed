"""The transport of CPU tensors over ``torch.distributed``, and the base of NCCL's.

    C10dTransport   tensors on the CPU   the user's group, or a gloo group of the same ranks
    NcclTransport   tensors on CUDA      two NCCL groups, and a gloo group for the control plane

During waits a watchdog reads the error store (``runtime/failure.py``). If another rank has failed,
it aborts the wait by closing gloo's connection to the peer. Every wait on it then fails at once,
except for a partially received message, which gloo never completes. Therefore a separate thread
waits for large messages, and the waiter can leave it.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _torch_compat
from penstock.cause import key_of, store_of, withdraw_early
from penstock.errors import PenstockError
from penstock.runtime.comm.agreement import INLINE_BYTES, pack_header, unpack_headers
from penstock.runtime.comm.base import MIN_REUSED_BYTES, PendingReceive, RecvBuffers, Transport
from penstock.runtime.failure import BackgroundCall, ErrorStore, Peers, Wait, Watchdog, record_of
from penstock.stage.boundary import TensorMeta

__all__ = ["C10dTransport", "InFlightSends", "as_wire", "break_pairs", "control_group"]

DATA_TAG, METADATA_TAG, RELAY_TAG, POKE_TAG = range(0x5E7, 0x5EB)
METADATA_BYTES = 4096
# Limit on a wait in torch that the watchdog could not abort.
MAX_OVERTIME_S = 5.0
# Larger messages are awaited in a thread. The system buffers a good part of this size, so that much
# of a message arrives even if the sender has died.
MIN_LARGE_BYTES = 1 << 20
# The interval between connection checks, each of which leaks some bytes in gloo, and the grace
# period for a wait to end by itself, with gloo's own error.
CHECK_INTERVAL_S, MAX_END_S = 1.0, 0.2
# Torch's own timeout of a control group, and the limit on timeouts, which it stores as integers.
CONTROL_TIMEOUT_S, MAX_TIMEOUT_S = 1800.0, 1e7
# The dtypes that NCCL supports. Tensors of other dtypes are sent as bytes.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
WIRE_DTYPES = frozenset((*_FLOATS, *_INTS))


@dataclass(slots=True)
class InFlightSends:
    """The possibly incomplete sends of this step to one peer, with references to their tensors."""

    # Message number within the step, work and tensor of each send, oldest first.
    sends: deque[tuple[int, Any, Tensor]] = field(default_factory=deque)
    num_bytes: int = 0
    num_messages: int = 0
    control: list[tuple[Any, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LargeMessage:
    """The works of a large message, one per tensor, with the interface of one work."""

    works: Sequence[Any]
    is_cut_short: Callable[[], bool]  # whether the connection is closed

    def wait(self, limit: timedelta) -> None:
        """Wait for the whole message; raises a RuntimeError if the connection was closed, or
        ``limit`` has passed."""
        waiting = BackgroundCall(partial(self._wait, limit))
        while not waiting.is_done(within_s=CHECK_INTERVAL_S):
            if self.is_cut_short() and not waiting.is_done(within_s=MAX_END_S):
                raise RuntimeError("the connection was closed in the middle of a message")
        if waiting.value is not None:
            raise waiting.value

    def _wait(self, limit: timedelta) -> RuntimeError | None:
        try:
            for work in self.works:
                work.wait(limit)
        except RuntimeError as error:
            return error
        return None


class C10dTransport(Transport):
    """One rank's transport over process groups.

    Args:
        group: the pipeline's group; its ranks are the pipeline's ranks.
        device: the device of the stages' tensors.
        number: the number of earlier schedules over this group; the same on all ranks.
        timeout_s: the limit on any wait.
    """

    # True if torch itself may wait anywhere; the watchdog then also reads between waits.
    always_watched = False
    # Limits on the bytes and the number of sends in flight to one peer before the host waits; two
    # sends are always allowed. A checked program is deadlock-free even if sends block.
    max_in_flight_bytes = 16 << 20
    max_in_flight_sends = 256

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, timeout_s: float
    ) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.schedule_index = number
        self._group = group
        # A group of the same ranks for CPU tensors, once the first call has begun.
        self._control: Any = None
        self._device = device
        self._in_flight: defaultdict[int, InFlightSends] = defaultdict(InFlightSends)
        self._buffers = RecvBuffers()
        # References to the latest collective's tensors. Gloo's threads may drop theirs long
        # after the wait. Dropping the last one at exit would abort the process.
        self._collected: Sequence[Tensor] = ()
        self._sends_are_unbounded = False
        self._record = record_of(group)
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._replicas: tuple[dist.ProcessGroup, ...] = ()
        self._errors = ErrorStore(group, number)
        self._watchdog = Watchdog(timeout_s, self.abort, self.device_wait)
        # Torch's timeout of the user's group; the watchdog acts earlier.
        self._limit: tuple[timedelta, ...] = (
            timedelta(seconds=min(timeout_s + MAX_OVERTIME_S, MAX_TIMEOUT_S)),
        )

    def begin(self, call: str) -> None:
        self._record.call = call
        self._record.num_calls += 1
        withdraw_early(self._group)
        if self._control is None:
            if not _torch_compat.takes_cpu_tensors(self._group):
                self._await_all_ranks()
            self._control = control_group(self._group)
        self._watch()
        self.connect()

    def connect(self) -> None:
        """Create missing groups and connections; a collective call."""

    def end(self) -> None:
        self._watchdog.rest()
        self._buffers.clear()

    def close(self) -> None:
        self._watchdog.stop()

    def fail(self, error: BaseException) -> PenstockError | None:
        watchdog, wait = self._watchdog, self._watchdog.stop()
        self._buffers.clear()
        if isinstance(error, PenstockError):
            # Torch may have waited for replicas within an action.
            is_broken = self._replicas and self._is_broken_wait(error.__cause__)
            wait = ((), Peers.REPLICAS) if is_broken else watchdog.late_on_device
        elif not isinstance(error, RuntimeError):
            wait = None  # Ctrl-C may reach a waiting rank
        timed_out_s = watchdog.timeout_s if watchdog.timed_out else None
        return self._errors.error_to_raise(error, wait, timed_out_s, self._find_lost)

    def _find_lost(self) -> list[int]:
        """The ranks whose connections to this one are closed, by themselves."""
        if self._control is None or self._watchdog.has_aborted:
            return []
        return [r for r in range(self.num_ranks) if r != self.rank and _is_closed(self._control, r)]

    def _is_broken_wait(self, error: BaseException | None) -> bool:
        """True if ``error`` is a wait ended by the watchdog or by a process's death."""
        return self._watchdog.has_aborted or _torch_compat.is_lost_connection(error)

    def abort(self, peer: int | Peers) -> None:
        """Abort the main thread's wait for ``peer``, in gloo; called in the watchdog's thread."""
        for group in self._replicas if peer is Peers.REPLICAS else (self._control,):
            if _torch_compat.takes_cpu_tensors(group):
                break_pairs(group, [peer] if isinstance(peer, int) else range(group.size()))

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        groups = tuple(dict.fromkeys(group for group in groups if group.size() > 1))
        if groups != self._replicas:
            self._replicas = groups
            self._errors = ErrorStore(self._group, self.schedule_index, groups)
            self._watch()

    def _watch(self) -> None:
        always = self.always_watched or bool(self._replicas)
        self._watchdog.start(self._errors, always=always)

    def _await_all_ranks(self) -> None:
        """Wait, watched, until every rank is about to create a group, as torch's wait is not."""
        store, key = store_of(self._group), key_of(self._group, f"{self.schedule_index}/here")
        errors, watchdog = self._errors, self._watchdog
        store.add(key, 1)
        end = time.monotonic() + watchdog.timeout_s
        while store.add(key, 0) < self.num_ranks:
            watchdog.timed_out = time.monotonic() > end
            if errors.read(0.0) is not None or errors.is_lost or watchdog.timed_out:
                watchdog.waiting_for = ((), Peers.ALL_RANKS)
                raise RuntimeError("ranks are missing where a group is made")
            time.sleep(errors.interval_s / 10)

    def post(self, start: Callable[[], Any], peer: int | Peers) -> Any:
        """Start a work; a failure to start is recorded as an aborted wait."""
        try:
            return start()
        except NotImplementedError:
            raise  # torch can't send this kind of tensor
        except RuntimeError:
            self._watchdog.waiting_for = ((), peer)
            raise

    def wait_for(self, works: Sequence[Any], peer: int | Peers) -> None:
        """Wait, watched, for works that depend on ``peer``."""
        watchdog = self._watchdog
        if watchdog.late_on_device is not None:
            watchdog.waiting_for = watchdog.late_on_device
            raise RuntimeError("a wait of the device was given up")
        watchdog.waiting_for = (works, peer)
        for work in works:
            work.wait(*self._limit)
        watchdog.waiting_for = None

    def device_wait(self) -> Wait | None:
        """The oldest wait in which the device still is; called in the watchdog's thread."""
        return None

    @contextlib.contextmanager
    def watching(self, peer: int | Peers) -> Iterator[None]:
        """A watched context in which torch waits for ``peer``."""
        self._watchdog.waiting_for = ((), peer)
        try:
            yield
        except Exception as error:
            if not self._is_broken_wait(error):
                self._watchdog.waiting_for = None
            raise
        self._watchdog.waiting_for = None

    def waiting_for_replicas(self) -> contextlib.AbstractContextManager[None]:
        return self.watching(Peers.REPLICAS)

    def wait_for_message(
        self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int
    ) -> Sequence[Tensor]:
        """Wait until ``tensors`` are sent to ``peer`` or received from ``peer``; returns them."""
        if sum(tensor.nbytes for tensor in tensors) >= MIN_LARGE_BYTES:
            works = (_LargeMessage(works, partial(_is_closed, self._control, peer)),)
        self.wait_for(works, peer)
        return tensors

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        in_flight = self._in_flight[peer]
        in_flight.num_messages += 1
        group = self.group_with(peer, sends=True)
        for wire in map(as_wire, tensors):
            work = self.post(partial(group.send, [wire], peer, DATA_TAG), peer)
            in_flight.sends.append((in_flight.num_messages, work, wire))
            in_flight.num_bytes += wire.nbytes
        self.bound_sends(in_flight, peer)

    def group_with(self, peer: int, *, sends: bool) -> Any:
        """The process group of the messages to or from ``peer``."""
        return self._control

    def bound_sends(self, in_flight: InFlightSends, peer: int) -> None:
        """Drop completed sends, or wait for them, if too many are in flight."""
        # More sends cost memory, and a wait costs a thread switch.
        while not self.may_send_on(in_flight):
            _, work, tensor = in_flight.sends[0]
            self.wait_for_message((work,), (tensor,), peer)
            in_flight.num_bytes -= tensor.nbytes
            in_flight.sends.popleft()

    def release(self, peer: int, num_messages: int) -> None:
        in_flight = self._in_flight[peer]
        sends = in_flight.sends
        while sends and sends[0][0] <= num_messages:
            self.wait_for((sends[0][1],), peer)  # returns at once, since the tensor has arrived
            in_flight.num_bytes -= sends.popleft()[2].nbytes

    def may_send_on(self, in_flight: InFlightSends) -> bool:
        """True if the host need not wait for the sends in flight."""
        num_sends = len(in_flight.sends)
        if self._sends_are_unbounded or num_sends <= 2:
            return True
        fits = in_flight.num_bytes <= self.max_in_flight_bytes
        return fits and num_sends <= self.max_in_flight_sends

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PendingReceive:
        group = self.group_with(peer, sends=False)
        tensors = [
            self._buffers.take(meta, device)
            if meta.num_bytes >= MIN_REUSED_BYTES
            else torch.empty(meta.wire_shape, dtype=meta.dtype, device=device)
            for meta in metas
        ]
        wires = map(as_wire, tensors)
        works = [self.post(partial(group.recv, [w], peer, DATA_TAG), peer) for w in wires]
        return partial(self.wait_for_message, works, tensors, peer)

    def allow_unbounded_sends(self, allowed: bool) -> None:
        self._sends_are_unbounded = allowed

    def drain(self) -> None:
        for peer, in_flight in self._in_flight.items():
            sends = in_flight.sends
            self.wait_for_message([work for _, work, _ in sends], [t for *_, t in sends], peer)
            self.wait_for([work for work, _ in in_flight.control], peer)
        self._in_flight.clear()

    def send_metadata(self, peer: int, data: bytes) -> None:
        data = len(data).to_bytes(8, "little") + data
        # A first part of fixed size, which holds most messages.
        for part in (data[:METADATA_BYTES].ljust(METADATA_BYTES, b"\0"), data[METADATA_BYTES:]):
            if part:
                tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._send_control(peer, tensor, METADATA_TAG)

    def _send_control(self, peer: int, tensor: Tensor, tag: int) -> None:
        # The peer may read it late, unordered with tensors, so it is kept until the step ends.
        work = self.post(lambda: self._control.send([tensor], peer, tag), peer)
        self._in_flight[peer].control.append((work, tensor))

    def recv_metadata(self, peer: int) -> bytes:
        head = torch.empty(METADATA_BYTES, dtype=torch.uint8, device="cpu")
        data = bytes(self._recv_control(peer, head, METADATA_TAG))
        length, data = int.from_bytes(data[:8], "little"), data[8:]
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8, device="cpu")
            data += bytes(self._recv_control(peer, rest, METADATA_TAG))
        return data[:length]

    def _recv_control(self, peer: int, tensor: Tensor, tag: int) -> list[int]:
        self.wait_for((self.post(lambda: self._control.recv([tensor], peer, tag), peer),), peer)
        numbers: list[int] = tensor.tolist()
        return numbers

    def broadcast_ints(self, numbers: Sequence[int], root: int) -> list[int]:
        # Passed from rank to rank like the first microbatch, so that no rank waits for later ranks.
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        before, after = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        if self.rank != root:
            numbers = self._recv_control(before, tensor, RELAY_TAG)
        if after != root:
            self._send_control(after, tensor, RELAY_TAG)
        return list(numbers)

    def collect(self, start: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        """Run a collective over all ranks, started by ``start``, on ``tensors``."""
        self._record.num_collectives += 1
        self._collected = tensors
        self.wait_for((self.post(start, Peers.ALL_RANKS),), Peers.ALL_RANKS)

    def all_reduce(self, tensor: Tensor) -> None:
        self.collect(lambda: self._control.allreduce([tensor]), (tensor,))

    def barrier(self) -> None:
        # A group that also has NCCL would run a device barrier.
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        self.collect(lambda: self._control.barrier(options), self._collected)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        # Gloo aborts processes that gather unequal tensors. Gather the header first.
        headers = unpack_headers(self._all_gather(pack_header(self._record.call, data)))
        parts, longest = [part for _, part in headers], max(length for length, _ in headers)
        if longest > INLINE_BYTES:
            padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
            parts = [bytes(part.tolist()) for part in self._all_gather(padded)]
        return [part[:length] for part, (length, _) in zip(parts, headers, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self.collect(lambda: self._control.allgather([parts], [tensor]), (*parts, tensor))
        return parts


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for CPU tensors, shared by all calls over ``group``, so that ranks
    in different calls detect the difference; a collective call."""
    if _torch_compat.takes_cpu_tensors(group):
        return group
    record = record_of(group)
    if record.control is None:
        ranks, name = dist.get_process_group_ranks(group), key_of(group, "control")
        record.control = _torch_compat.make_group(ranks, "gloo", name, timeout_s=CONTROL_TIMEOUT_S)
    return record.control


def break_pairs(group: dist.ProcessGroup, peers: Iterable[int]) -> None:
    """Close gloo's connections to ``peers`` by receives that time out, so that waits on them fail
    at once."""
    for peer in peers:
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                _poke(group, peer).wait(timedelta(milliseconds=1))


def _is_closed(group: dist.ProcessGroup, peer: int) -> bool:
    """True if gloo's connection to ``peer`` is closed."""
    try:
        _poke(group, peer)
    except RuntimeError:
        return True
    return False


def _poke(group: dist.ProcessGroup, peer: int) -> Any:
    """Post a receive for a message that is never sent."""
    return group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, POKE_TAG)


def as_wire(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor in a dtype of NCCL, or as bytes; a copy if it is conjugated."""
    if tensor.dtype in WIRE_DTYPES:
        return tensor
    return tensor.resolve_conj().reshape(-1).view(torch.uint8)
