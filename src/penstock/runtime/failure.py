"""Share failures between processes: the first cause is stored once, and every rank raises it.

    pipeline 0   rank 0 ─ rank 1      rank 1 fails: it writes the cause under its pipeline's key,
                   │        │         which rank 0 reads, and under the keys of the groups that
    pipeline 1   rank 0 ─ rank 1      replicate its stages, which the other pipeline reads

The keys of a process group in the job's store:

    <schedule>           first cause of a schedule's failure
    replicas/<schedule>  first cause, for the replicas of a stage
    note                 cause of a rank that failed before its schedule existed
    failed, failed/<i>   all failures over the group, for ranks that wait in another call
    waits/<rank>         number of collectives that a rank entered

This module moves no tensors and interrupts no wait; see ``watchdog.py`` and ``comm``.
"""

from __future__ import annotations

import atexit
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from penstock.cause import NOTE, Cause, as_error, cause_of, default_group, key_of, store_of
from penstock.errors import PeerError, PenstockError, Where
from penstock.runtime.watchdog import Peers, StoreQuery, Wait, Watchdog, Whom, poll
from penstock.schedule.messages import runs_of

__all__ = [
    "NO_SCHEDULE",
    "CallLog",
    "Calls",
    "ErrorStore",
    "FailureReporter",
    "calls_over",
    "report_uncaught",
]

T = TypeVar("T")

# Replaces a schedule's number for a failure outside of schedules. Collective calls use the numbers
# below.
NO_SCHEDULE = -1
# Time for a rank that failed to make its stages to succeed in a second attempt.
NOTE_GRACE_S = 1.5
# Limit on the request rate of all processes to the store, which serves about 100,000 per second.
MAX_REQUESTS_PER_S = 10_000
# After a wait of this length, failures of other calls over the group are read.
ELSEWHERE_S = 1.5
# Timeout of the store's response after a failure.
MAX_ANSWER_S = 10.0


@dataclass(slots=True)
class Calls:
    """This process's calls over one group. Every rank makes the same calls in the same order.

    Args:
        count: the number of calls begun.
        what: the latest call.
        collectives: the number of collectives over all ranks that this process entered.
        failed: the numbers of the schedules that failed in this process.
        raised: the indices of the listed failures that ended a call in this process.
    """

    count: int = 0
    what: str = ""
    collectives: int = 0
    failed: set[int] = field(default_factory=set)
    raised: set[int] = field(default_factory=set)

    def begin(self, what: str) -> None:
        """Count another call."""
        self.what = what
        self.count += 1


# By group, with weak keys. Schedules over one group share a count of calls.
_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()
# By store, with weak keys. A second connection takes seconds if torch waits for a name server.
_second_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def calls_over(group: dist.ProcessGroup) -> Calls:
    """This process's calls over ``group``."""
    return _calls.setdefault(group, Calls())


def _second_connection(store: Any) -> Any:
    if store not in _second_connections:
        _second_connections[store] = store.clone()
    return _second_connections[store]


class CallLog:
    """The failures and waits of all calls over a group.

    A rank may fail in a call of another schedule, before the call in which its peers wait for it.

    Args:
        store: the ranks' store.
        group: the process group.
        number: the number of the reading schedule.
    """

    def __init__(self, store: Any, group: dist.ProcessGroup, number: int) -> None:
        self.store = store
        self._rank = group.rank()
        self._num_ranks = group.size()
        self._key, self._waits_key = key_of(group, "failed"), key_of(group, "waits")
        self._number = number
        self._calls = calls_over(group)
        self._known: dict[int, tuple[int, Cause]] = {}
        self._num_published = 0

    def add(self, cause: Cause) -> None:
        """Add a failure of this log's schedule."""
        place = self.store.add(self._key, 1)
        self.store.set(f"{self._key}/{place}", json.dumps([self._number, cause.to_json()]))

    def find_elsewhere(self) -> tuple[int, Cause] | None:
        """The first listed failure that is new to this process, with its index."""
        for place in range(1, self.store.add(self._key, 0) + 1):
            key = f"{self._key}/{place}"
            if place not in self._known and self.store.check([key]):
                number, text = json.loads(self.store.get(key))
                self._known[place] = number, Cause.from_json(text)
            number, cause = self._known.get(place, (self._number, None))
            is_own = number == self._number or number in self._calls.failed
            if cause is not None and not is_own and place not in self._calls.raised:
                return place, cause
        return None

    def find_absent(self) -> list[int]:
        """The ranks that have not published an entry into this rank's current collective."""
        others = (rank for rank in range(self._num_ranks) if rank != self._rank)
        return [rank for rank in others if self._collectives_of(rank) < self._calls.collectives]

    def _collectives_of(self, rank: int) -> int:
        key = f"{self._waits_key}/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def publish_wait(self) -> None:
        """Publish the number of collectives entered, by which peers find the absent ranks."""
        if self._num_published != self._calls.collectives:
            self._num_published = self._calls.collectives
            self.store.set(f"{self._waits_key}/{self._rank}", str(self._num_published))


