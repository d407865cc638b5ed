"""Share failures between processes: every rank raises the first cause.

    pipeline 0   rank 0 ─ rank 1      rank 1 fails: it appends the cause to its pipeline's list,
                   │        │         which rank 0 reads, and to the lists of the groups that
    pipeline 1   rank 0 ─ rank 1      replicate its stages, which the other pipeline reads

The lists of failures are ``cause.FailureLog``. This module moves no tensors and interrupts no wait;
see ``watchdog.py`` and ``comm``.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from penstock.cause import (
    NOTE,
    Cause,
    Failure,
    FailureLog,
    as_error,
    cause_of,
    default_group,
    key_of,
    store_of,
)
from penstock.errors import PeerError, PenstockError, Where
from penstock.runtime.watchdog import BackgroundCall, Peers, Wait, Watchdog, poll
from penstock.schedule.messages import runs_of

__all__ = ["NO_SCHEDULE", "Calls", "ErrorStore", "FailureReporter", "calls_over", "report_uncaught"]

T = TypeVar("T")

# Replaces a schedule's number for a failure outside of schedules. Collective calls use the numbers
# below.
NO_SCHEDULE = -1
# Time for a rank that failed to make its stages to succeed in a second attempt.
NOTE_GRACE_S = 1.5
# Limit on the request rate of all processes to the store, which serves about 100,000 per second.
MAX_REQUESTS_PER_S = 10_000
# After a wait of this length, failures of other calls over the group are read.
OTHER_CALLS_S = 1.5
# Timeout of the store's response after a failure.
MAX_ANSWER_S = 10.0


@dataclass(slots=True)
class Calls:
    """This process's calls over one group. Every rank makes the same calls in the same order.

    Args:
        count: the number of calls begun.
        name: the latest call.
        collectives: the number of collectives over all ranks that this process entered.
        failed: the calls whose failures were raised in this process.
    """

    count: int = 0
    name: str = ""
    collectives: int = 0
    failed: set[str] = field(default_factory=set)

    def begin(self, name: str) -> None:
        """Count another call."""
        self.name = name
        self.count += 1


# By group, with weak keys. Schedules over one group share a count of calls.
_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()
# By store, with weak keys. A second connection takes seconds if torch waits for a name server.
_second_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def calls_over(group: dist.ProcessGroup) -> Calls:
    """This process's calls over ``group``."""
    return _calls.setdefault(group, Calls())


