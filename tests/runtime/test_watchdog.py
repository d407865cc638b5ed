"""The thread that reads the error store while other ranks are waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime import failure
from penstock.runtime import watchdog as watching
from penstock.runtime.failure import ErrorStore
from penstock.runtime.watchdog import Watchdog

# A look asks the store again and again, and so is in torch's own code when the process ends.
ENDS_IN_A_LOOK = """
import threading
import time
import torch.distributed as dist
from penstock.runtime.failure import ErrorStore
from penstock.runtime.watchdog import Watchdog

store = dist.TCPStore("127.0.0.1", 0, 1, True)
looking = threading.Event()

class SlowStore:
    def check(self, keys):
        looking.set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            store.check(keys)
        return False

watchdog = Watchdog(60.0, lambda whom: None)
watchdog.watch(ErrorStore(SlowStore(), ["a"], "a"), always=True)
watchdog.start()
looking.wait()
watchdog.rest()
"""


def test_a_process_may_end_in_the_middle_of_a_look() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_LOOK], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


class CountedStore(ErrorStore):
    """Counts how often it is read."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), ["a"], "a")
        self.num_reads = 0
        self.was_read = threading.Event()

    def read(self, **options: Any) -> Any:
        self.num_reads += 1
        self.was_read.set()
        return super().read(**options)


def test_an_idle_watchdog_ends_without_another_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "IDLE_INTERVAL_S", 0.0)
    errors, watchdog = CountedStore(), Watchdog(60.0, lambda whom: None)
    watchdog.watch(errors, always=True)
    watchdog.start()
    assert errors.was_read.wait(20)
    watchdog.rest()
    time.sleep(4 * watching.READ_INTERVAL_S)  # it is idle by then, or ends before it looks again
    before = errors.num_reads
    watchdog.stop()
    assert errors.num_reads == before


class SilentStore:
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.is_over.wait()
        return False


def test_a_silent_store_does_not_keep_a_wait_from_its_end() -> None:
    store, woken = SilentStore(), threading.Event()
    watchdog = Watchdog(2 * watching.READ_INTERVAL_S, lambda whom: woken.set())
    watchdog.watch(ErrorStore(store, ["a"], "a"), always=False)
    watchdog.start()
    watchdog.waiting_for = ((), 1)
    assert woken.wait(20)
    assert watchdog.timed_out
    assert watchdog.store_is_lost
    assert watchdog.stop() == ((), 1)
    store.is_over.set()


def test_readers_by_the_thousand_ask_their_store_no_more_than_it_can_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = (
        ErrorStore(dist.HashStore(), ["a", "a"], "a", num_readers=num_readers)
        for num_readers in (8, 4096)
    )
    assert few.pace_s < watching.READ_INTERVAL_S
    # At each read a reader requests the note and every key.
    assert 3 * 4096 / many.pace_s <= failure.MAX_REQUESTS_PER_S
    watchdog, waits = Watchdog(60.0, lambda whom: None), []
    watchdog.watch(many, always=False)

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return len(waits) == 3

    monkeypatch.setattr(watchdog._stopped, "wait", wait)
    watchdog._active.set()
    watchdog._watch()
    assert waits[1:] == [many.pace_s, many.pace_s]
