"""The transport for CUDA tensors, over NCCL.

The data plane has one group for messages to higher ranks and another for messages to lower ranks,
so that a send never queues behind a receive of the same pair. Works only order streams: the host
runs ahead of the device, and keeps tensors alive until the device has sent them.

The host blocks at the first exchange of two ranks, and within a step these waits could form a
cycle. Connections are therefore made before the first step, in one global order of pairs: in rounds
of disjoint pairs, which connect at the same time. Schedules over one group share its NCCL groups.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _torch_compat
from penstock.cause import key_of
from penstock.errors import PenstockError, ScheduleError
from penstock.runtime.comm.c10d import MAX_TIMEOUT_S, C10dTransport, InFlightSends
from penstock.runtime.failure import BackgroundCall, Peers, Wait, poll
from penstock.stage.device_streams import Event, streams_of

__all__ = ["NcclTransport", "pairs_of"]

# After a failure, the time for the device to finish the previous step, whose results are in use.
MAX_SETTLE_S = 30.0
# Timeout of aborting communicators.
MAX_ABORT_S = 5.0


@dataclass(frozen=True, slots=True)
class _DataPlane:
    """The NCCL groups of a pipeline's group, and the ranks to which they are connected."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    connected: set[int]


class NcclTransport(C10dTransport):
    """One rank's transport for CUDA tensors."""

    always_watched = True
    # The host waits only if it is far ahead.
    max_in_flight_bytes = 512 << 20

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, timeout_s: float
    ) -> None:
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ScheduleError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 gives the device one queue for all streams, in "
                "which a receive would block the computation that its sender waits for; unset it, "
                "or set it to 8"
            )
        super().__init__(group, device, number, timeout_s)
        self._limit = ()
        # An event behind each message or collective that the device may wait for, oldest first.
        self._device_waits: deque[tuple[tuple[Event], int | Peers]] = deque()
        self._streams = streams_of(device)
        self._last_step: Event = None  # recorded after the last successful step
        self._up: Any = None
        self._down: Any = None
        self._peers: set[int] = set()

    def register_peers(self, peers: Iterable[int]) -> None:
        self._peers.update(peers)

    def connect(self) -> None:
        is_first = self._record.data_plane is None
        if is_first:
            self.all_gather_bytes(b"")  # all ranks are in this call and will create groups
            groups = self._new_group("up"), self._new_group("down")
            self._record.data_plane = _DataPlane(*groups, set())
        plane: _DataPlane = self._record.data_plane
        self._up, self._down = plane.up, plane.down
        peers = self._peers - plane.connected
        plane.connected.update(peers)
        scrap = torch.zeros(1, device=self._device)
        for low, high in pairs_of(self.rank, peers):
            peer = high if self.rank == low else low
            for group, source in ((self._up, low), (self._down, high)):
                move = group.send if self.rank == source else group.recv
                with self.watching(peer):
                    move([scrap], peer, 0).wait()
        if is_first:
            with self.watching(Peers.ALL_RANKS):
                self._up.allreduce([scrap]).wait()

    def _new_group(self, purpose: str) -> dist.ProcessGroup:
        name = key_of(self._group, f"{self.schedule_index}/{purpose}")
        # The watchdog acts first, since NCCL ends the process at torch's own timeout.
        timeout_s = min(2 * self._watchdog.timeout_s + 60, MAX_TIMEOUT_S)
        return _torch_compat.make_group(self._processes, "nccl", name, timeout_s=timeout_s)

    def group_with(self, peer: int, *, sends: bool) -> Any:
        return self._up if (peer > self.rank) is sends else self._down

    def bound_sends(self, in_flight: InFlightSends, peer: int) -> None:
        sends = in_flight.sends
        while sends:
            _, work, tensor = sends[0]
            if not work.is_completed():
                if self.may_send_on(in_flight):
                    return
                with self.watching(peer):
                    while not work.is_completed():
                        time.sleep(1e-4)
            in_flight.num_bytes -= tensor.nbytes
            sends.popleft()

    def release(self, peer: int, num_messages: int) -> None:
        """Does nothing: a wait of the host does not imply that a message has arrived."""

    def wait_for_message(
        self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int
    ) -> Sequence[Tensor]:
        self.wait_for(works, peer)
        self._mark_device_wait(peer)
        return tensors

    @contextlib.contextmanager
    def waiting_for_replicas(self) -> Iterator[None]:
        with super().waiting_for_replicas():
            yield
        self._mark_device_wait(Peers.REPLICAS)

    def _mark_device_wait(self, peer: int | Peers) -> None:
        """Mark where the device will have passed a wait, at which the host does not stop."""
        streams, waits = self._streams, self._device_waits
        if streams is not None:
            is_over = bool(waits) and streams.is_over(waits[0][0][0])
            event = waits.popleft()[0][0] if is_over else streams.event()
            streams.mark(event, streams.current())
            waits.append(((event,), peer))

    def device_wait(self) -> Wait | None:
        streams = self._streams
        if streams is None:
            return None
        with contextlib.suppress(RuntimeError):  # the device itself is broken
            waits = list(self._device_waits)
            return next((wait for wait in waits if not streams.is_over(wait[0][0])), None)
        return None

    def all_reduce(self, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            super().all_reduce(tensor)
            return
        self.collect(lambda: self._up.allreduce([tensor]), (tensor,))
        self.barrier()  # only streams waited for all ranks so far, not the host

    def end(self) -> None:
        super().end()
        if self._streams is not None:
            self._last_step = self._last_step or self._streams.event()
            self._streams.mark(self._last_step, self._streams.current())

    def fail(self, error: BaseException) -> PenstockError | None:
        raised = super().fail(error)
        # Otherwise the device would wait for messages forever, and the host for the device.
        self.abort_groups((self._up, self._down))
        return raised

    def abort(self, peer: int | Peers) -> None:
        super().abort(peer)
        # The device may be blocked by an earlier message than the host waits for.
        replicas = self._replicas if peer is Peers.REPLICAS else ()
        self.abort_groups((*replicas, self._up, self._down))

    def abort_groups(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        """Abort groups and their kernels, once the previous step has ended on the device."""
        streams, last = self._streams, self._last_step
        if streams is not None and last is not None:
            with contextlib.suppress(RuntimeError):  # the device itself is broken
                poll(lambda: streams.is_over(last) or None, for_s=MAX_SETTLE_S)
        # Concurrently: NCCL frees a communicator only when no other one's kernel is running.
        aborts = [BackgroundCall(partial(_abort, group)) for group in groups if group is not None]
        end = time.monotonic() + MAX_ABORT_S
        for abort in aborts:
            abort.is_done(within_s=max(0.0, end - time.monotonic()))


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def pairs_of(rank: int, peers: Iterable[int]) -> list[tuple[int, int]]:
    """The pairs of a rank with its peers, the lower rank first, in the global order.

    Pairs of the same distance make two rounds of disjoint pairs, whatever the number of ranks:

        distance 1   0-1   2-3   4-5       1-2   3-4
        distance 2   0-2   1-3   4-6       2-4   3-5

    Examples:
        >>> pairs_of(2, [0, 1, 3, 4])
        [(2, 3), (1, 2), (0, 2), (2, 4)]
    """

    def place(pair: tuple[int, int]) -> tuple[int, int, int]:
        distance = pair[1] - pair[0]
        return distance, pair[0] // distance % 2, pair[0]

    return sorted(((min(rank, peer), max(rank, peer)) for peer in peers), key=place)
