"""Base of the transports over ``torch.distributed``: messages, control plane, failures.

    GlooTransport   tensors on the CPU    the user's group, or a gloo group of the same ranks
    NcclTransport   tensors on CUDA       two NCCL groups, and a gloo group for the control plane

During waits a watchdog reads the error store (``runtime/failure.py``), and aborts the wait by the
transport's ``abort`` if another rank has failed.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _torch_compat
from penstock.cause import key_of, store_of, withdraw_early
from penstock.errors import PenstockError
from penstock.runtime.comm.agreement import pack_header, unpack_headers
from penstock.runtime.comm.base import Transport, empty_tensors
from penstock.runtime.failure import ErrorStore, calls_over
from penstock.runtime.watchdog import Peers, Watchdog
from penstock.stage.boundary import TensorMeta

__all__ = [
    "C10dTransport",
    "InFlightSends",
    "PostedReceive",
    "as_wire",
    "break_pairs",
    "control_group",
    "is_closed",
]

METADATA_TAG = 0x5E8
RELAY_TAG = 0x5E9
DATA_TAG = 0x5E7
POKE_TAG = 0x5EA
METADATA_BYTES = 4096
# Limit on a wait in torch that the watchdog could not abort.
MAX_OVERTIME_S = 5.0
# Torch's own timeout of a control group.
CONTROL_TIMEOUT_S = 1800.0
# Torch stores timeouts as integers.
MAX_TIMEOUT_S = 1e7
# The dtypes that NCCL supports. Tensors of other dtypes are sent as bytes.
WIRE_DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    }
)


@dataclass(slots=True)
class InFlightSends:
    """The possibly incomplete sends of this step to one peer, with references to their tensors."""

    # Message number within the step, work and tensor of each send, oldest first.
    sends: deque[tuple[int, Any, Tensor]] = field(default_factory=deque)
    num_bytes: int = 0
    num_messages: int = 0


@dataclass(slots=True)
class PostedReceive:
    """A receive posted over a process group."""

    transport: C10dTransport
    peer: int
    tensors: Sequence[Tensor]
    works: Sequence[Any]

    def wait(self) -> Sequence[Tensor]:
        """Wait for the tensors."""
        self.transport.wait_for_message(self.works, self.tensors, self.peer)
        return self.tensors


class C10dTransport(Transport):
    """One rank's transport over process groups; see ``base.Transport``.

    Args:
        group: the pipeline's group; its ranks are the pipeline's ranks.
        device: the device of the stages' tensors.
        number: the number of earlier schedules over this group; the same on all ranks.
        timeout_s: the limit on any wait, in seconds.
    """

    # True if torch itself may wait anywhere, so that the watchdog also reads between waits.
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
        self._errors = ErrorStore(group, number)
        self._watchdog = Watchdog(timeout_s, self.abort)
        # Torch's timeout of the user's group; the watchdog acts earlier.
        self._limit: tuple[timedelta, ...] = (
            timedelta(seconds=min(timeout_s + MAX_OVERTIME_S, MAX_TIMEOUT_S)),
        )

    # --- of each backend -----------------------------------------------------------------------

    @abstractmethod
    def group_with(self, peer: int, *, sends: bool) -> Any:
        """The process group of the messages to or from ``peer``."""

    @abstractmethod
    def bound_sends(self, in_flight: InFlightSends, peer: int) -> None:
        """Drop completed sends, or wait for them, if too many are in flight."""

    def connect(self) -> None:
        """Create missing groups and connections; a collective call."""

    def wait_for_message(self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int) -> None:
        """Wait until ``tensors`` are sent to ``peer`` or received from ``peer``."""
        self.wait_for(works, peer)

    # --- calls ---------------------------------------------------------------------------------

    def begin(self, call: str) -> None:
        self._calls.begin(call)
        withdraw_early(self._group)
        if self._control is None:
            if not _torch_compat.takes_cpu_tensors(self._group):
                self._await_all_ranks()
            self._control = control_group(self._group)
            self._watch(())
        self._watchdog.start()
        self.connect()

    def end(self) -> None:
        self._watchdog.rest()

    def close(self) -> None:
        self._watchdog.stop()

    def fail(self, error: BaseException) -> PenstockError | None:
        wait = self._watchdog.stop()
        if isinstance(error, PenstockError):
            # No wait failed, unless torch waited for replicas within an action.
            is_broken = self._replicas and self._is_broken_wait(error.__cause__)
            wait = ((), Peers.REPLICAS) if is_broken else None
        elif not isinstance(error, RuntimeError):
            wait = None  # Ctrl-C may reach a waiting rank
        return self._errors.error_to_raise(error, wait, self._watchdog)

    def _is_broken_wait(self, error: BaseException | None) -> bool:
        """True if ``error`` is a wait ended by the watchdog or by a process's death."""
        return self._watchdog.has_aborted or _torch_compat.is_lost_connection(error)

    def abort(self, peer: int | Peers) -> None:
        """Abort the main thread's wait for ``peer``, in gloo; called in the watchdog's thread."""
        if isinstance(peer, int):
            break_pairs(self._control, [peer])
            return
        for group in self._replicas if peer is Peers.REPLICAS else (self._control,):
            if _torch_compat.takes_cpu_tensors(group):
                break_pairs(group, range(group.size()))

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        groups = tuple(group for group in groups if group.size() > 1)
        if groups != self._replicas:
            self._replicas = groups
            self._errors = ErrorStore(self._group, self.schedule_index, groups)
            self._watch(groups)

    def _watch(self, replicas: Sequence[dist.ProcessGroup]) -> None:
        errors = ErrorStore(self._group, self.schedule_index, replicas, in_thread=True)
        self._watchdog.watch(errors, always=self.always_watched or bool(replicas))

    def _await_all_ranks(self) -> None:
        """Wait, watched, until every rank is about to create a group; torch's wait is unwatched."""
        store, key = store_of(self._group), key_of(self._group, f"{self.schedule_index}/here")
        errors = self._errors
        store.add(key, 1)
        end = time.monotonic() + self._watchdog.timeout_s
        while store.add(key, 0) < self.num_ranks:
            self._watchdog.timed_out = time.monotonic() > end
            if errors.read(0.0) is not None or errors.is_lost or self._watchdog.timed_out:
                self._watchdog.waiting_for = ((), Peers.ALL_RANKS)
                raise RuntimeError("ranks are missing where a group is made")
            time.sleep(max(0.02, errors.interval_s))

    # --- waits, watched ------------------------------------------------------------------------

    def post(self, start: Callable[[], Any], peer: int | Peers) -> Any:
        """Start a work by ``start``; a failure to start is recorded as an aborted wait."""
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
        watchdog.waiting_for = (works, peer)
        for work in works:
            work.wait(*self._limit)
        watchdog.waiting_for = None

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

    # --- data plane ----------------------------------------------------------------------------

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        in_flight = self._in_flight[peer]
        in_flight.num_messages += 1
        group = self.group_with(peer, sends=True)
        for wire in map(as_wire, tensors):
            work = self.post(partial(group.send, [wire], peer, DATA_TAG), peer)
            in_flight.sends.append((in_flight.num_messages, work, wire))
            in_flight.num_bytes += wire.nbytes
        self.bound_sends(in_flight, peer)

    def may_send_on(self, in_flight: InFlightSends) -> bool:
        """True if the host need not wait for the sends in flight."""
        num_sends = len(in_flight.sends)
        if self._sends_are_unbounded or num_sends <= 2:
            return True
        fits = in_flight.num_bytes <= self.max_in_flight_bytes
        return fits and num_sends <= self.max_in_flight_sends

    def receive(
        self, peer: int, metas: Sequence[TensorMeta], device: torch.device
    ) -> PostedReceive:
        group = self.group_with(peer, sends=False)
        tensors = empty_tensors(metas, device)
        wires = map(as_wire, tensors)
        works = [self.post(partial(group.recv, [w], peer, DATA_TAG), peer) for w in wires]
        return PostedReceive(self, peer, tensors, works)

    def allow_unbounded_sends(self, allowed: bool) -> None:
        self._sends_are_unbounded = allowed

    def drain(self) -> None:
        for peer, in_flight in self._in_flight.items():
            sends = in_flight.sends
            self.wait_for_message([work for _, work, _ in sends], [t for *_, t in sends], peer)
        self._in_flight.clear()
        for peer, metadata in self._metadata.items():
            self.wait_for([work for work, _ in metadata], peer)
        self._metadata.clear()

    # --- control plane -------------------------------------------------------------------------

    def send_metadata(self, peer: int, data: bytes) -> None:
        data = len(data).to_bytes(8, "little") + data
        # A first part of fixed size, which holds most messages.
        for part in (data[:METADATA_BYTES].ljust(METADATA_BYTES, b"\0"), data[METADATA_BYTES:]):
            if part:
                self._send_control(peer, _as_tensor(part), METADATA_TAG)

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
        return bytes(self._recv_control(peer, tensor, METADATA_TAG))

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
        self._calls.collectives += 1
        self._collected = tensors
        self.wait_for((self.post(start, Peers.ALL_RANKS),), Peers.ALL_RANKS)

    def all_reduce(self, tensor: Tensor) -> None:
        self.collect(lambda: self._control.allreduce([tensor]), (tensor,))

    def barrier(self) -> None:
        # A group that also has NCCL would run a device barrier.
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        self.collect(lambda: self._control.barrier(options), self._collected)

    def all_gather_ints(self, number: int) -> list[int]:
        # Gloo aborts processes that gather unequal tensors. Gather the header first.
        return unpack_headers(self._all_gather(pack_header(number, self._calls.name)))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self.all_gather_ints(len(data))
        parts = self._all_gather(_as_tensor(data.ljust(max(lengths), b"\0")))
        return [bytes(p.tolist())[:length] for p, length in zip(parts, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self.collect(lambda: self._control.allgather([parts], [tensor]), (*parts, tensor))
        return parts


# NCCL group → its gloo group of the same ranks, made once, with weak references.
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for CPU tensors; a collective call.

    All calls over ``group`` share it, so that ranks in different calls detect the difference.
    """
    if _torch_compat.takes_cpu_tensors(group):
        return group
    if group not in _control_groups:
        ranks, name = dist.get_process_group_ranks(group), key_of(group, "control")
        _control_groups[group] = _torch_compat.make_group(
            ranks, "gloo", name, timeout_s=CONTROL_TIMEOUT_S
        )
    return _control_groups[group]


def break_pairs(group: dist.ProcessGroup, peers: Iterable[int]) -> None:
    """Close gloo's connections to ``peers``, as a receive that times out does, so that waits on
    them fail at once."""
    for peer in peers:
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                _poke(group, peer).wait(timedelta(milliseconds=1))


def is_closed(group: dist.ProcessGroup, peer: int) -> bool:
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
    """A view of a contiguous tensor in a dtype of NCCL; a copy if it is conjugated.

    Example:
        >>> as_wire(torch.zeros(3, dtype=torch.complex64)).shape
        torch.Size([24])
    """
    if tensor.dtype in WIRE_DTYPES:
        return tensor
    return tensor.resolve_conj().reshape(-1).view(torch.uint8)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
