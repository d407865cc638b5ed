"""How whoever waits over a process group is woken: what they wait for is broken.

    gloo   a receive that times out closes its pair; all that waits on the pair fails at once, but
           for a message of which a part is there (see ``large_messages.py``)
    NCCL   the communicators are aborted, and what the device does over them ends

Called from any thread. It does not know who waits, or why that is in vain.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["abort_all", "break_pairs", "is_closed"]

POKE_TAG = 0x5EA
# How long to wait for communicators to be given up.
MAX_ABORT_S = 5.0


def break_pairs(group: dist.ProcessGroup, peers: Iterable[int]) -> None:
    """Close gloo's connections to ``peers``: what waits on them fails at once."""
    for peer in peers:
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                _poke(group, peer).wait(timedelta(milliseconds=1))


def is_closed(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether gloo's connection to ``peer`` is closed."""
    try:
        _poke(group, peer)
    except RuntimeError:
        return True
    return False


def _poke(group: dist.ProcessGroup, peer: int) -> Any:
    """A receive of what is never sent."""
    return group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, POKE_TAG)


def abort_all(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort groups, all at once: NCCL may free a communicator only when no other one's kernel is
    running."""
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + MAX_ABORT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
