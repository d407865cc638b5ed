"""The transport over torch.distributed: gloo for CPU tensors, NCCL for CUDA ones.

Data plane: the user's process group; on NCCL a group for messages to higher ranks and one for those
to lower ranks, so that a send never queues behind a receive of the same pair (``nccl.py``). Control
plane: a gloo group, always.

Nobody hangs: a watcher thread (``watcher.py``) looks at the board (``failure.py``) whenever this
rank has waited for longer than a moment. Nothing in torch wakes a blocked wait from outside; how it
is broken, ``breaking.py`` says.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _torch_compat
from penstock.compat.announcing import NOTE, default_group, key_of, store_of, withdraw
from penstock.errors import PenstockError, StageError
from penstock.runtime.comm.answer import poll
from penstock.runtime.comm.base import empty_tensors
from penstock.runtime.comm.breaking import abort_all, break_pairs, is_closed
from penstock.runtime.comm.control_plane import ControlPlane
from penstock.runtime.comm.in_flight_sends import InFlightSends
from penstock.runtime.comm.large_messages import MIN_LARGE_BYTES, LargeMessage
from penstock.runtime.comm.nccl import as_wire, make_connections
from penstock.runtime.failure import Board, Place
from penstock.runtime.first_cause import FirstCause
from penstock.runtime.group_log import GroupLog, calls_over
from penstock.runtime.last_words import tells_at_the_end
from penstock.runtime.watcher import Others, Watcher, Whom
from penstock.stage.device_streams import Event, streams_of
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["C10dTransport"]

DATA_TAG = 0x5E7
# Sends to one peer may pile up to so many bytes (and at least two, and at most so many) before the
# oldest is waited for: held sends are memory, but waiting costs a switch of threads, which small
# messages are not worth. The programs that run are free of deadlock even where a send blocks.
MAX_HELD_BYTES = 16 << 20
MAX_HELD_SENDS = 256
# On a device, where the host runs ahead, and to let it do so costs no switch.
MAX_AHEAD_BYTES = 512 << 20
# How long a device may take, after a failure, to end the step before: what it has computed there
# has been returned already.
MAX_SETTLE_S = 30.0
# How long a wait may go on, in torch's code, where the watcher could not break it.
MAX_OVERTIME_S = 5.0
# Torch counts timeouts in whole numbers.
MAX_TIMEOUT_S = 1e7


class _Receive:
    __slots__ = ("_peer", "_tensors", "_transport", "_works")

    def __init__(
        self, transport: C10dTransport, peer: int, tensors: list[Tensor], works: list[Any]
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._tensors = tensors
        self._works = works

    def wait(self) -> Sequence[Tensor]:
        self._transport.await_message(self._works, self._tensors, self._peer)
        return self._tensors


class C10dTransport(ControlPlane):
    """One rank's connection over process groups.

    Args:
        group: the pipeline's group; its ranks are the pipeline's ranks.
        device: where the stages' tensors live.
        number: how many schedules over this group were made before, alike on all ranks.
        timeout_s: how long any wait may take.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, timeout_s: float
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise StageError(
                f"stages on {device.type} can't be joined over processes: messages go from CPU to "
                "CPU (gloo) or from CUDA to CUDA (NCCL); play all ranks in one process, without "
                "torchrun, or put the stages on one of these"
            )
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._group = group
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._streams = streams_of(device)
        # On a device, all that the last good step has given it.
        self._last_step: Event = None
        self._up = self._down = self._control = group
        # Whether the groups are made, and all ranks are connected over them.
        self._connected = self._is_joined = False
        self._held: defaultdict[int, InFlightSends] = defaultdict(InFlightSends)
        self._notes: defaultdict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
        # Ranks with which connections are still to be made.
        self._unconnected: set[int] = set()
        self._is_relaxed = False
        self.number = number
        self._calls = calls_over(group)
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._replicas: tuple[dist.ProcessGroup, ...] = ()
        self._cause = FirstCause(
            self._make_board(), self._calls, number, self.rank, self._processes
        )
        self._watcher = Watcher(timeout_s, self.wake)
        # How long torch itself waits, where the group is the caller's; the watcher goes first.
        limit_s = min(timeout_s + MAX_OVERTIME_S, MAX_TIMEOUT_S)
        self._limit = () if self._on_cuda else (timedelta(seconds=limit_s),)
        tells_at_the_end(self)

    def connect(self) -> None:
        """Make the groups that are missing. Every rank calls it at the same point."""
        if self._connected:
            return
        self._connected = True
        has_control = _torch_compat.takes_cpu_tensors(self._group)
        if self._on_cuda or not has_control:
            self._await_all()
        if self._on_cuda:
            self._up, self._down = self._new_group("nccl", "up"), self._new_group("nccl", "down")
        if not has_control:
            self._control = self._new_group("gloo", "control")
        self._watcher.look_at(self._cause.board.aside(), always=self._on_cuda)

    def _await_all(self) -> None:
        """Wait until every rank is about to make groups: torch's wait for them minds no board."""
        store, key = store_of(self._group), key_of(self._group, f"{self.number}/here")
        store.add(key, 1)
        end = time.monotonic() + self._watcher.timeout_s
        while store.add(key, 0) < self.num_ranks:
            self._watcher.timed_out = time.monotonic() > end
            failed = self._cause.board.read(patient=True) is not None or self._cause.board.is_lost
            if failed or self._watcher.timed_out:
                self._watcher.note_broken(Others.RANKS)
                raise RuntimeError("ranks are missing where groups are made")
            time.sleep(max(0.02, self._cause.board.pace_s))

    def _new_group(self, backend: str, purpose: str) -> dist.ProcessGroup:
        name = key_of(self._group, f"{self.number}/{purpose}")
        # The watcher goes first; where torch's own waits end, NCCL ends the process.
        timeout_s = min(2 * self._watcher.timeout_s + 60, MAX_TIMEOUT_S)
        return _torch_compat.make_group(self._processes, backend, name, timeout_s=timeout_s)

    def register_peers(self, peers: Iterable[int]) -> None:
        self._unconnected.update(peers)

    def _connect_peers(self) -> None:
        strangers, self._unconnected = self._unconnected, set()
        if self._on_cuda and strangers:
            make_connections(
                self.rank, strangers, self._up, self._down, self._device, self._watched
            )
        if self._on_cuda and not self._is_joined:
            # For what is summed over all ranks, likewise before the first step.
            scrap = torch.zeros(1, device=self._device)
            self._watched(lambda: self._up.allreduce([scrap]).wait(), Others.RANKS)
            self._is_joined = True

    def _watched(self, call: Callable[[], object], whom: Whom) -> None:
        self._watcher.waiting_for = ((), whom)
        call()
        self._watcher.waiting_for = None

    # --- data plane --------------------------------------------------------------------------

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        held = self._held[peer]
        group = self._up if peer > self.rank else self._down
        held.num_sent += 1
        for tensor in tensors:
            wire = as_wire(tensor) if self._on_cuda else tensor
            held.add(self.post(partial(group.send, [wire], peer, DATA_TAG), peer), tensor)
        if self._on_cuda:
            self._drop_sent(held, peer)
            return
        while held.num_bytes > MAX_HELD_BYTES or len(held.sends) > MAX_HELD_SENDS:
            if self._is_relaxed or len(held.sends) <= 2:
                return
            _, work, tensor = held.sends[0]
            self.await_message((work,), (tensor,), peer)
            held.drop_first()

    def release(self, peer: int, num_messages: int) -> None:
        if self._on_cuda:
            return  # that a message is waited for here does not say that it has come
        held = self._held[peer]
        sends = held.sends
        while sends and sends[0][0] <= num_messages:
            self.wait_for((sends[0][1],), peer)  # no wait: the tensor has arrived
            held.drop_first()

    def _drop_sent(self, held: InFlightSends, peer: int) -> None:
        """Let go of what the device has sent; the host waits for it where it is far ahead."""
        while held.sends:
            work = held.sends[0][1]
            if not work.is_completed():
                if held.num_bytes <= MAX_AHEAD_BYTES and len(held.sends) <= MAX_HELD_SENDS:
                    return
                if self._is_relaxed or len(held.sends) <= 2:
                    return
                self._watched(lambda work=work: _until(work.is_completed), peer)  # type: ignore[misc]
            held.drop_first()

    def receive(self, peer: int, metas: Sequence[TensorMeta], device: torch.device) -> _Receive:
        group = self._up if peer < self.rank else self._down
        tensors = empty_tensors(metas, device)
        wires = map(as_wire, tensors) if self._on_cuda else tensors
        works = [self.post(partial(group.recv, [t], peer, DATA_TAG), peer) for t in wires]
        return _Receive(self, peer, tensors, works)

    def allow_unbounded_sends(self, relaxed: bool) -> None:
        self._is_relaxed = relaxed

    def drain(self) -> None:
        for peer, held in self._held.items():
            works, tensors = [x[1] for x in held.sends], [x[2] for x in held.sends]
            self.await_message(works, tensors, peer)
            held.drop_all()
        for peer, notes in self._notes.items():
            self.wait_for([work for work, _ in notes], peer)
            notes.clear()

    def post(self, start: Callable[[], Any], whom: Whom) -> Any:
        try:
            return start()
        except NotImplementedError:
            raise  # torch can't send such a tensor
        except RuntimeError:
            self._watcher.note_broken(whom)
            raise

    def wait_for(self, works: Sequence[Any], whom: Whom) -> None:
        watcher = self._watcher
        watcher.waiting_for = (works, whom)
        for work in works:
            work.wait(*self._limit)
        watcher.waiting_for = None

    def await_message(self, works: Sequence[Any], tensors: Iterable[Tensor], peer: int) -> None:
        """Wait until ``tensors`` have been sent to ``peer``, or have come from it."""
        if not self._on_cuda and sum(tensor.nbytes for tensor in tensors) >= MIN_LARGE_BYTES:
            works = (LargeMessage(works, partial(is_closed, self._group, peer)),)
        self.wait_for(works, peer)

    def all_reduce(self, tensor: Tensor) -> None:
        group = self._up if tensor.is_cuda else self._control
        self._collect(lambda: group.allreduce([tensor]), (tensor,))
        if tensor.is_cuda:
            self.barrier()  # the streams wait for all ranks, and the host has not waited

    # --- failure -----------------------------------------------------------------------------

    def watch_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        groups = tuple(group for group in groups if group.size() > 1)
        if groups != self._replicas:
            self._replicas = groups
            self._cause.board = self._make_board()
            self._watcher.look_at(self._cause.board.aside(), always=bool(groups) or self._on_cuda)

    @contextlib.contextmanager
    def waiting_for_replicas(self) -> Iterator[None]:
        self._watcher.waiting_for = ((), Others.REPLICAS)
        yield
        self._watcher.waiting_for = None

    @contextlib.contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """What is waited for within is the other ranks: by torch, under the watcher's eye."""
        self._watcher.waiting_for = ((), Others.RANKS)
        try:
            yield
        except Exception as error:
            if not self._is_cut_off(error):
                self._watcher.waiting_for = None
            raise
        self._watcher.waiting_for = None

    def _is_cut_off(self, error: BaseException | None) -> bool:
        """Whether ``error`` is that of a wait which was broken, by the watcher or by a death."""
        return self._watcher.has_woken or _torch_compat.is_lost_connection(error)

    def _make_board(self) -> Board:
        own = Place(store=store_of(self._group), key=key_of(self._group, self.number))
        # Every replica's pipeline has made as many schedules: the number is the same in each.
        replicas = f"replicas/{self.number}"
        others = [replace(own, key=key_of(group, replicas)) for group in self._replicas]
        note = replace(own, key=key_of(self._group, NOTE))
        log = GroupLog(own.store, self._group, self.number)
        return Board([own, *others], note, (default_group() or self._group).size(), log)

    def fail(self, error: BaseException) -> PenstockError | None:
        waited_for = self._watcher.stop()
        if isinstance(error, PenstockError):
            # Something else failed, not the wait; unless torch has waited within an action.
            broken = self._replicas and self._is_cut_off(error.__cause__)
            waited_for = ((), Others.REPLICAS) if broken else None
        elif not isinstance(error, RuntimeError):
            waited_for = None  # Ctrl-C may reach a rank that waits
        raised = self._cause.settle(error, waited_for, self._watcher)
        if self._on_cuda:  # or the device would wait for messages for ever, and the host for it
            self._give_up((self._up, self._down))
        return raised

    def tell_of_end(self, error: BaseException) -> bool:
        """See ``last_words.py``."""
        return self._cause.tell_of_end(error)

    def wake(self, whom: Whom) -> None:
        """Break the wait of the main thread for ``whom``. Called by the watcher, in its own
        thread."""
        replicas = self._replicas if whom is Others.REPLICAS else ()
        for group in filter(_torch_compat.takes_cpu_tensors, replicas):
            break_pairs(group, range(group.size()))
        if whom is not Others.REPLICAS:
            all_ranks = range(self.num_ranks)
            break_pairs(self._control, all_ranks if isinstance(whom, Others) else [whom])
        if self._on_cuda:
            # Whomever the host waits for: the device may wait for a message before that.
            self._give_up((*replicas, self._up, self._down))

    def _give_up(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """End what the device does over ``groups``; what is left of the step before may end well,
        since its results are the caller's."""
        streams, last = self._streams, self._last_step
        if streams is not None and last is not None:
            with contextlib.suppress(RuntimeError):  # the device itself is broken
                poll(lambda: streams.is_over(last) or None, for_s=MAX_SETTLE_S)
        abort_all(groups)

    def close(self) -> None:
        self._watcher.stop()

    def begin(self, what: str) -> None:
        self._calls.begin(what)
        withdraw(self._group)
        self.connect()
        self._watcher.start()
        self._connect_peers()

    def end(self) -> None:
        self._cause.note_success()
        self._watcher.rest()
        if self._streams is not None:
            self._last_step = self._last_step or self._streams.event()
            self._streams.mark(self._last_step, self._streams.current())


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(1e-4)
