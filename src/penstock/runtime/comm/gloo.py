"""The transport for CPU tensors, over gloo.

A wait is aborted by closing the connection to the peer. A receive that times out closes its pair.
Every wait on the pair then fails at once, except for a partially received message.

    gloo reads      ▓▓▓▓▓▓▓▓▓░░░░░   the rest never comes: the pair is closed, nobody is woken
    the waiter      ┤ looks   looks: closed? leaves the wait, and raises

Therefore a separate thread waits for large messages, and the waiter can leave it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _torch_compat
from penstock.runtime.comm.base import empty_tensors
from penstock.runtime.comm.c10d import DATA_TAG, C10dTransport, Received
from penstock.runtime.watchdog import Peers, StoreQuery, Whom
from penstock.stage.boundary import TensorMeta

__all__ = ["GlooTransport", "LargeMessage", "break_pairs", "is_closed"]

# Limits on the bytes and the number of sends in flight to one peer (two sends are always allowed)
# before a wait for the oldest. More sends cost memory; a wait costs a thread switch. A checked
# program is deadlock-free even if sends block.
MAX_HELD_BYTES = 16 << 20
MAX_HELD_SENDS = 256
# Larger messages are awaited in a thread. The system buffers a good part of this size, so that much
# of a message arrives even if the sender has died.
MIN_LARGE_BYTES = 1 << 20
# The interval between connection checks. Each check leaks some bytes in gloo.
LOOK_INTERVAL_S = 1.0
# Grace period for a wait to end by itself, with gloo's own error.
MAX_END_S = 0.2
POKE_TAG = 0x5EA


class GlooTransport(C10dTransport):
    """One rank's transport for CPU tensors; see ``C10dTransport``."""

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        in_flight = self._in_flight[peer]
        in_flight.num_messages += 1
        for tensor in tensors:
            post = partial(self._control.send, [tensor], peer, DATA_TAG)
            in_flight.add(self.post(post, peer), tensor)
        sends = in_flight.sends
        while in_flight.num_bytes > MAX_HELD_BYTES or len(sends) > MAX_HELD_SENDS:
            if self._sends_are_unbounded or len(sends) <= 2:
                return
            _, work, tensor = sends[0]
            self.wait_for_message((work,), (tensor,), peer)
            in_flight.drop_first()

    def release(self, peer: int, num_messages: int) -> None:
        in_flight = self._in_flight[peer]
        sends = in_flight.sends
        while sends and sends[0][0] <= num_messages:
            self.wait_for((sends[0][1],), peer)  # returns at once, since the tensor has arrived
            in_flight.drop_first()

    def receive(self, peer: int, metas: Sequence[TensorMeta], device: torch.device) -> Received:
        tensors = empty_tensors(metas, device)
        receive = self._control.recv
        works = [self.post(partial(receive, [t], peer, DATA_TAG), peer) for t in tensors]
        return Received(self, peer, tensors, works)

    def wait_for_message(self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int) -> None:
        """Wait until ``tensors`` are sent to ``peer`` or received from ``peer``."""
        if sum(tensor.nbytes for tensor in tensors) >= MIN_LARGE_BYTES:
            works = (LargeMessage(works, partial(is_closed, self._control, peer)),)
        self.wait_for(works, peer)

    def abort(self, whom: Whom) -> None:
        if whom is Peers.REPLICAS:
            break_replicas(self._replicas)
        else:
            peers = range(self.num_ranks) if isinstance(whom, Peers) else [whom]
            break_pairs(self._control, peers)


class LargeMessage:
    """The works of a large message, with the interface of one work.

    Args:
        works: a work per tensor.
        is_cut_short: returns True if the connection is closed.
    """

    def __init__(self, works: Sequence[Any], is_cut_short: Callable[[], bool]) -> None:
        self._works = works
        self._is_cut_short = is_cut_short

    def wait(self, limit: timedelta) -> None:
        """Wait until the whole message is sent or received.

        Args:
            limit: the timeout of each work.

        Raises:
            RuntimeError: the connection was closed, or ``limit`` has passed.
        """
        waiting = StoreQuery(partial(_wait, self._works, limit))
        while not waiting.is_done(within_s=LOOK_INTERVAL_S):
            if self._is_cut_short() and not waiting.is_done(within_s=MAX_END_S):
                raise RuntimeError("the connection was closed in the middle of a message")
        if waiting.value is not None:
            raise waiting.value


def _wait(works: Sequence[Any], limit: timedelta) -> RuntimeError | None:
    try:
        for work in works:
            work.wait(limit)
    except RuntimeError as error:
        return error
    return None


def break_pairs(group: dist.ProcessGroup, peers: Iterable[int]) -> None:
    """Close gloo's connections to ``peers``, so that waits on them fail at once."""
    for peer in peers:
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                _poke(group, peer).wait(timedelta(milliseconds=1))


def break_replicas(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close the connections of the groups with a gloo backend."""
    for group in filter(_torch_compat.takes_cpu_tensors, groups):
        break_pairs(group, range(group.size()))


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
