"""Share failures between processes: every rank raises the first cause.

    pipeline 0   rank 0 ─ rank 1      rank 1 fails: it appends the cause to its pipeline's list,
                   │        │         which rank 0 reads, and to the lists of the groups that
    pipeline 1   rank 0 ─ rank 1      replicate its stages, which the other pipeline reads

    main thread   ── compute ──┤ waits for rank 1 ···························├─ raises
    watchdog           read        read       read: a cause!  aborts ────────┘
    rank 1        ── raises, writes the cause ──────┘

A process that dies writes no cause: the waits for it break or time out, and ``error_to_raise``
publishes an error that names its rank. The lists of failures are ``cause.FailureLog``.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar
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
from penstock.schedule.wording import runs_of

__all__ = [
    "BackgroundCall", "ErrorStore", "GroupRecord", "Peers", "Wait", "Watchdog", "poll", "record_of",
    "report_uncaught",
]  # fmt: skip

T = TypeVar("T")

# Limit on the request rate of all processes to the store, which serves about 100,000 per second,
# and the minimum interval between reads.
MAX_REQUESTS_PER_S, READ_INTERVAL_S = 10_000, 0.2
# The interval between reads while no wait is active.
IDLE_INTERVAL_S = 0.8
# Time for a rank that failed to make its stages to succeed in a second attempt.
EARLY_GRACE_S = 1.5
# A wait of this length also ends by a failure of another call over the group.
OTHER_CALLS_S = 1.5
# Timeout of the store's response after a failure.
MAX_ANSWER_S = 10.0
# Limits on a read under way at exit and when a watchdog is stopped, and the wait for gloo at exit.
# Python ends threads by force, which aborts if one is in torch's code; a lost store takes minutes.
MAX_LAST_READ_S, MAX_READ_S, EXIT_S = 10.0, 1.0, 0.05


class Peers(Enum):
    """Several peers of one wait."""

    ALL_RANKS = "the other ranks"
    REPLICAS = "the replicas of its stages"


Wait: TypeAlias = tuple[Sequence[Any], int | Peers]
"""Works, and the rank or ranks that they depend on."""


class BackgroundCall(Generic[T]):
    """A call that raises nothing, in a separate thread; ``value`` is the result, once there."""

    value: T

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._thread = threading.Thread(target=self._run, name="penstock-call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.value = self._function()

    def is_done(self, *, within_s: float) -> bool:
        """Wait for the result; returns True if it is there."""
        self._thread.join(within_s)
        return not self._thread.is_alive()


def poll(read: Callable[[], T | None], *, for_s: float, every_s: float = 0.05) -> T | None:
    """The first value that ``read`` returns, or None."""
    end = time.monotonic() + for_s
    while (found := read()) is None and time.monotonic() < end:
        time.sleep(every_s)
    return found


@dataclass(slots=True)
class GroupRecord:
    """The state that this process's schedules over one group share."""

    num_calls: int = 0  # which every rank makes in the same order
    call: str = ""  # the latest one
    num_collectives: int = 0  # over all ranks, entered by this process
    failed: set[str] = field(default_factory=set)  # calls whose failures were raised here
    control: dist.ProcessGroup | None = None  # of the same ranks, for CPU tensors
    data_plane: Any = None  # of NCCL, where a communicator per schedule would stay to the end


# By group, with weak keys.
_records: WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = WeakKeyDictionary()
# By store, with weak keys: its second connection, which takes seconds to make if torch waits for a
# name server, and lets threads read while torch waits on the first one.
_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# Stores to which an uncaught exception of the main thread is written at exit.
_error_stores: WeakSet[ErrorStore] = WeakSet()


def record_of(group: dist.ProcessGroup) -> GroupRecord:
    """The record of a group, made at its first use."""
    return _records.setdefault(group, GroupRecord())


