"""A thread that reads the error store during waits, and aborts waits that cannot succeed.

main thread   ── compute ──┤ waits for rank 2 ···························├─ raises
watchdog           read        read       read: a cause!  aborts ────────┘
rank 2        ── raises, writes the cause ──────┘
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

__all__ = ["FailureSource", "Peers", "BackgroundCall", "Wait", "Watchdog", "poll"]

T = TypeVar("T")

# The minimum interval between reads; with very many ranks per store it is longer.
READ_INTERVAL_S = 0.2
# The interval between reads while no wait is active.
IDLE_INTERVAL_S = 0.8
# Limits on a read that is under way at exit, and when a watchdog is stopped. Python ends threads by
# force, which aborts the process if one is in torch's code, but a lost store may take minutes.
MAX_LAST_READ_S = 10.0
MAX_READ_S = 1.0


class FailureSource(Protocol):
    """The store of failures as a watchdog reads it; see ``failure.ErrorStore``."""

    is_lost: bool
    interval_s: float

    def read(self, waited_s: float) -> object | None:
        """The failure that ends this call, or None."""


class Peers(Enum):
    """Several peers of one wait."""

    ALL_RANKS = "the other ranks"
    REPLICAS = "the replicas of its stages"


Wait: TypeAlias = tuple[Sequence[Any], int | Peers]
"""Works, and the rank or ranks that they depend on."""


class BackgroundCall(Generic[T]):
    """A call, which raises nothing, in a separate thread: torch sets no limit on requests to the
    store of a process that is stopped or unreachable. ``value`` is the result, once it is there."""

    value: T

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._thread = threading.Thread(target=self._run, name="penstock-call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.value = self._function()

    def is_done(self, *, within_s: float) -> bool:
        """Wait for the result at most ``within_s`` seconds; returns True if it is there."""
        self._thread.join(within_s)
        return not self._thread.is_alive()


def poll(read: Callable[[], T | None], *, for_s: float, every_s: float = 0.05) -> T | None:
    """The first value that ``read`` returns within ``for_s`` seconds, or None."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        if (found := read()) is not None:
            return found
        time.sleep(every_s)
    return None


class Watchdog:
    """Aborts a wait if another rank has failed or the wait exceeds the timeout.

    Args:
        timeout_s: the limit on a wait, in seconds.
        abort: ends the main thread's wait for some ranks; called in the watchdog's thread.

    Attributes:
        waiting_for: the main thread's wait, or None. Each wait is a tuple of its own, so that two
            reads tell one long wait from two short ones without a clock in the main thread.
        has_aborted: whether it has aborted a wait.
        timed_out: whether a wait exceeded the timeout.
        store_is_lost: whether the store is gone, or kept silent until the timeout.
    """

    def __init__(self, timeout_s: float, abort: Callable[[int | Peers], None]) -> None:
        self.waiting_for: Wait | None = None
        self.has_aborted = self.timed_out = self.store_is_lost = False
        self.timeout_s = timeout_s
        self._abort = abort
        self._thread: threading.Thread | None = None
        self._active, self._stopped = threading.Event(), threading.Event()
        self._errors: FailureSource | None = None
        self._watches_always = False
        self._query: BackgroundCall[bool] | None = None

    def watch(self, errors: FailureSource, *, always: bool) -> None:
        """Set the error store to read.

        Args:
            errors: a store for this thread alone, connected by the caller: to connect to a dead
                process takes minutes.
            always: whether to read even without a wait, since torch may wait within any action:
                for replicas, or for the device.
        """
        self._errors, self._watches_always = errors, always

    def start(self) -> None:
        """Begin to watch a call."""
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(
                target=self._watch, name="penstock-watchdog", daemon=True
            )
            self._thread.start()
            atexit.register(self._end)
        self._active.set()

    def rest(self) -> None:
        """Stop watching a call; the thread sleeps until the next one."""
        self._active.clear()

    def stop(self) -> Wait | None:
        """Stop the thread; returns the main thread's current wait, if any."""
        self._end(None)
        atexit.unregister(self._end)
        waiting, self.waiting_for = self.waiting_for, None
        self._abort = lambda peer: None  # releases the transport
        return waiting

    def _end(self, for_s: float | None = MAX_LAST_READ_S) -> None:
        self._stopped.set()
        self._active.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(for_s)
            if self._query is not None and not self.store_is_lost:
                self._query.is_done(within_s=for_s or MAX_READ_S)

    def _watch(self) -> None:
        seen: Wait | None = None
        since = read_at = interval_s = 0.0
        has_failed = False
        while not self._stopped.wait(max(READ_INTERVAL_S, interval_s)):
            self._active.wait()
            if self._stopped.is_set():
                return
            errors, waiting, now = self._errors, self.waiting_for, time.monotonic()
            assert errors is not None
            interval_s = errors.interval_s
            if waiting is not seen:
                seen, since = waiting, now
            elif waiting is not None:
                is_late = now - since > self.timeout_s
                self.timed_out |= is_late
                if is_late or self._has_failure(errors, now - since):
                    self.store_is_lost = errors.is_lost or self._query is not None
                    if self.waiting_for is waiting:
                        self._abort_wait(waiting[1])
            elif self._watches_always and now - read_at > IDLE_INTERVAL_S:
                if not self._has_failure(errors, 0.0):
                    read_at = time.monotonic()
                elif has_failed:
                    self.store_is_lost = errors.is_lost
                    self._abort_wait(Peers.REPLICAS)
                else:
                    # At the second read only: ranks that all make the same mistake raise by
                    # themselves, and the groups of replicas stay whole.
                    has_failed = True

    def _has_failure(self, errors: FailureSource, waited_s: float) -> bool:
        """True if the store has a failure or is gone; False while it does not answer."""
        if self._query is None:
            self._query = BackgroundCall(
                lambda: errors.read(waited_s) is not None or errors.is_lost
            )
        if not self._query.is_done(within_s=READ_INTERVAL_S):
            return False
        found, self._query = self._query.value, None
        return found

    def _abort_wait(self, peer: int | Peers) -> None:
        self.has_aborted = True
        self._abort(peer)
