"""The board: where the first cause of a failed step is written, for every rank to read.

It is a key of the process group's store; only the first cause written to it stays. The others read
it there and raise it as their own. This module moves no tensors and wakes nobody; see ``c10d.py``
for that.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from penstock.cause import Cause

__all__ = ["Board"]


class Board:
    """Where the first cause is written, for all ranks of one schedule.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share; each thread needs a clone of
            its own.
        key: names the schedule, alike on all ranks.
        note_key: where a rank that could not even make its stages has left its cause.

    Attributes:
        is_lost: whether the store is gone, and with it most likely the process that held it.
    """

    def __init__(self, store: Any, key: str, note_key: str) -> None:
        self._store = store
        self._key = key
        self._note_key = note_key
        # Once lost, a store stays lost, and asking it again costs a page of log each time.
        self.is_lost = False

    def write(self, cause: Cause) -> Cause:
        """Write ``cause`` unless another one came first; returns the one that stands."""
        if self.is_lost:
            return cause
        try:
            return Cause.from_json(self._store.compare_set(self._key, "", cause.to_json()))
        except (RuntimeError, dist.DistError):
            self.is_lost = True
            return cause

    def read(self) -> Cause | None:
        """The cause, if there is one. Where the store is gone, ``is_lost`` says so."""
        if self.is_lost:
            return None
        try:
            for key in (self._key, self._note_key):
                # A note that was taken back is empty.
                if self._store.check([key]) and (data := self._store.get(key)):
                    return Cause.from_json(data)
        except (RuntimeError, dist.DistError):
            self.is_lost = True
        return None
