"""A failure as data, and the job's list of failures in torch's store.

The failed rank makes a ``Cause`` and appends it to the list of its process group; the other ranks
read and raise it (``runtime/failure.py``). So does a rank that fails before its schedule exists
(``publishing_errors``), since its peers already wait for it in their first step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock import errors
from penstock.errors import NOWHERE, PeerError, PenstockError, StageError, Where

__all__ = [
    "EARLY",
    "Cause",
    "Failure",
    "FailureLog",
    "as_error",
    "cause_of",
    "default_group",
    "failures_over",
    "key_of",
    "message_of",
    "own_group",
    "publishing_errors",
    "store_of",
    "withdraw_early",
]

# Limit on a message and on a traceback: torch's store closes the connection above 8 MiB.
MAX_CHARACTERS = 1 << 16
# The prefix of the call of an early failure.
EARLY = "early"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The first failure of a pipeline.

    Args:
        kind: the exception's class name; the public base class's for a subclass of Penstock's own.
        message: the exception's message.
        where: the place of the failure.
        processes: the processes (global ranks) of the pipeline, by rank.
        traceback: the original traceback; empty without an exception.
    """

    kind: str
    message: str
    where: Where
    processes: tuple[int, ...]
    traceback: str


def message_of(error: BaseException) -> str:
    """An exception's message, even if its ``__str__`` fails."""
    try:
        return str(error)
    except BaseException as failed:
        return f"(its message can't be shown: __str__ raised {type(failed).__name__})"


def cause_of(error: BaseException, rank: int, processes: Sequence[int]) -> Cause:
    """Make the cause to publish for ``error``, raised on ``rank`` of these processes."""
    where = error.where if isinstance(error, PenstockError) else NOWHERE
    if where.rank not in (None, rank):
        where = NOWHERE  # a position in the program, not on this rank
    message = message_of(error)
    if not isinstance(error, PenstockError):
        message = f"{type(error).__name__}: {message}"
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException as failed:  # its notes or its causes can't be formatted
        trace = "".join(traceback.format_tb(error.__traceback__))
        trace += f"(the rest can't be shown: it raised {type(failed).__name__})\n"
    public = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return Cause(
        kind=next(public, type(error).__name__),
        message=_abbreviated(message),
        where=replace(where, rank=rank),
        processes=tuple(processes),
        traceback=_abbreviated(trace),
    )


def _abbreviated(text: str) -> str:
    num_omitted, half = len(text) - MAX_CHARACTERS, MAX_CHARACTERS // 2
    if num_omitted <= 0:
        return text
    return f"{text[:half]} ... ({num_omitted} characters left out) ... {text[-half:]}"


def as_error(cause: Cause, processes: Sequence[int]) -> PenstockError:
    """Make the exception that a rank of these processes raises for another rank's failure.

    Usage errors (``BoundaryError``, ``ScheduleError``, ``PartitionError``) keep their type, so that
    every rank raises the same type. A failure of user code becomes a ``PeerError``.
    """
    shared = (errors.BoundaryError, errors.ScheduleError, errors.PartitionError)
    kind = next((kind for kind in shared if kind.__name__ == cause.kind), PeerError)
    message = cause.message
    if str(cause.where) not in message:
        message = f"{cause.where}: {message}"
    if cause.processes != tuple(processes):
        listed = ", ".join(map(str, cause.processes))
        message = f"in another replica's pipeline (processes {listed}): {message}"
    if cause.traceback:
        message += f"\n\nThe original traceback, on rank {cause.where.rank}:\n{cause.traceback}"
    error = kind(message)
    error.where = cause.where
    return error


# --- process groups ------------------------------------------------------------------------------


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The user's group, or the default group.

    Raises:
        StageError: ``group`` is no process group, or does not include this process.
    """
    if group is None:
        return default_group()
    if not isinstance(group, dist.ProcessGroup):
        # torch.distributed.new_group returns this value on processes outside the new group.
        is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
        given = "one that this process is not in" if is_outside else repr(group)
        raise StageError(
            f"the process group is {given}, expected a torch.distributed.ProcessGroup with this "
            'process in it, such as device_mesh.get_group("pp")'
        )
    return group


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of failures: one per job, since a second connection may take seconds."""
    return (default_group() or group).get_group_store()