class ErrorStore:
    """The first cause of a schedule's failure, for its ranks and their replicas.

    Args:
        store: a ``torch.distributed.Store``.
        keys: the schedule's key, whose cause takes precedence; then those of its replica groups.
        note_key: the key for a rank that failed before its schedule existed.
        num_readers: the number of processes that poll the store.
        log: the calls over the group.

    Attributes:
        is_lost: whether the store is gone, most likely with its host process.
        pace_s: the polling interval that the store can serve for all readers.
    """

    def __init__(
        self,
        store: Any,
        keys: Sequence[str],
        note_key: str,
        *,
        num_readers: int = 1,
        log: CallLog | None = None,
    ) -> None:
        self.store = store
        self._keys = tuple(keys)
        self._note_key = note_key
        self._log = log
        num_requests = len(self._keys) + (1 if log is None else 3)
        self.pace_s = num_requests * num_readers / MAX_REQUESTS_PER_S
        # The latest note, and the time when it was first read.
        self._note = (b"", 0.0)
        # Never retried after a loss, since torch logs a page per failed request.
        self.is_lost = False

    @classmethod
    def of_schedule(
        cls, group: dist.ProcessGroup, number: int, replicas: Sequence[dist.ProcessGroup] = ()
    ) -> ErrorStore:
        """The errors of one schedule.

        Args:
            group: the pipeline's process group.
            number: the schedule's number over that group; the same in each replica's pipeline.
            replicas: the groups that replicate or shard its stages.
        """
        store = store_of(group)
        return cls(
            store,
            [key_of(group, number), *(key_of(each, f"replicas/{number}") for each in replicas)],
            key_of(group, NOTE),
            num_readers=(default_group() or group).size(),
            log=CallLog(store, group, number),
        )

    def aside(self) -> ErrorStore:
        """The same errors over a second connection, for another thread."""
        other = copy.copy(self)
        other.store = _second_connection(self.store)
        if self._log is not None:
            other._log = copy.copy(self._log)
            other._log.store = other.store
        return other

    def write(self, cause: Cause) -> Cause:
        """Publish ``cause`` unless another cause was first; returns the first cause."""
        return self._request(lambda: self._write(cause)) or cause

    def _write(self, cause: Cause) -> Cause:
        own, *others = self._keys
        stands = Cause.from_json(self.store.compare_set(own, "", cause.to_json()))
        if self._log is not None and stands == cause:
            self._log.add(cause)
        for key in others:
            self.store.compare_set(key, "", stands.to_json())
        return stands

    def read(self, *, patient: bool = False) -> Cause | None:
        """The first cause, if any.

        Args:
            patient: whether to ignore a recent note, since its rank may retry.
        """
        return self._request(lambda: self._read(patient))

    def _read(self, patient: bool) -> Cause | None:
        for key in self._keys:
            if data := self._get(key):
                return Cause.from_json(data)
        if not (data := self._get(self._note_key)):
            return None
        if self._note[0] != data:
            self._note = (data, time.monotonic())
        is_young = time.monotonic() - self._note[1] < NOTE_GRACE_S
        return None if patient and is_young else Cause.from_json(data)

    def _get(self, key: str) -> bytes:
        """The value of a key; empty if missing or withdrawn."""
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def read_elsewhere(self, waited_s: float | None = None) -> tuple[int, Cause] | None:
        """A failure in another call over the group, with its index in the group's list.

        Args:
            waited_s: the duration of this rank's wait; None if it has ended.
        """
        log = self._log
        if log is None or (waited_s is not None and waited_s < ELSEWHERE_S):
            return None

        def look() -> tuple[int, Cause] | None:
            found = log.find_elsewhere()
            if found is None and waited_s is not None:
                log.publish_wait()
            return found

        return self._request(look)

    def read_absent(self) -> list[int]:
        """The ranks that have not entered this rank's current collective."""
        return (self._request(self._log.find_absent) if self._log is not None else None) or []

    def _request(self, request: Callable[[], T]) -> T | None:
        if self.is_lost:
            return None
        try:
            return request()
        except (RuntimeError, dist.DistError):
            self.is_lost = True
            return None


