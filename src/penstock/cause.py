"""The first cause of a failure as data, and errors published before any schedule exists.

A cause is created on the failed rank, sent as JSON, and raised on the other ranks. If a rank fails
to make a stage or schedule, it never reaches the first step, where its peers wait for it. Therefore
it publishes its cause in the job's store, under the *note* key that ``runtime/failure.py`` reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from penstock import errors
from penstock.errors import NOWHERE, PeerError, PenstockError, StageError, Where

__all__ = [
    "NOTE",
    "Cause",
    "as_error",
    "cause_of",
    "default_group",
    "key_of",
    "message_of",
    "own_group",
    "publishing_errors",
    "store_of",
    "withdraw_note",
]

# Limit on a message and on a traceback: torch's store closes the connection above 8 MiB.
MAX_CHARACTERS = 1 << 16
NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The first failure of a pipeline.

    Args:
        kind: the exception's class name; the public base class's for a subclass of Penstock's own.
        message: the exception's message.
        rank: the pipeline rank that raised it.
        processes: the processes (global ranks) of that pipeline, by rank.
        stage, microbatch, action: the place of the failure, if available.
        traceback: the original traceback; empty without an exception.
    """

    kind: str
    message: str
    rank: int
    processes: tuple[int, ...]
    stage: int | None
    microbatch: int | None
    action: str | None
    traceback: str

    @property
    def where(self) -> Where:
        """The place of the failure."""
        return Where(
            rank=self.rank, stage=self.stage, microbatch=self.microbatch, action=self.action
        )

    def to_json(self) -> str:
        """The cause as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(data: str | bytes) -> Cause:
        """The inverse of ``to_json``."""
        fields = json.loads(data)
        return Cause(**{**fields, "processes": tuple(fields["processes"])})


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
    public = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return Cause(
        kind=next(public, type(error).__name__),
        message=_shortened(message),
        rank=rank,
        processes=tuple(processes),
        stage=where.stage,
        microbatch=where.microbatch,
        action=where.action,
        traceback=_shortened(_traceback_of(error if error.__cause__ is None else error.__cause__)),
    )


def _shortened(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    if left_out <= 0:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as failed:  # formatting its notes or its causes failed as well
        where = "".join(traceback.format_tb(error.__traceback__))
        return f"{where}(the rest can't be shown: it raised {type(failed).__name__})\n"


def as_error(cause: Cause, processes: Sequence[int]) -> PenstockError:
    """Make the exception that a rank raises for another rank's failure.

    Usage errors (``BoundaryError``, ``ScheduleError``, ``PartitionError``) keep their type, so that
    every rank raises the same type. A failure of user code becomes a ``PeerError``.

    Args:
        cause: the failure.
        processes: the processes of the pipeline that raises the exception now.
    """
    kinds: dict[str, type[PenstockError]] = {
        "BoundaryError": errors.BoundaryError,
        "ScheduleError": errors.ScheduleError,
        "PartitionError": errors.PartitionError,
    }
    kind = kinds.get(cause.kind, PeerError)
    message = cause.message
    if str(cause.where) not in message:
        message = f"{cause.where}: {message}"
    if cause.processes != tuple(processes):
        listed = ", ".join(map(str, cause.processes))
        message = f"in another replica's pipeline (processes {listed}): {message}"
    if cause.traceback:
        message += f"\n\nThe original traceback, on rank {cause.rank}:\n{cause.traceback}"
    error = kind(message)
    error.where = cause.where
    return error


# --- the job's store -----------------------------------------------------------------------------


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
        elsewhere = group is dist.GroupMember.NON_GROUP_MEMBER
        given = "one that this process is not in" if elsewhere else repr(group)
        raise StageError(
            f"the process group is {given}, expected a torch.distributed.ProcessGroup with this "
            'process in it, such as device_mesh.get_group("pp")'
        )
    return group


def store_of(group: dist.ProcessGroup) -> Any:
    """The store in which the ranks of ``group`` publish failures: one per job, since a second
    connection may take seconds."""
    return (default_group() or group).get_group_store()


def key_of(group: dist.ProcessGroup, what: str | int) -> str:
    """The store's key for one value of ``group``, the same on all its ranks.

    Args:
        group: the group. Another group may have its name, but not the same processes.
        what: the value's name.
    """
    # A key that lists thousands of processes would be too long for torch's store.
    processes = repr(dist.get_process_group_ranks(group)).encode()
    return f"penstock/{group.group_name}/{hashlib.sha256(processes).hexdigest()[:16]}/{what}"


# The groups for which this process has a note in the store.
_noted: set[str] = set()


@contextlib.contextmanager
def publishing_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Publish exceptions raised in this block so that peers stop waiting; cleared by the next
    success.

    Args:
        group: the pipeline's group; None if there are no other ranks.
    """
    try:
        yield
    except BaseException as error:
        if group is not None and group.size() > 1:
            # If the store is gone, no reader is left.
            with contextlib.suppress(RuntimeError, dist.DistError):
                cause = cause_of(error, group.rank(), dist.get_process_group_ranks(group))
                store_of(group).set(key_of(group, NOTE), cause.to_json())
                _noted.add(group.group_name)
        raise
    if group is not None:
        withdraw_note(group)


def withdraw_note(group: dist.ProcessGroup) -> None:
    """Clear this process's note, if any."""
    if group.group_name in _noted:
        _noted.discard(group.group_name)
        with contextlib.suppress(RuntimeError, dist.DistError):
            # Overwritten, not deleted: a rank that saw the key may be about to read it.
            store_of(group).set(key_of(group, NOTE), "")