def key_of(group: dist.ProcessGroup, name: str) -> str:
    """The store's key for ``name`` of ``group``, the same on all its ranks.

    A group made later may have the same name, but not the same processes. Their list is hashed,
    since a key that lists thousands of processes would be too long for torch's store.
    """
    processes = repr(dist.get_process_group_ranks(group)).encode()
    return f"penstock/{group.group_name}/{hashlib.sha256(processes).hexdigest()[:16]}/{name}"


# --- the list of failures ------------------------------------------------------------------------


class Failure(NamedTuple):
    """An entry of a ``FailureLog``: its index, the failed call (a schedule's number, or before
    any), its cause, and the time at which this process first read it (``time.monotonic``, s)."""

    place: int
    call: str
    cause: Cause
    read_at: float


class FailureLog:
    """The failures of a process group: an append-only list under consecutive keys of a store.

        <key>/0   ["0", cause]        the first cause of schedule 0
        <key>/1   null                a withdrawn early failure
        <key>/2   ["replicas/1", …]   the first cause of schedule 1, for the replicas of a stage

    Args:
        store: a ``torch.distributed.Store``.
        key: the prefix of the keys.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._entries: list[Failure | None] = []

    def append(self, call: str, cause: Cause) -> Failure:
        """Append ``cause`` unless the list has a failure of ``call``; returns the first one."""
        data = json.dumps([call, asdict(cause)])
        place, entry = -1, None
        while entry is None or entry.call != call:
            place += 1
            entry = _parsed(place, self._store.compare_set(f"{self._key}/{place}", "", data))
        return entry

    def read(self) -> list[Failure]:
        """All entries, oldest first."""
        for place, entry in enumerate(self._entries):
            if entry is not None and entry.call.startswith(EARLY) and self._fetch(place) is None:
                self._entries[place] = None
        while self._store.check([f"{self._key}/{len(self._entries)}"]):
            self._entries.append(self._fetch(len(self._entries)))
        return [entry for entry in self._entries if entry is not None]

    def withdraw(self, place: int) -> None:
        """Withdraw an entry."""
        self._store.set(f"{self._key}/{place}", "null")

    def _fetch(self, place: int) -> Failure | None:
        return _parsed(place, self._store.get(f"{self._key}/{place}"))


def _parsed(place: int, data: bytes) -> Failure | None:
    entry = json.loads(data)
    if entry is None:
        return None
    call, fields = entry
    fields["where"], fields["processes"] = Where(**fields["where"]), tuple(fields["processes"])
    return Failure(place, call, Cause(**fields), time.monotonic())


def failures_over(group: dist.ProcessGroup, store: Any = None) -> FailureLog:
    """The failures of ``group``, over its own connection to the store by default."""
    store = store_of(group) if store is None else store
    return FailureLog(store, key_of(group, "failed"))


# Group name → the place of this process's early failure.
_early: dict[str, int] = {}


@contextlib.contextmanager
def publishing_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Publish exceptions raised in this block so that peers stop waiting; cleared by the next
    success. ``group`` is None if there are no other ranks."""
    try:
        yield
    except BaseException as error:
        if group is not None and group.size() > 1:
            # If the store is gone, no reader is left.
            with contextlib.suppress(RuntimeError, dist.DistError):
                withdraw_early(group)
                cause = cause_of(error, group.rank(), dist.get_process_group_ranks(group))
                failure = failures_over(group).append(f"{EARLY}/{group.rank()}", cause)
                _early[group.group_name] = failure.place
        raise
    if group is not None:
        withdraw_early(group)


def withdraw_early(group: dist.ProcessGroup) -> None:
    """Withdraw this process's early failure, if any."""
    place = _early.pop(group.group_name, None)
    if place is not None:
        with contextlib.suppress(RuntimeError, dist.DistError):
            failures_over(group).withdraw(place)
