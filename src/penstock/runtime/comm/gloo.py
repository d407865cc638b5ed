"""The transport for CPU tensors, over gloo.

A wait is aborted by closing the connection to the peer. Every wait on it then fails at once, except
for a partially received message, which gloo never completes. Therefore a separate thread waits for
large messages, and the waiter can leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from penstock.runtime.comm.c10d import C10dTransport, InFlightSends, is_closed
from penstock.runtime.watchdog import BackgroundCall

__all__ = ["GlooTransport", "LargeMessage"]

# Larger messages are awaited in a thread. The system buffers a good part of this size, so that much
# of a message arrives even if the sender has died.
MIN_LARGE_BYTES = 1 << 20
# The interval between connection checks. Each check leaks some bytes in gloo.
CHECK_INTERVAL_S = 1.0
# Grace period for a wait to end by itself, with gloo's own error.
MAX_END_S = 0.2


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


@dataclass(frozen=True, slots=True)
class LargeMessage:
    """The works of a large message, with the interface of one work.

    Args:
        works: a work per tensor.
        is_cut_short: returns True if the connection is closed.
    """

    works: Sequence[Any]
    is_cut_short: Callable[[], bool]

    def wait(self, limit: timedelta) -> None:
        """Wait until the whole message is sent or received, at most ``limit`` per work; raises a
        RuntimeError if the connection was closed, or ``limit`` has passed."""
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
