"""The thread that looks at the board while others are waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime import failure
from penstock.runtime import watcher as watching
from penstock.runtime.failure import Board, Place
from penstock.runtime.watcher import Watcher

# A look asks the store again and again, and so is in torch's own code when the process ends.
ENDS_IN_A_LOOK = """
import threading
import time
import torch.distributed as dist
from penstock.runtime.failure import Board, Place
from penstock.runtime.watcher import Watcher

store = dist.TCPStore("127.0.0.1", 0, 1, True)
looking = threading.Event()

class SlowStore:
    def check(self, keys):
        looking.set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            store.check(keys)
        return False

place = Place(store=SlowStore(), key="a")
watcher = Watcher(60.0, lambda whom: None)
watcher.look_at(Board([place], place), always=True)
watcher.start()
looking.wait()
watcher.rest()
"""


def test_a_process_may_end_in_the_middle_of_a_look() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_LOOK], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


class CountedBoard(Board):
    """Counts how often it is read."""

    def __init__(self) -> None:
        place = Place(store=dist.HashStore(), key="a")
        super().__init__([place], place)
        self.num_reads = 0
        self.was_read = threading.Event()

    def read(self, **options: Any) -> Any:
        self.num_reads += 1
        self.was_read.set()
        return super().read(**options)


def test_an_idle_watcher_ends_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "IDLE_INTERVAL_S", 0.0)
    board, watcher = CountedBoard(), Watcher(60.0, lambda whom: None)
    watcher.look_at(board, always=True)
    watcher.start()
    assert board.was_read.wait(20)
    watcher.rest()
    time.sleep(4 * watching.LOOK_INTERVAL_S)  # it is idle by then, or ends before it looks again
    before = board.num_reads
    watcher.stop()
    assert board.num_reads == before


class SilentStore:
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.is_over.wait()
        return False


def test_a_silent_store_does_not_keep_a_wait_from_its_end() -> None:
    store, woken = SilentStore(), threading.Event()
    place = Place(store=store, key="a")
    watcher = Watcher(2 * watching.LOOK_INTERVAL_S, lambda whom: woken.set())
    watcher.look_at(Board([place], place), always=False)
    watcher.start()
    watcher.waiting_for = ((), 1)
    assert woken.wait(20)
    assert watcher.timed_out
    assert watcher.lost_the_store
    assert watcher.stop() == ((), 1)
    store.is_over.set()


def test_readers_by_the_thousand_ask_their_store_no_more_than_it_can_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(store=dist.HashStore(), key="a")
    few, many = (Board([place, place], place, num_readers) for num_readers in (8, 4096))
    assert few.pace_s < watching.LOOK_INTERVAL_S
    # At each look a reader asks for the note and for every place.
    assert 3 * 4096 / many.pace_s <= failure.MAX_ASKED_PER_S
    assert many.aside().pace_s == many.pace_s
    watcher, waits = Watcher(60.0, lambda whom: None), []
    watcher.look_at(many, always=False)

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return len(waits) == 3

    monkeypatch.setattr(watcher._stopped, "wait", wait)
    watcher._awake.set()
    watcher._look()
    assert waits[1:] == [many.pace_s, many.pace_s]
