"""A failure as data, and the list of failures of a process group in torch's store.

The failed rank appends a ``Cause`` to the list; the other ranks read and raise it
(``runtime/failure.py``). A rank that fails before its schedule exists does the same
(``publishing_errors``), since its peers already wait for it in their first step.
Also the lookups of process groups, their store and its keys, which the layers above share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch.distributed as dist

from penstock import errors
from penstock.errors import (
    NOWHERE,
    PeerError,
    PenstockError,
    StageError,
    Where,
    fold_tracebacks,
    shows_full_tracebacks,
)

__all__ = [
    "Cause", "Failure", "FailureLog", "as_error", "cause_of", "failures_over", "text_of",
    "decode_failure", "encode_failure", "default_group", "key_of", "own_group", "store_of", "EARLY",
    "publishing_errors", "withdraw_early",
]  # fmt: skip

# Limit on a message and on a traceback: torch's store closes the connection above 8 MiB.
MAX_CHARACTERS = 1 << 16
# The prefix of the call of an early failure, before any schedule.
EARLY = "early"
# Usage errors, which every rank raises in the same type.
_SHARED = (errors.BoundaryError, errors.ScheduleError, errors.PartitionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The first failure of a pipeline."""

    kind: str  # the exception's class name; the public base's for a subclass of Penstock's own
    message: str
    where: Where
    processes: tuple[int, ...]  # of the pipeline, by rank
    traceback: str


def text_of(error: BaseException) -> str:
    """An exception's class and message, even if its ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as failed:
        return f"{type(error).__name__}, whose __str__ raised {type(failed).__name__}"


def cause_of(
    error: BaseException, rank: int, processes: Sequence[int], at: Where | None = None
) -> Cause:
    """Make the cause to publish for ``error``, raised on ``rank`` of these processes; ``at`` is the
    place if another rank is at fault."""
    where, message = NOWHERE, text_of(error)
    if isinstance(error, PenstockError):
        message = str(error)
        if error.rank in (None, rank):  # else it is a position in the program, not on this rank
            where = error.where
    public = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return Cause(
        kind=next(public, type(error).__name__),
        message=_abbreviated(message),
        where=replace(where, rank=rank) if at is None else at,
        processes=tuple(processes),
        traceback=_abbreviated(_shown_traceback(error)),
    )


def _shown_traceback(error: BaseException) -> str:
    """The traceback of the user's exception; empty for an error that Penstock itself has found."""
    if shows_full_tracebacks():
        return "".join(traceback.format_exception(error))
    fold_tracebacks(error)
    if isinstance(error, PenstockError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, PenstockError) and error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(error))


def _abbreviated(text: str) -> str:
    num_omitted, half = len(text) - MAX_CHARACTERS, MAX_CHARACTERS // 2
    if num_omitted <= 0:
        return text
    return f"{text[:half]} ... ({num_omitted} characters left out) ... {text[-half:]}"


def as_error(cause: Cause, processes: Sequence[int]) -> PenstockError:
    """Make the exception that a rank of these processes raises for another rank's failure: a usage
    error of the same type, or a ``PeerError`` for a failure of user code."""
    kind = next((kind for kind in _SHARED if kind.__name__ == cause.kind), PeerError)
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


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The user's group, or the default group.

    Raises:
        StageError: ``group`` is no process group, or does not include this process.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return default_group() if group is None else group
    # torch.distributed.new_group returns this value on processes outside the new group.
    is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
    raise StageError(
        f"the process group is {'one that this process is not in' if is_outside else repr(group)}, "
        "expected a torch.distributed.ProcessGroup with this process in it, such as "
        'device_mesh.get_group("pp")'
    )


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of failures: one per job, since a second connection may take seconds."""
    return (default_group() or group).get_group_store()


def key_of(group: dist.ProcessGroup, name: str) -> str:
    """The store's key for ``name`` of ``group``, the same on all its ranks."""
    # A group made later may have the same name, but not the same processes. Their list is hashed,
    # since a key that lists thousands of processes would be too long for torch's store.
    processes = repr(dist.get_process_group_ranks(group)).encode()
    return f"penstock/{group.group_name}/{hashlib.sha256(processes).hexdigest()[:16]}/{name}"


Failure: TypeAlias = tuple[str, Cause]
"""The failed call (a schedule's number, or before any), and its cause."""


class FailureLog:
    """The failures of a process group: an append-only list under consecutive keys of torch's store.

    <key>/0   ["0", cause]        the first cause of schedule 0
    <key>/1   null                a withdrawn early failure
    <key>/2   ["replicas/1", …]   the first cause of schedule 1, for the replicas of a stage
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key

    def append(self, call: str, cause: Cause) -> Cause:
        """Append ``cause`` unless the list has a failure of ``call``; returns the first one."""
        data = encode_failure(call, cause)
        entries = (decode_failure(self._store.compare_set(self._at(i), "", data)) for i in count())
        return next(entry[1] for entry in entries if entry is not None and entry[0] == call)

    def read(self) -> list[Failure]:
        """All entries, oldest first."""
        return [entry for entry in self._entries() if entry is not None]

    def withdraw(self, call: str) -> None:
        """Withdraw the failure of ``call``."""
        for index, entry in enumerate(self._entries()):
            if entry is not None and entry[0] == call:
                self._store.set(self._at(index), "null")

    def _entries(self) -> Iterator[Failure | None]:
        for index in count():
            if not self._store.check([self._at(index)]):
                return
            yield decode_failure(self._store.get(self._at(index)))

    def _at(self, index: int) -> str:
        return f"{self._key}/{index}"


def encode_failure(call: str, cause: Cause) -> str:
    """A failure as JSON."""
    return json.dumps([call, asdict(cause)])


def decode_failure(data: bytes) -> Failure | None:
    """Read what ``encode_failure`` wrote; None for a withdrawn failure."""
    if (entry := json.loads(data)) is None:
        return None
    call, fields = entry
    fields["where"], fields["processes"] = Where(**fields["where"]), tuple(fields["processes"])
    return call, Cause(**fields)


def failures_over(group: dist.ProcessGroup, store: Any = None) -> FailureLog:
    """The failures of ``group``, over its own connection to the store by default."""
    return FailureLog(store_of(group) if store is None else store, key_of(group, "failed"))


# The keys of the groups in which this process has an early failure.
_early: set[str] = set()


@contextlib.contextmanager
def publishing_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Publish exceptions raised in this block so that peers stop waiting; cleared by the next
    success. ``group`` is None if there are no other ranks."""
    try:
        yield
    except BaseException as error:
        if group is not None and group.size() > 1:
            withdraw_early(group)
            cause = cause_of(error, group.rank(), dist.get_process_group_ranks(group))
            with contextlib.suppress(RuntimeError, dist.DistError):  # without a store, no reader
                failures_over(group).append(f"{EARLY}/{group.rank()}", cause)
                _early.add(key_of(group, EARLY))
        raise
    if group is not None:
        withdraw_early(group)


def withdraw_early(group: dist.ProcessGroup) -> None:
    """Withdraw this process's early failure, if any."""
    if _early and (key := key_of(group, EARLY)) in _early:
        _early.remove(key)
        with contextlib.suppress(RuntimeError, dist.DistError):
            failures_over(group).withdraw(f"{EARLY}/{group.rank()}")
