"""Share failures between processes: every rank raises the first cause.

    pipeline 0   rank 0 ─ rank 1      rank 1 fails: it appends the cause to its pipeline's list,
                   │        │         which rank 0 reads, and to the lists of the groups that
    pipeline 1   rank 0 ─ rank 1      replicate its stages, which the other pipeline reads

The lists of failures are ``cause.FailureLog``; ``watchdog.py`` reads them during waits.
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
    EARLY,
    Cause,
    Failure,
    as_error,
    cause_of,
    default_group,
    failures_over,
    key_of,
    store_of,
)
from penstock.errors import PeerError, PenstockError, Where
from penstock.runtime.watchdog import BackgroundCall, Peers, Wait, Watchdog, poll
from penstock.schedule.messages import runs_of

__all__ = ["NO_SCHEDULE", "Calls", "ErrorStore", "calls_over", "report_uncaught"]

T = TypeVar("T")

# Collective calls outside of schedules have numbers below this one.
NO_SCHEDULE = -1
# Time for a rank that failed to make its stages to succeed in a second attempt.
EARLY_GRACE_S = 1.5
# Limit on the request rate of all processes to the store, which serves about 100,000 per second.
MAX_REQUESTS_PER_S = 10_000
# After a wait of this length, failures of other calls over the group are read.
OTHER_CALLS_S = 1.5
# Timeout of the store's response after a failure.
MAX_ANSWER_S = 10.0


@dataclass(slots=True)
class Calls:
    """This process's calls over one group. Every rank makes the same calls in the same order."""

    count: int = 0
    name: str = ""  # of the latest call
    collectives: int = 0  # over all ranks, entered by this process
    failed: set[str] = field(default_factory=set)  # whose failures were raised in this process

    def begin(self, name: str) -> None:
        """Count another call."""
        self.name = name
        self.count += 1


# By group, with weak keys. Schedules over one group share a count of calls.
_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()
# By store, with weak keys. A second connection takes seconds if torch waits for a name server.
_second_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# Stores to which an uncaught exception of the main thread is written at exit.
_error_stores: WeakSet[ErrorStore] = WeakSet()


def calls_over(group: dist.ProcessGroup) -> Calls:
    """This process's calls over ``group``."""
    return _calls.setdefault(group, Calls())


