"""Failures shared over processes: the first cause is written once, and every rank raises it.

    pipeline 0   rank 0 ─ rank 1      rank 1 fails: it writes the cause under its pipeline's key,
                   │        │         which rank 0 reads, and under the keys of the groups that
    pipeline 1   rank 0 ─ rank 1      replicate its stages, which the other pipeline reads

The keys lie in the job's store, by process group:

    <schedule>           first cause of a schedule's failure
    replicas/<schedule>  the same, for the replicas of a stage
    note                 cause of a rank that failed before its schedule existed
    failed, failed/<i>   all failures over the group, for ranks that wait in another call
    waits/<rank>         how many collectives a rank entered

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

# In place of a schedule's number, for a failure of no schedule. Collective calls take the numbers
# below it.
NO_SCHEDULE = -1
# A rank that failed to make its stages may make them right at a second try.
NOTE_GRACE_S = 1.5
# Load of all processes on the job's one store, which answers some 100,000 requests a second.
MAX_REQUESTS_PER_S = 10_000
# A wait of this length looks for failures of other calls over the group.
ELSEWHERE_S = 1.5
# Limit on the store's answer after a failure.
MAX_ANSWER_S = 10.0


@dataclass(slots=True)
class Calls:
    """This process's calls over one group. Every rank makes the same calls in the same order.

    Args:
        count: how many began.
        what: the latest call.
        collectives: how many collectives over all ranks this process entered.
        failed: the numbers of the schedules that failed here.
        raised: the listed failures that ended a call here, by their places in the list.
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


# Several schedules may share a group, and their calls are counted together: by group, weakly.
_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()
# A second connection takes seconds where torch waits for a name server: one per store, weakly.
_second_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def calls_over(group: dist.ProcessGroup) -> Calls:
    """This process's calls over ``group``."""
    return _calls.setdefault(group, Calls())


def _second_connection(store: Any) -> Any:
    if store not in _second_connections:
        _second_connections[store] = store.clone()
    return _second_connections[store]


class CallLog:
    """Failures and waits of all calls over a group: a rank may fail before the call in which the
    others wait for it, in a call of another schedule.

    Args:
        store: the store that ranks share.
        group: the process group.
        number: the number of the schedule that this log is read for.
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
        """List a failure of this log's schedule."""
        place = self.store.add(self._key, 1)
        self.store.set(f"{self._key}/{place}", json.dumps([self._number, cause.to_json()]))

    def find_elsewhere(self) -> tuple[int, Cause] | None:
        """The first listed failure that is new to this process, with its place in the list."""
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
        """The ranks that are not known to have entered the collective that this rank waits in."""
        others = (rank for rank in range(self._num_ranks) if rank != self._rank)
        return [rank for rank in others if self._collectives_of(rank) < self._calls.collectives]

    def _collectives_of(self, rank: int) -> int:
        key = f"{self._waits_key}/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def publish_wait(self) -> None:
        """Publish how many collectives this rank entered, which tells who did not come."""
        if self._num_published != self._calls.collectives:
            self._num_published = self._calls.collectives
            self.store.set(f"{self._waits_key}/{self._rank}", str(self._num_published))


class ErrorStore:
    """The first cause of a schedule's failure, for its ranks and their replicas.

    Args:
        store: a ``torch.distributed.Store``.
        keys: the schedule's key, whose cause stands; then those of its groups of replicas.
        note_key: the key for a rank that failed before its schedule existed.
        num_readers: how many processes read the same store again and again.
        log: the calls over the group.

    Attributes:
        is_lost: whether the store is gone, most likely with the process that held it.
        pace_s: the interval between two reads with which the store serves all readers.
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
        # The note as it was last read, and since when it stands.
        self._note = (b"", 0.0)
        # A store that was lost once stays lost; each request would log a page.
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
        """The same over a second connection, for another thread."""
        other = copy.copy(self)
        other.store = _second_connection(self.store)
        if self._log is not None:
            other._log = copy.copy(self._log)
            other._log.store = other.store
        return other

    def write(self, cause: Cause) -> Cause:
        """Write ``cause`` unless another one came first; returns the one that stands."""
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
        """The first cause, if there is one.

        Args:
            patient: whether to ignore a note that is younger than a moment, since its rank may
                try again.
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
        """The value of a key; empty if there is none, or if it was withdrawn."""
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def read_elsewhere(self, waited_s: float | None = None) -> tuple[int, Cause] | None:
        """A failure in another call over the group, and its place in the group's list.

        Args:
            waited_s: how long this rank has been waiting; None if it no longer waits.
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
        """The ranks that have not come to the collective that this rank waits in."""
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
    """Publishes one rank's failures, and finds the first cause of what ended its calls.

        this rank fails by itself      its own error is the cause, unless another one came first
        its wait broke, or timed out   the cause of the peer; without one, a PeerError says so

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
        # Number of failed schedules when a call last ended well.
        self._num_failed = 0
        self.errors = ErrorStore.of_schedule(group, number)
        _reporters.add(self)

    def add_replicas(self, replicas: Sequence[dist.ProcessGroup]) -> None:
        """Share failures with the ranks of these groups too."""
        self.errors = ErrorStore.of_schedule(self._group, self._number, replicas)

    def note_success(self) -> None:
        """A call ended well: no failed schedule has broken this group's connections."""
        self._num_failed = len(self._calls.failed)

    def resolve(
        self, error: BaseException, waited_for: Wait | None, watchdog: Watchdog
    ) -> PenstockError | None:
        """The exception to raise for ``error``; None for ``error`` itself.

        Args:
            error: the exception that ended the call here.
            waited_for: the wait that it interrupted, if it did.
            watchdog: the watchdog of that wait, stopped by now.
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
        # A cause that was found may not be known yet to this rank's own replicas.
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
        """The ranks that did not come, where some others did."""
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


# The live reporters of this process, told at its end if an uncaught exception ends it.
_reporters: WeakSet[FailureReporter] = WeakSet()


@atexit.register
def report_uncaught() -> None:
    """Publish the exception that nobody caught, so that ranks that wait for this one raise it.

        rank 0   step ── optimizer ── step ── waits for rank 1 ───────────┐
        rank 1   step ── optimizer raises, nobody catches it ── publishes ┘

    Runs at exit, when the interpreter has left the exception in ``sys``. A prompt, which leaves
    exceptions there as well, goes on after them.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    for reporter in list(_reporters):
        # No thread can be started at exit: a request that hangs ends by the store's own timeout.
        reporter.report_crash(error)
        if reporter.errors.is_lost:
            return
