"""The thread that reads the error store while other ranks are waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime import failure
from penstock.runtime.failure import READ_INTERVAL_S, ErrorStore, Watchdog

# A look asks the store again and again, and so is in torch's own code when the process ends.
ENDS_IN_A_LOOK = """
import threading
import time
import torch.distributed as dist
from penstock.cause import FailureLog
from penstock.runtime.failure import ErrorStore, Watchdog

store = dist.TCPStore("127.0.0.1", 0, 1, True)
looking = threading.Event()

class SlowStore:
    def check(self, keys):
        looking.set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            store.check(keys)
        return False

class SlowErrors(ErrorStore):
    def __init__(self):
        self._store = SlowStore()
        self._logs, self._first_read = [(FailureLog(self._store, "a"), "0")], {}
        self.is_lost, self.interval_s = False, 0.2

watchdog = Watchdog(60.0, lambda peer: None)
watchdog.start(SlowErrors(), always=True)
looking.wait()
watchdog.rest()
"""


def test_a_process_may_end_in_the_middle_of_a_look() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_LOOK], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


class Errors(ErrorStore):
    """An error store that counts its reads and, if requested, answers none."""

    def __init__(self, *, answers: bool = True) -> None:
        self.is_lost, self.interval_s = False, READ_INTERVAL_S
        self.num_reads = 0
        self.was_read, self.is_over = threading.Event(), threading.Event()
        if answers:
            self.is_over.set()

    def read(self, waited_s: float = 0.0) -> None:
        self.num_reads += 1
        self.was_read.set()
        self.is_over.wait()


def test_an_idle_watchdog_ends_without_another_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "IDLE_INTERVAL_S", 0.0)
    errors, watchdog = Errors(), Watchdog(60.0, lambda peer: None)
    watchdog.start(errors, always=True)
    assert errors.was_read.wait(20)
    watchdog.rest()
    time.sleep(4 * failure.READ_INTERVAL_S)  # it is idle by then, or ends before it looks again
    before = errors.num_reads
    watchdog.stop()
    assert errors.num_reads == before


def test_a_silent_store_does_not_keep_a_wait_from_its_end() -> None:
    errors, woken = Errors(answers=False), threading.Event()
    watchdog = Watchdog(2 * failure.READ_INTERVAL_S, lambda peer: woken.set())
    watchdog.start(errors, always=False)
    watchdog.waiting_for = ((), 1)
    assert woken.wait(20)
    assert watchdog.timed_out
    assert errors.is_lost
    assert watchdog.stop() == ((), 1)
    errors.is_over.set()


class LostErrors(Errors):
    """An error store whose host has gone."""

    def read(self, waited_s: float = 0.0) -> None:
        self.is_lost = True
        self.was_read.set()


def test_a_wait_that_breaks_just_after_the_store_is_not_aborted() -> None:
    """An abort closes all connections, which hides the one that the end of a process closed."""
    errors, watchdog = LostErrors(), Watchdog(60.0, lambda peer: None)
    watchdog.start(errors, always=False)
    watchdog.waiting_for = ((), 1)
    assert errors.was_read.wait(20)
    assert watchdog.stop() == ((), 1), "as when the main thread's wait breaks"
    assert not watchdog.has_aborted


def test_a_wait_without_a_store_is_aborted() -> None:
    woken = threading.Event()
    watchdog = Watchdog(60.0, lambda peer: woken.set())
    watchdog.start(LostErrors(), always=False)
    watchdog.waiting_for = ((), 1)
    assert woken.wait(20)
    watchdog.stop()
    assert watchdog.has_aborted


def test_readers_by_the_thousand_ask_their_store_no_more_than_it_can_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def errors_of(num_readers: int) -> ErrorStore:
        group: Any = SimpleNamespace(group_name="0", size=lambda: num_readers, rank=lambda: 0)
        return ErrorStore(group, 0, [group])

    monkeypatch.setattr(failure, "store_of", lambda group: dist.HashStore())
    monkeypatch.setattr(failure, "record_of", lambda group: failure.GroupRecord())
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    few, many = errors_of(8), errors_of(4096)
    assert few.interval_s == failure.READ_INTERVAL_S
    # At each read a reader makes a request for each group.
    assert 2 * 4096 / many.interval_s <= failure.MAX_REQUESTS_PER_S
    watchdog, waits = Watchdog(60.0, lambda peer: None), []
    watchdog._errors, watchdog._watches_always = many, False

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return len(waits) == 3

    monkeypatch.setattr(watchdog._stopped, "wait", wait)
    watchdog._active.set()
    watchdog._watch()
    assert waits == [many.interval_s] * 3