class ErrorStore:
    """The failures of schedule ``number`` over ``group``, whose stages ``replicas`` replicate or
    shard: publishes this rank's, and finds the first cause.

    Attributes:
        is_lost: whether the store is gone, most likely with its host process, or silent.
        interval_s: the polling interval that the store can serve for all readers.
    """

    def __init__(
        self, group: dist.ProcessGroup, number: int, replicas: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        store = store_of(group)
        if store not in _connections:
            _connections[store] = store.clone()
        self._store = _connections[store]
        self._name = str(number)
        self._rank = group.rank()
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._record = record_of(group)
        self._count_key = key_of(group, "collectives")
        # Each list with the name of this schedule in it; the pipeline's takes precedence.
        self._logs = [(failures_over(group, self._store), self._name)]
        self._logs += [(failures_over(g, self._store), f"replicas/{number}") for g in replicas]
        self._first_read: dict[Failure, float] = {}  # the time by ``time.monotonic``
        num_requests = len(self._logs) * (default_group() or group).size()
        self.interval_s = max(READ_INTERVAL_S, num_requests / MAX_REQUESTS_PER_S)
        # Never retried after a loss, since torch logs a page per failed request.
        self.is_lost = False
        _error_stores.add(self)

    def write(self, cause: Cause) -> Cause:
        """Publish ``cause`` unless another one was first; returns the first cause."""
        self._record.failed.add(self._name)

        def append() -> Cause:
            (own, name), *others = self._logs
            first = own.append(name, cause)
            for log, name in others:
                log.append(name, first)
            return first

        return self._request(append) or cause

    def read(self, waited_s: float = math.inf) -> Failure | None:
        """The failure that ends this call, after so long a wait; infinite if it failed itself."""
        return self._request(lambda: self._find(waited_s))

    def _find(self, waited_s: float) -> Failure | None:
        failures = [log.read() for log, _ in self._logs]
        for found, (_, name) in zip(failures, self._logs, strict=True):
            if name in dict(found):
                return name, dict(found)[name]
        now = time.monotonic()
        for call, cause in failures[0]:
            age_s = now - self._first_read.setdefault((call, cause), now)
            if call.startswith(EARLY):
                is_due = waited_s == math.inf or age_s > EARLY_GRACE_S
            else:
                is_new = call not in self._record.failed and "/" not in call
                is_due = is_new and waited_s >= OTHER_CALLS_S
            if is_due:
                return call, cause
        if OTHER_CALLS_S <= waited_s < math.inf:
            # By these counts, the ranks that wait find those that stay away.
            self._store.set(f"{self._count_key}/{self._rank}", str(self._record.num_collectives))
        return None

    def _find_absent(self) -> list[int]:
        """The ranks that have not entered this rank's current collective."""
        keys = {r: f"{self._count_key}/{r}" for r in range(len(self._processes)) if r != self._rank}
        present = {r: int(self._store.get(k)) for r, k in keys.items() if self._store.check([k])}
        return [rank for rank in keys if present.get(rank, 0) < self._record.num_collectives]

    def _request(self, request: Callable[[], T]) -> T | None:
        if not self.is_lost:
            try:
                return request()
            except (RuntimeError, dist.DistError):
                self.is_lost = True
        return None

    def _query(self, request: Callable[[], T | None]) -> T | None:
        """A request with a timeout: torch sets none, so a stopped process keeps silent forever."""
        call = BackgroundCall(lambda: self._request(request))
        if call.is_done(within_s=MAX_ANSWER_S):
            return call.value
        self.is_lost = True
        return None

    def error_to_raise(
        self,
        error: BaseException,
        wait: Wait | None,
        timed_out_s: float | None,
        find_lost: Callable[[], Sequence[int]],
    ) -> PenstockError | None:
        """Publish the exception that ended a call, or find the first cause.

            this rank failed by itself     its own error, unless another one came first
            all ranks raise the same       its own error
            its wait broke, or timed out   the peer's cause; a generic PeerError without one

        Args:
            error: the exception.
            wait: the interrupted wait, if any.
            timed_out_s: the limit that the wait exceeded, if any.
            find_lost: returns the ranks whose connections to this one are closed.

        Returns:
            The exception to raise instead; None to raise ``error`` itself.
        """
        failure = self._query(lambda: self._find(0.0))
        if failure is None and wait is not None and timed_out_s is None:
            # A peer closes its connections a moment before its cause can be read.
            failure = poll(
                lambda: self._query(lambda: self._find(math.inf)),
                for_s=2.0 + 2 * self.interval_s,
                every_s=self.interval_s / 2,
            )
        where = None
        if failure is None and wait is not None:
            broken = self._broken_wait(wait[1], timed_out_s, find_lost)
            error, where = broken, broken.where  # of the lost rank, not of this one
        own = cause_of(error, self._rank, self._processes, where)
        call, cause = failure or (self._name, own)
        self._record.failed.add(call)
        # A cause that was found is published too, to this rank's replicas.
        first = self._query(lambda: self.write(cause)) or cause
        if (first.kind, first.message) != (own.kind, own.message):
            return as_error(first, self._processes)
        return error if isinstance(error, PeerError) else None

    def _broken_wait(
        self, peer: int | Peers, timed_out_s: float | None, find_lost: Callable[[], Sequence[int]]
    ) -> PeerError:
        ranks: Sequence[int] = () if isinstance(peer, Peers) else (peer,)
        name = peer.value if isinstance(peer, Peers) else ""
        if peer is Peers.ALL_RANKS:
            ranks = (find_lost() if timed_out_s is None else self._query(self._find_absent)) or ()
        if ranks:
            name = f"rank{'s' if len(ranks) > 1 else ''} {runs_of(ranks)}"
        if timed_out_s is not None:
            message = (
                f"no word from {name} within {timed_out_s:g} s, "
                + ("nor does the store answer" if self.is_lost else "and no rank reports a failure")
                + "; pass a longer timeout_s if a step may take so long"
            )
        else:
            message = (
                f"rank {self._rank} lost its connection to {name} in {self._record.call}: a "
                "process has ended or died, or an earlier failure over this process group broke it "
                "(then make stages over a new one, by torch.distributed.new_group, on every rank)"
            )
        raised = PeerError(message)
        raised.where = Where(rank=ranks[0] if len(ranks) == 1 else self._rank)
        return raised

    def report_crash(self, error: BaseException) -> None:
        """Publish the exception that ends this process, unless this schedule failed before."""
        if self._name not in self._record.failed:
            self.write(cause_of(error, self._rank, self._processes))


class Watchdog:
    """Calls ``abort``, in a thread of its own, to end the main thread's wait if another rank has
    failed or the wait exceeds the timeout.

    Attributes:
        waiting_for: the main thread's wait, or None. Each wait is a tuple of its own, so that two
            reads tell one long wait from two short ones without a clock in the main thread.
        has_aborted: whether it has aborted a wait.
        timed_out: whether a wait exceeded the timeout.
        late_on_device: the wait of the device that did, while the main thread waited for none.
    """

    _errors: ErrorStore
    _watches_always: bool

    def __init__(
        self,
        timeout_s: float,
        abort: Callable[[int | Peers], None],
        device_wait: Callable[[], Wait | None] = lambda: None,
    ) -> None:
        self.waiting_for: Wait | None = None
        self.late_on_device: Wait | None = None
        self._device_wait = device_wait
        self.has_aborted = self.timed_out = False
        self.timeout_s = timeout_s
        self._abort = abort
        self._thread: threading.Thread | None = None
        self._active, self._stopped = threading.Event(), threading.Event()
        self._query: BackgroundCall[bool] | None = None

    def start(self, errors: ErrorStore, *, always: bool) -> None:
        """Begin to watch a call by ``errors``; ``always`` also between waits, since torch may wait
        within any action: for replicas, or for the device."""
        self._errors, self._watches_always = errors, always
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(
                target=self._watch, name="penstock-watchdog", daemon=True
            )
            self._thread.start()
            atexit.register(self._end)
        self._active.set()

    def rest(self) -> None:
        """Stop watching a call; the thread sleeps until the next one."""
        self._active.clear()

    def stop(self) -> Wait | None:
        """Stop the thread; returns the main thread's current wait, if any."""
        self._end(None)
        if self._thread is None:
            atexit.unregister(self._end)
        waiting, self.waiting_for = self.waiting_for, None
        self._abort, self._device_wait = lambda peer: None, lambda: None  # release the transport
        return waiting

    def _end(self, for_s: float | None = MAX_LAST_READ_S) -> None:
        self._stopped.set()
        self._active.set()
        if self._thread in (None, threading.current_thread()):
            return  # the thread can't wait for itself, but at exit it is waited for
        thread, self._thread = self._thread, None
        thread.join(for_s)
        if self._query is not None and not self._errors.is_lost:
            self._query.is_done(within_s=for_s or MAX_READ_S)

    def _watch(self) -> None:
        seen: Wait | None = None
        since = read_at = 0.0
        has_failed = False
        while not self._stopped.wait(self._errors.interval_s):
            self._active.wait()
            if self._stopped.is_set():
                return
            errors, now = self._errors, time.monotonic()
            waiting = self.waiting_for or self._device_wait()
            if waiting is not seen:
                seen, since = waiting, now
            elif waiting is not None:
                is_late = now - since > self.timeout_s
                self.timed_out |= is_late
                if is_late or self._has_failure(errors, now - since):
                    errors.is_lost |= self._query is not None
                    # The store's process ends: its connections, which name it, close a bit later.
                    if errors.is_lost and self._stopped.wait(errors.interval_s):
                        return
                    if waiting in (self.waiting_for, self._device_wait()):
                        if is_late and self.waiting_for is not waiting:
                            self.late_on_device = waiting
                        self.has_aborted = True
                        self._abort(waiting[1])
            elif self._watches_always and now - read_at > IDLE_INTERVAL_S:
                if not self._has_failure(errors, 0.0):
                    read_at = time.monotonic()
                elif has_failed:
                    self.has_aborted = True
                    self._abort(Peers.REPLICAS)
                else:
                    # At the second read only: ranks that all make the same mistake raise by
                    # themselves, and the groups of replicas stay whole.
                    has_failed = True

    def _has_failure(self, errors: ErrorStore, waited_s: float) -> bool:
        """True if the store has a failure or is gone; False while it does not answer."""
        if self._query is None:
            self._query = BackgroundCall(
                lambda: errors.read(waited_s) is not None or errors.is_lost
            )
        if not self._query.is_done(within_s=READ_INTERVAL_S):
            return False
        found, self._query = self._query.value, None
        return found


@atexit.register
def _let_threads_end() -> None:
    """Let gloo's threads drop the tensors of collectives: later, that aborts the process."""
    time.sleep(EXIT_S if _records else 0.0)


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