class ErrorStore:
    """The failures of one schedule: publishes this rank's, and finds the first cause.

        this rank fails by itself      its own error is the cause, unless another one came first
        its wait broke, or timed out   the peer's cause; a generic PeerError without one

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
        else:
            _error_stores.add(self)
        self._store = store
        self._name = str(number)
        self._rank, self._num_ranks = group.rank(), group.size()
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._calls = calls_over(group)
        self._count_key = key_of(group, "collectives")
        # Each list with the name of this schedule in it; the pipeline's takes precedence.
        self._logs = [(failures_over(group, store), self._name)]
        self._logs += [(failures_over(g, store), f"replicas/{number}") for g in replicas]
        num_readers = (default_group() or group).size()
        self.interval_s = len(self._logs) * num_readers / MAX_REQUESTS_PER_S
        # Never retried after a loss, since torch logs a page per failed request.
        self.is_lost = False

    def write(self, cause: Cause) -> Cause:
        """Publish ``cause`` unless another one was first; returns the first cause."""
        self._calls.failed.add(self._name)

        def append() -> Cause:
            (own, name), *others = self._logs
            first = own.append(name, cause).cause
            for log, name in others:
                log.append(name, first)
            return first

        return self._request(append) or cause

    def read(self, waited_s: float = math.inf) -> Failure | None:
        """The failure that ends this schedule's call, after a wait of ``waited_s`` seconds.

        Only a longer wait ends by an early failure, whose rank may retry, or by another call's.
        """
        return self._request(lambda: self._find(waited_s))

    def _find(self, waited_s: float) -> Failure | None:
        failures = [log.read() for log, _ in self._logs]
        for found, (_, name) in zip(failures, self._logs, strict=True):
            for failure in found:
                if failure.call == name:
                    return failure
        for failure in failures[0]:
            if failure.call.startswith(EARLY):
                age_s = time.monotonic() - failure.read_at
                is_due = waited_s == math.inf or age_s > EARLY_GRACE_S
            else:
                is_new = failure.call not in self._calls.failed
                is_due = is_new and waited_s >= OTHER_CALLS_S and "/" not in failure.call
            if is_due:
                return failure
        if OTHER_CALLS_S <= waited_s < math.inf:
            # By these counts, the ranks that wait find those that stay away.
            self._store.set(f"{self._count_key}/{self._rank}", str(self._calls.collectives))
        return None

    def _find_absent(self) -> list[int]:
        """The ranks that have not entered this rank's current collective."""
        keys = {r: f"{self._count_key}/{r}" for r in range(self._num_ranks) if r != self._rank}
        present = {r: int(self._store.get(k)) for r, k in keys.items() if self._store.check([k])}
        return [rank for rank in keys if present.get(rank, 0) < self._calls.collectives]

    def _request(self, request: Callable[[], T]) -> T | None:
        if not self.is_lost:
            try:
                return request()
            except (RuntimeError, dist.DistError):
                self.is_lost = True
        return None

    def _query(self, request: Callable[[], T | None]) -> T | None:
        """A request that may stay without an answer."""
        call = BackgroundCall(request)
        if call.is_done(within_s=MAX_ANSWER_S):
            return call.value
        self.is_lost = True
        return None

    def error_to_raise(
        self, error: BaseException, wait: Wait | None, watchdog: Watchdog
    ) -> PenstockError | None:
        """Publish the exception that ended a call, or find the first cause.

        Args:
            error: the exception.
            wait: the interrupted wait, if any.
            watchdog: the wait's watchdog, already stopped.

        Returns:
            The exception to raise instead; None to raise ``error`` itself.
        """
        self.is_lost |= watchdog.store_is_lost
        failure = self._query(lambda: self.read(0.0))
        if failure is None and wait is not None and not watchdog.timed_out:
            # A peer closes its connections a moment before its cause can be read.
            failure = poll(
                lambda: self._query(self.read),
                for_s=2.0 + 2 * self.interval_s,
                every_s=max(0.05, self.interval_s),
            )
        if failure is not None:
            self._calls.failed.add(failure.call)
            cause = failure.cause
        else:
            if wait is not None:
                error = self._broken_wait(error, wait, watchdog)
            cause = cause_of(error, self._rank, self._processes)
        # A cause that was found is published too, to this rank's replicas.
        first = self._query(lambda: self.write(cause)) or cause
        if failure is not None or first != cause:
            return as_error(first, self._processes)
        return error if isinstance(error, PeerError) else None

    def _broken_wait(self, error: BaseException, wait: Wait, watchdog: Watchdog) -> PeerError:
        _, peer = wait
        name = peer.value if isinstance(peer, Peers) else f"rank {peer}"
        if watchdog.timed_out:
            absent = []
            if peer is Peers.ALL_RANKS:
                absent = self._query(lambda: self._request(self._find_absent)) or []
            if absent and (len(absent) == 1 or len(absent) < self._num_ranks - 1):
                name = f"rank{'s' if len(absent) > 1 else ''} {runs_of(absent)}"
            reports = "and no rank reports a failure"
            if self.is_lost:
                reports = "nor does the store that joins the ranks answer"
            message = (
                f"no word from {name} within {watchdog.timeout_s:g} s, {reports}; pass a longer "
                "timeout_s if a step may take so long"
            )
        elif self.is_lost:
            message = (
                "the store that joins the ranks is gone; the process that holds it (the group's "
                f"rank 0, most often) may have died. This rank was waiting for {name} ({error})"
            )
        elif peer is Peers.REPLICAS:
            message = f"a collective over {name} failed; one of them may have died ({error})"
        else:
            advice = ""
            if self._calls.failed:
                advice = (
                    ", or it broke when another schedule over this process group failed: then "
                    "make stages over a new one (torch.distributed.new_group), on every rank"
                )
            message = f"the connection to {name} broke; its process may have died{advice} ({error})"
        raised = PeerError(message, where=Where(rank=self._rank))
        raised.__cause__ = error
        return raised

    def report_crash(self, error: BaseException) -> None:
        """Publish the exception that ends this process, unless this schedule failed before."""
        if self._name not in self._calls.failed:
            self.write(cause_of(error, self._rank, self._processes))


@atexit.register
def report_uncaught() -> None:
    """Publish an uncaught exception, so that ranks that wait for this process raise it.

        rank 0   step ── optimizer ── step ── waits for rank 1 ───────────┐
        rank 1   step ── optimizer raises, nobody catches it ── publishes ┘

    The interpreter has stored the exception in ``sys``; so does a prompt, which continues.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    for errors in list(_error_stores):
        # No thread can start at exit, so a hanging request ends by the store's own timeout.
        errors.report_crash(error)
        if errors.is_lost:
            return
