"""The wait for a large message, which its sender's death may cut short.

    gloo reads      ▓▓▓▓▓▓▓▓▓░░░░░   the rest never comes: the pair is closed, nobody is woken
    who waits       ┤ looks   looks: closed? leaves the wait, and raises

Gloo tells whoever waits on a pair that it has closed, but for the message of which a part is there.
A small one arrives at once, or not at all; a large one is waited for in a thread of its own, so
that the wait can be left. This module does not know why a pair was closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from penstock.runtime.comm.answer import Answer

__all__ = ["MIN_LARGE_BYTES", "LargeMessage"]

# What the system holds of a message that nobody has read yet is a good part of this, or more: so
# much arrives even from a process that has died. The thread costs little beside the message.
MIN_LARGE_BYTES = 1 << 20
# Each look leaves some bytes with gloo.
LOOK_INTERVAL_S = 1.0
# A wait that ends by itself, with gloo's reason, does so soon.
MAX_END_S = 0.2


class LargeMessage:
    """The works of a message, to be waited for like one.

    Args:
        works: what ``isend`` or ``irecv`` returned for its tensors.
        is_cut_short: whether the connection is closed, so that no more will come.
    """

    def __init__(self, works: Sequence[Any], is_cut_short: Callable[[], bool]) -> None:
        self._works = works
        self._is_cut_short = is_cut_short

    def wait(self, limit: timedelta) -> None:
        """Wait until all of it has been sent or received.

        Args:
            limit: how long each of the works may take.

        Raises:
            RuntimeError: the connection was closed, or ``limit`` has passed.
        """
        waited = Answer(partial(_wait, self._works, limit))
        while not waited.is_there(within_s=LOOK_INTERVAL_S):
            if self._is_cut_short() and not waited.is_there(within_s=MAX_END_S):
                raise RuntimeError("the connection was closed in the middle of a message")
        if waited.value is not None:
            raise waited.value


def _wait(works: Sequence[Any], limit: timedelta) -> RuntimeError | None:
    try:
        for work in works:
            work.wait(limit)
    except RuntimeError as error:
        return error
    return None
