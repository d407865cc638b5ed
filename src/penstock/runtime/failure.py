"""The board: where the first cause of a failed step is written, for every rank to read.

    pipeline 0   rank 0 ─ rank 1      rank 1 fails: it writes to its pipeline's place, which rank 0
                   │        │         reads, and to those of the groups that its stages are
    pipeline 1   rank 0 ─ rank 1      replicated over; there the other pipeline reads it

A place is a key of a process group's store; only the first cause written to it stays. The others
read it there and raise it as their own. This module moves no tensors and wakes nobody; see
``watcher.py`` and ``c10d.py`` for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from penstock.cause import Cause
from penstock.runtime.group_log import GroupLog

__all__ = ["Board", "Place"]

# A rank that could not make its stages may be about to make them right: so long others wait.
NOTE_GRACE_S = 1.5
# How much all processes of a job may ask of its one store, which answers some 100,000 times a
# second and serves others, too.
MAX_ASKED_PER_S = 10_000
# So long a rank waits before it looks at what happens in other calls over the group.
ELSEWHERE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A key of a store that ranks share.

    Args:
        store: a ``torch.distributed.Store``; threads that wait for nothing may share one.
        key: the key, alike on all ranks.
    """

    store: Any
    key: str

    def read(self) -> bytes:
        """What is there; empty if nothing is, or what was has been taken back."""
        return bytes(self.store.get(self.key)) if self.store.check([self.key]) else b""

    def write(self, cause: Cause) -> Cause:
        """Write ``cause`` unless another one came first; returns the one that stands."""
        return Cause.from_json(self.store.compare_set(self.key, "", cause.to_json()))

    def aside(self) -> Place:
        """The same place over a connection on which the main thread never waits."""
        return Place(store=_second_connection(self.store), key=self.key)


class Board:
    """Where the first cause is written, for all ranks of one schedule and of its replicas.

    Args:
        places: that of the schedule, whose cause stands; then those of the groups over which
            stages are replicated, which all of their ranks read and write.
        note: where a rank that could not even make its stages has left its cause.
        num_readers: how many processes may read boards in the same store, again and again.
        log: what happens in other calls over the same group.

    Attributes:
        is_lost: whether the store is gone, and with it most likely the process that held it.
        pace_s: how long to leave between one look and the next, so that the store keeps up with
            all readers.
    """

    def __init__(
        self,
        places: Sequence[Place],
        note: Place,
        num_readers: int = 1,
        log: GroupLog | None = None,
    ) -> None:
        self._places = tuple(places)
        self._note = note
        self._log = log
        self._num_readers = num_readers
        self.pace_s = (
            (len(self._places) + (1 if log is None else 3)) * num_readers / MAX_ASKED_PER_S
        )
        # What the note said when it was last read, and since when.
        self._noted = (b"", 0.0)
        # Once lost, a store stays lost, and asking it again costs a page of log each time.
        self.is_lost = False

    def write(self, cause: Cause) -> Cause:
        """Write ``cause`` unless another one came first; returns the one that stands."""
        if self.is_lost:
            return cause
        own, *others = self._places
        try:
            stands = own.write(cause)
            if self._log is not None and stands == cause:
                self._log.add(cause)
            cause = stands
            for place in others:
                place.write(cause)
        except (RuntimeError, dist.DistError):
            self.is_lost = True
        return cause

    def read(self, *, patient: bool = False) -> Cause | None:
        """The cause, if there is one. Where the store is gone, ``is_lost`` says so.

        Args:
            patient: whether a note has to have stood for a while: its rank may try again.
        """
        if self.is_lost:
            return None
        try:
            for place in self._places:
                if data := place.read():
                    return Cause.from_json(data)
            if data := self._note.read():
                return self._read_note(data, patient=patient)
        except (RuntimeError, dist.DistError):
            self.is_lost = True
        return None

    def read_elsewhere(self, waited_s: float | None = None) -> tuple[int, Cause] | None:
        """A failure in another call over the group, and its place in the group's list.

        Args:
            waited_s: how long this rank has been waiting; None where it does not any more. That it
                waits is told to ranks that wait in another call.
        """
        if self.is_lost or self._log is None or (waited_s is not None and waited_s < ELSEWHERE_S):
            return None
        try:
            found = self._log.elsewhere()
            if found is None and waited_s is not None:
                self._log.compare()
            return found
        except (RuntimeError, dist.DistError):
            self.is_lost = True
        return None

    def read_absent(self) -> list[int]:
        """The ranks that have not come to where this one waits for all, as far as is known."""
        if self.is_lost or self._log is None:
            return []
        try:
            return self._log.absent()
        except (RuntimeError, dist.DistError):
            self.is_lost = True
        return []

    def _read_note(self, data: bytes, *, patient: bool) -> Cause | None:
        now = time.monotonic()
        if self._noted[0] != data:
            self._noted = (data, now)
        is_young = now - self._noted[1] < NOTE_GRACE_S
        return None if patient and is_young else Cause.from_json(data)

    def aside(self) -> Board:
        """The same board for another thread."""
        places = [place.aside() for place in self._places]
        log = self._log.aside(places[0].store) if self._log is not None else None
        return Board(places, self._note.aside(), self._num_readers, log)


# The second connection to each store, for all boards of this process: to connect takes seconds
# where torch, which logs the peer's name, has to wait for a name server.
_aside: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _second_connection(store: Any) -> Any:
    if store not in _aside:
        _aside[store] = store.clone()
    return _aside[store]
