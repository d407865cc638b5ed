"""The thread that looks at the board while others are waited for."""

from __future__ import annotations

import subprocess
import sys

# Each look asks the store again and again, and so is in torch's own code when the process ends.
ENDS_IN_A_LOOK = """
import time
import torch.distributed as dist
from penstock.runtime.failure import Board, Place
from penstock.runtime.watcher import Watcher

store = dist.TCPStore("127.0.0.1", 0, 1, True)

class SlowStore:
    def check(self, keys):
        for _ in range(30_000):
            store.check(keys)
        return False

place = Place(store=SlowStore(), key="a")
watcher = Watcher(60.0, lambda whom: None)
watcher.look_at(Board([place], place), always=True)
watcher.start()
time.sleep(0.5)
watcher.rest()
"""


def test_a_process_may_end_in_the_middle_of_a_look() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_LOOK], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
