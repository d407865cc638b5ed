"""The transport for CPU tensors, over gloo.

A wait is aborted by closing the connection to the peer: a receive that times out closes its pair.
Every wait on the pair then fails at once, except for a partially received message, which gloo never
completes. Therefore a separate thread waits for large messages, and the waiter can leave it.
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
from penstock.runtime.comm.c10d import C10dTransport, InFlightSends
from penstock.runtime.watchdog import BackgroundCall, Peers

__all__ = ["GlooTransport", "LargeMessage", "break_pairs", "break_waits", "is_closed"]

# Larger messages are awaited in a thread. The system buffers a good part of this size, so that much
# of a message arrives even if the sender has died.
MIN_LARGE_BYTES = 1 << 20
# The interval between connection checks. Each check leaks some bytes in gloo.
CHECK_INTERVAL_S = 1.0
# Grace period for a wait to end by itself, with gloo's own error.
MAX_END_S = 0.2
POKE_TAG = 0x5EA


class GlooTransport(C10dTransport):
    """One rank's transport for CPU tensors; see ``C10dTransport``."""

    def group_with(self, peer: int, *, sends: bool) -> Any:
        return self._control

    def bound_sends(self, in_flight: InFlightSends, peer: int) -> None:
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

    def wait_for_message(self, works: Sequence[Any], tensors: Sequence[Tensor], peer: int) -> None:
        if sum(tensor.nbytes for tensor in tensors) >= MIN_LARGE_BYTES:
            works = (LargeMessage(works, partial(is_closed, self._control, peer)),)
        self.wait_for(works, peer)

    def abort(self, peer: int | Peers) -> None:
        break_waits(self._control, self._replicas, peer)


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
        """Wait until the whole message is sent or received, at most ``limit`` per work.

        Raises:
            RuntimeError: the connection was closed, or ``limit`` has passed.
        """

        def wait() -> RuntimeError | None:
            try:
                for work in self._works:
                    work.wait(limit)
            except RuntimeError as error:
                return error
            return None

        waiting = BackgroundCall(wait)
        while not waiting.is_done(within_s=CHECK_INTERVAL_S):
            if self._is_cut_short() and not waiting.is_done(within_s=MAX_END_S):
                raise RuntimeError("the connection was closed in the middle of a message")
        if waiting.value is not None:
            raise waiting.value


def break_waits(
    control: dist.ProcessGroup, replicas: Iterable[dist.ProcessGroup], peer: int | Peers
) -> None:
    """Close gloo's connections to ``peer``: of the control group, or of the replicas' groups."""
    if isinstance(peer, int):
        break_pairs(control, [peer])
        return
    for group in replicas if peer is Peers.REPLICAS else (control,):
        if _torch_compat.takes_cpu_tensors(group):
            break_pairs(group, range(group.size()))


def break_pairs(group: dist.ProcessGroup, peers: Iterable[int]) -> None:
    """Close gloo's connections to ``peers``, so that waits on them fail at once."""
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