class FailureReporter:
    """Publishes one rank's failures, and finds the first cause of failed calls.

        this rank fails by itself      its own error is the cause, unless another one came first
        its wait broke, or timed out   the peer's cause; a generic PeerError without one

    Args:
        group: the pipeline's process group.
        number: the schedule's number over that group.

    Attributes:
        errors: the schedule's error store.
    """

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self._group = group
        self._number = number
        self._rank = group.rank()
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._calls = calls_over(group)
        # The number of failed schedules at the last successful call.
        self._num_failed = 0
        self.errors = ErrorStore.of_schedule(group, number)
        _reporters.add(self)

    def add_replicas(self, replicas: Sequence[dist.ProcessGroup]) -> None:
        """Share failures with the ranks of these groups, too."""
        self.errors = ErrorStore.of_schedule(self._group, self._number, replicas)

    def note_success(self) -> None:
        """Record a successful call: no failed schedule has broken this group's connections."""
        self._num_failed = len(self._calls.failed)

    def resolve(
        self, error: BaseException, waited_for: Wait | None, watchdog: Watchdog
    ) -> PenstockError | None:
        """Find the exception to raise instead of ``error``; None to raise ``error`` itself.

        Args:
            error: the exception that ended the call on this rank.
            waited_for: the interrupted wait, if any.
            watchdog: the wait's watchdog, already stopped.
        """
        self.errors.is_lost |= watchdog.store_is_lost
        found = self._ask(self.errors.read)
        if found is None and waited_for is not None and not watchdog.timed_out:
            # A peer closes its connections a moment before its cause can be read.
            pace_s = self.errors.pace_s
            found = poll(
                lambda: self._ask(self.errors.read) or self._find_elsewhere(),
                for_s=2.0 + 2 * pace_s,
                every_s=max(0.05, pace_s),
            )
        is_own = found is None
        if found is None:
            if waited_for is not None:
                error = self._broken_wait(error, waited_for[1], watchdog)
            found = cause_of(error, self._rank, self._processes)
        # Publish a found cause to this rank's replicas, which may not have it.
        stands = self._publish(found) or found
        if not is_own or stands != found:
            return as_error(stands, self._processes)
        return error if isinstance(error, PeerError) else None

    def report_crash(self, error: BaseException) -> None:
        """Publish the exception that ends this process, unless this schedule failed before."""
        if self._number not in self._calls.failed and not self.errors.is_lost:
            self._calls.failed.add(self._number)
            self.errors.write(cause_of(error, self._rank, self._processes))

    def _publish(self, cause: Cause) -> Cause | None:
        self._calls.failed.add(self._number)
        return self._ask(lambda: self.errors.write(cause))

    def _find_elsewhere(self) -> Cause | None:
        found = self._ask(self.errors.read_elsewhere)
        if found is None:
            return None
        place, cause = found
        self._calls.raised.add(place)
        return cause

    def _ask(self, request: Callable[[], T]) -> T | None:
        query = StoreQuery(request)
        if query.is_done(within_s=MAX_ANSWER_S):
            return query.value
        self.errors.is_lost = True
        return None

    def _absent_ranks(self) -> str | None:
        """The absent ranks of a collective that other ranks have entered."""
        absent = self._ask(self.errors.read_absent) or ()
        if not absent or 1 < len(absent) == len(self._processes) - 1:
            return None
        return f"rank{'s' if len(absent) > 1 else ''} {runs_of(absent)}"

    def _broken_wait(self, error: BaseException, whom: Whom, watchdog: Watchdog) -> PeerError:
        name = whom.value if isinstance(whom, Peers) else f"rank {whom}"
        if watchdog.timed_out:
            if whom is Peers.ALL_RANKS:
                name = self._absent_ranks() or name
            others = "and no rank reports a failure"
            if self.errors.is_lost:
                others = "nor does the store that joins the ranks answer"
            message = (
                f"no word from {name} within {watchdog.timeout_s:g} s, {others}; pass a "
                "longer timeout_s if a step may take so long"
            )
        elif self.errors.is_lost:
            message = (
                "the store that joins the ranks is gone; the process that holds it (the group's "
                f"rank 0, most often) may have died. This rank was waiting for {name} ({error})"
            )
        elif whom is Peers.REPLICAS:
            message = f"a collective over {name} failed; one of them may have died ({error})"
        else:
            message = f"the connection to {name} broke; its process may have died"
            if len(self._calls.failed) > self._num_failed:
                message += (
                    ", or it broke when another schedule over this process group failed: then "
                    "make stages over a new one (torch.distributed.new_group), on every rank"
                )
            message += f" ({error})"
        raised = PeerError(message, where=Where(rank=self._rank))
        raised.__cause__ = error
        return raised


# This process's live reporters, which publish an uncaught exception at exit.
_reporters: WeakSet[FailureReporter] = WeakSet()


@atexit.register
def report_uncaught() -> None:
    """Publish an uncaught exception, so that ranks that wait for this process raise it.

        rank 0   step ── optimizer ── step ── waits for rank 1 ───────────┐
        rank 1   step ── optimizer raises, nobody catches it ── publishes ┘

    Runs at exit, when the interpreter has stored the exception in ``sys``. An interactive prompt
    stores exceptions there too, but continues.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    for reporter in list(_reporters):
        # No thread can start at exit, so a hanging request ends by the store's own timeout.
        reporter.report_crash(error)
        if reporter.errors.is_lost:
            return