class ErrorStore:
    """The failures that end the calls of one schedule.

    Args:
        group: the pipeline's process group.
        number: the schedule's number over that group; the same in each replica's pipeline.
        replicas: the groups that replicate or shard its stages.
        in_thread: connect to the store once more, for use in another thread.

    Attributes:
        is_lost: whether the store is gone, most likely with its host process.
        interval_s: the polling interval that the store can serve for all readers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        number: int,
        replicas: Sequence[dist.ProcessGroup] = (),
        *,
        in_thread: bool = False,
    ) -> None:
        store = store_of(group)
        if in_thread:
            if store not in _second_connections:
                _second_connections[store] = store.clone()
            store = _second_connections[store]
        self._store = store
        self._group = group
        self._calls = calls_over(group)
        # Each list with the name of this schedule in it; the pipeline's takes precedence.
        self._logs = [(FailureLog.over(group, store), str(number))]
        self._logs += [(FailureLog.over(g, store), f"replicas/{number}") for g in replicas]
        num_readers = (default_group() or group).size()
        self.interval_s = len(self._logs) * num_readers / MAX_REQUESTS_PER_S
        # Never retried after a loss, since torch logs a page per failed request.
        self.is_lost = False

    def write(self, cause: Cause) -> Cause:
        """Publish ``cause`` unless another one was first; returns the first cause."""

        def append() -> Cause:
            (own, name), *others = self._logs
            first = own.append(name, cause).cause
            for log, name in others:
                log.append(name, first)
            return first

        return self._request(append) or cause

    def read(self, waited_s: float = math.inf) -> Failure | None:
        """The failure that ends this schedule's call.

        Args:
            waited_s: the duration of this rank's wait so far. Only a longer one ends by a note,
                whose rank may retry, or by a failure in another call over the group.
        """
        return self._request(lambda: self._find(waited_s))

    def _find(self, waited_s: float) -> Failure | None:
        failures = [log.read() for log, _ in self._logs]
        for found, (_, name) in zip(failures, self._logs, strict=True):
            for failure in found:
                if failure.call == name:
                    return failure
        for failure in failures[0]:
            if failure.call.startswith(NOTE):
                age_s = time.monotonic() - failure.read_at
                is_due = waited_s == math.inf or age_s > NOTE_GRACE_S
            else:
                is_new = failure.call not in self._calls.failed
                is_due = is_new and waited_s >= OTHER_CALLS_S and "/" not in failure.call
            if is_due:
                return failure
        if OTHER_CALLS_S <= waited_s < math.inf:
            # By these counts, the ranks that wait find those that stay away.
            self._store.set(self._count_key(self._group.rank()), str(self._calls.collectives))
        return None

    def _count_key(self, rank: int) -> str:
        return key_of(self._group, f"collectives/{rank}")

    def read_absent(self) -> list[int]:
        """The ranks that have not entered this rank's current collective."""

        def is_absent(rank: int) -> bool:
            key = self._count_key(rank)
            count = int(self._store.get(key)) if self._store.check([key]) else 0
            return rank != self._group.rank() and count < self._calls.collectives

        return self._request(lambda: [*filter(is_absent, range(self._group.size()))]) or []

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
        errors: the schedule's error store.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, errors: ErrorStore) -> None:
        self._number = str(number)
        self._rank = group.rank()
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._calls = calls_over(group)
        self.errors = errors
        _reporters.add(self)

    def error_to_raise(
        self, error: BaseException, wait: Wait | None, watchdog: Watchdog
    ) -> PenstockError | None:
        """Publish ``error``, or find the first cause.

        Args:
            error: the exception that ended the call on this rank.
            wait: the interrupted wait, if any.
            watchdog: the wait's watchdog, already stopped.

        Returns:
            The exception to raise instead; None to raise ``error`` itself.
        """
        self.errors.is_lost |= watchdog.store_is_lost
        failure = self._query(lambda: self.errors.read(0.0))
        if failure is None and wait is not None and not watchdog.timed_out:
            # A peer closes its connections a moment before its cause can be read.
            interval_s = self.errors.interval_s
            failure = poll(
                lambda: self._query(self.errors.read),
                for_s=2.0 + 2 * interval_s,
                every_s=max(0.05, interval_s),
            )
        if failure is not None:
            self._calls.failed.add(failure.call)
            cause = failure.cause
        else:
            if wait is not None:
                error = self._broken_wait(error, wait, watchdog)
            cause = cause_of(error, self._rank, self._processes)
        # A cause that was found is published too, to this rank's replicas.
        self._calls.failed.add(self._number)
        first = self._query(lambda: self.errors.write(cause)) or cause
        if failure is not None or first != cause:
            return as_error(first, self._processes)
        return error if isinstance(error, PeerError) else None

    def report_crash(self, error: BaseException) -> None:
        """Publish the exception that ends this process, unless this schedule failed before."""
        if self._number not in self._calls.failed and not self.errors.is_lost:
            self._calls.failed.add(self._number)
            self.errors.write(cause_of(error, self._rank, self._processes))

    def _query(self, request: Callable[[], T]) -> T | None:
        call = BackgroundCall(request)
        if call.is_done(within_s=MAX_ANSWER_S):
            return call.value
        self.errors.is_lost = True
        return None

    def _broken_wait(self, error: BaseException, wait: Wait, watchdog: Watchdog) -> PeerError:
        _, peer = wait
        name = peer.value if isinstance(peer, Peers) else f"rank {peer}"
        if watchdog.timed_out:
            absent = self._query(self.errors.read_absent) if peer is Peers.ALL_RANKS else None
            if absent and (len(absent) == 1 or len(absent) < len(self._processes) - 1):
                name = f"rank{'s' if len(absent) > 1 else ''} {runs_of(absent)}"
            reports = "and no rank reports a failure"
            if self.errors.is_lost:
                reports = "nor does the store that joins the ranks answer"
            message = (
                f"no word from {name} within {watchdog.timeout_s:g} s, {reports}; pass a longer "
                "timeout_s if a step may take so long"
            )
        elif self.errors.is_lost:
            message = (
                "the store that joins the ranks is gone; the process that holds it (the group's "
                f"rank 0, most often) may have died. This rank was waiting for {name} ({error})"
            )
        else:
            what = f"a collective over {name} failed; one of them"
            if peer is not Peers.REPLICAS:
                what = f"the connection to {name} broke; its process"
            message = f"{what} may have died"
            if self._calls.failed:
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
