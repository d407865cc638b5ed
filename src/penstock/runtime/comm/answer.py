"""An answer that may never come, waited for no longer than one likes.

A process that is stopped, or a machine that can't be reached, keeps whoever asks its store waiting:
torch sets no limit there. So the store is asked in a thread of its own. This module knows neither
stores nor boards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Answer", "poll"]

T = TypeVar("T")


class Answer(Generic[T]):
    """What a call returns, in time.

    Args:
        ask: the call; it raises nothing.

    Attributes:
        value: what it has returned, once it is there.

    Example:
        >>> answer = Answer(lambda: 1 + 1)
        >>> answer.is_there(within_s=10.0), answer.value
        (True, 2)
    """

    value: T

    def __init__(self, ask: Callable[[], T]) -> None:
        self._thread = threading.Thread(
            target=self._take, args=(ask,), name="penstock-asks", daemon=True
        )
        self._thread.start()

    def _take(self, ask: Callable[[], T]) -> None:
        self.value = ask()

    def is_there(self, *, within_s: float) -> bool:
        """Whether it is there; waits for it so long."""
        self._thread.join(within_s)
        return not self._thread.is_alive()


def poll(read: Callable[[], T | None], *, for_s: float, every_s: float = 0.05) -> T | None:
    """What ``read`` finds within ``for_s`` seconds, or None; it is called every so often."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        found = read()
        if found is not None:
            return found
        time.sleep(every_s)
    return None
