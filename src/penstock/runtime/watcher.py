"""Looks at the board from a thread of its own while the main thread waits.

    main thread   ── compute ──┤ waits for rank 2 ···························├─ raises
    watcher            look        look       look: a cause!  wakes it ──────┘
    rank 2        ── raises, writes the cause ──────┘

It knows neither what is waited for nor how a wait is broken: it is handed both.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeAlias

from penstock.runtime.comm.answer import Answer
from penstock.runtime.failure import Board

__all__ = ["Others", "Wait", "Watcher", "Whom"]

# At the least; with very many ranks more, as the board says: all ask one store.
LOOK_INTERVAL_S = 0.2
# While nothing is waited for it looks more seldom.
IDLE_INTERVAL_S = 0.8
# How long the process's end waits for a look that is under way: Python ends threads by force, which
# aborts the process where one is in torch's code. A store that is lost may take minutes to say so.
MAX_LAST_LOOK_S = 10.0
# How long a watcher that is stopped waits for it; most take milliseconds.
MAX_LOOK_S = 1.0


class Others(Enum):
    """Several ranks that are waited for at once."""

    RANKS = "the other ranks"
    REPLICAS = "the replicas of its stages"


Whom: TypeAlias = int | Others
"""A rank of the pipeline, or several."""

Wait: TypeAlias = tuple[Sequence[Any], Whom]
"""Works, and whom they depend on."""


class Watcher:
    """A thread that breaks waits in vain: someone has failed, or they have taken too long.

    Args:
        timeout_s: how long a wait may take.
        wake: breaks the main thread's wait for someone; called in the watcher's thread.

    Attributes:
        waiting_for: what the main thread waits for; None while it does not wait. Each wait is a
            tuple of its own, so that two looks tell one long wait from two short ones, and the
            main thread need not look at the clock.
        has_woken: whether it has broken a wait.
        timed_out: whether a wait took longer than it may.
        lost_the_store: whether the store is gone, or has kept silent until the wait's deadline.
    """

    def __init__(self, timeout_s: float, wake: Callable[[Whom], None]) -> None:
        self.waiting_for: Wait | None = None
        self.has_woken = False
        self.timed_out = False
        self.lost_the_store = False
        self.timeout_s = timeout_s
        self._wake = wake
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._board: Board | None = None
        self._looks_always = False
        # A look that is under way: in a thread of its own, since the store may never answer.
        self._asked: Answer[bool] | None = None

    def start(self) -> None:
        """A step begins: look from now on."""
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._look, name="penstock-watcher", daemon=True)
            self._thread.start()
            atexit.register(self._end)
        self._awake.set()

    def rest(self) -> None:
        """No step is running: nothing to look at."""
        self._awake.clear()

    def look_at(self, board: Board, *, always: bool) -> None:
        """Say where to look, before it starts or at any time.

        Args:
            board: one for this thread alone. It is made by others: connecting to the store of a
                process that has died takes minutes, in which nobody would look.
            always: whether to look even while nothing is waited for, since torch may wait within
                any action: for replicas, or for what the device has been given.
        """
        self._board = board
        self._looks_always = always

    def note_broken(self, whom: Whom) -> None:
        """A message could not even be posted: as if it had been waited for in vain."""
        self.waiting_for = ((), whom)

    def stop(self) -> Wait | None:
        """End the thread; returns what the main thread was waiting for, if it was."""
        self._end(None)
        atexit.unregister(self._end)
        waiting, self.waiting_for = self.waiting_for, None
        self._wake = _nobody  # and let go of whoever is woken
        return waiting

    def _end(self, for_s: float | None = MAX_LAST_LOOK_S) -> None:
        self._stopped.set()
        self._awake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(for_s)
            if self._asked is not None and not self.lost_the_store:
                self._asked.is_there(within_s=for_s or MAX_LOOK_S)

    def _look(self) -> None:
        seen: Wait | None = None
        since = 0.0
        was_told = False
        looked_s = 0.0
        pace_s = 0.0
        while not self._stopped.wait(max(LOOK_INTERVAL_S, pace_s)):
            self._awake.wait()
            if self._stopped.is_set():
                return
            board, waiting = self._board, self.waiting_for
            assert board is not None
            pace_s = board.pace_s
            if waiting is not seen:
                seen, since = waiting, time.monotonic()
            elif waiting is not None:
                self._look_after(waiting, time.monotonic() - since, board)
            elif self._looks_always and time.monotonic() - looked_s > IDLE_INTERVAL_S:
                # Sharded parameters are gathered by torch itself, within forwards.
                if not self._is_told(board, 0.0):
                    looked_s = time.monotonic()
                elif was_told:
                    self.lost_the_store = board.is_lost
                    self._break(Others.REPLICAS)
                else:
                    # At the second look only: ranks that all make one mistake raise by themselves,
                    # and the groups of replicas stay whole.
                    was_told = True

    def _look_after(self, waiting: Wait, waited_s: float, board: Board) -> None:
        if waited_s > self.timeout_s:
            self.timed_out = True
        elif not self._is_told(board, waited_s):
            return
        self.lost_the_store = board.is_lost or self._asked is not None
        if self.waiting_for is waiting:
            self._break(waiting[1])

    def _is_told(self, board: Board, waited_s: float) -> bool:
        """Whether the board tells of a failure, or is gone; as long as it does not answer, no."""
        if self._asked is None:
            self._asked = Answer(lambda: _tells(board, waited_s))
        if not self._asked.is_there(within_s=LOOK_INTERVAL_S):
            return False
        told, self._asked = self._asked.value, None
        return told

    def _break(self, whom: Whom) -> None:
        self.has_woken = True
        self._wake(whom)


def _tells(board: Board, waited_s: float) -> bool:
    found = board.read(patient=True) or board.read_elsewhere(waited_s)
    return found is not None or board.is_lost


def _nobody(_: Whom) -> None:
    """Wakes nobody."""
