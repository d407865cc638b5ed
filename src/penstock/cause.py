"""What failed first, as data: made on one rank, raised on the others.

This module neither stores nor sends anything.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock import errors
from penstock.errors import NOWHERE, PeerError, PenstockError, Where

__all__ = ["Cause", "as_error", "cause_of", "message_of"]

# Of a message, and of a traceback, so many are told to the other ranks: a store of torch's breaks
# the connection over which more than 8 MiB come.
MAX_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What failed first.

    Args:
        kind: the exception's class name; of Penstock's own, the one that users know it by.
        message: its message.
        rank: the pipeline rank that it was raised on.
        processes: the processes (global ranks) of that pipeline, by rank there.
        stage, microbatch, action: what was at work, where known.
        traceback: the original traceback; empty where nothing was raised.
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
        """Its place."""
        return Where(
            rank=self.rank, stage=self.stage, microbatch=self.microbatch, action=self.action
        )

    def to_json(self) -> str:
        """The cause as JSON, to be read by ``from_json`` on another rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(data: str | bytes) -> Cause:
        """The cause that ``to_json`` wrote."""
        fields = json.loads(data)
        return Cause(**{**fields, "processes": tuple(fields["processes"])})


def message_of(error: BaseException) -> str:
    """What an exception says, also where its own ``__str__`` fails, in whatever way."""
    try:
        return str(error)
    except BaseException as failed:
        return f"(its message can't be shown: __str__ raised {type(failed).__name__})"


def cause_of(error: BaseException, rank: int, processes: Sequence[int]) -> Cause:
    """The cause that ``error``, raised on ``rank`` of these processes, is to the other ranks."""
    where = error.where if isinstance(error, PenstockError) else NOWHERE
    if where.rank not in (None, rank):
        where = NOWHERE  # a place that it tells of, such as one in a program: not this rank's
    message = message_of(error)
    if not isinstance(error, PenstockError):
        message = f"{type(error).__name__}: {message}"
    original = error if error.__cause__ is None else error.__cause__
    return Cause(
        kind=_kind_of(type(error)),
        message=_shortened(message),
        rank=rank,
        processes=tuple(processes),
        stage=where.stage,
        microbatch=where.microbatch,
        action=where.action,
        traceback=_shortened(_traceback_of(original)),
    )


def _kind_of(cls: type[BaseException]) -> str:
    own = (each.__name__ for each in cls.__mro__ if each.__module__ == errors.__name__)
    return next(own, cls.__name__)


def _shortened(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    if left_out <= 0:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as failed:  # its notes, or those of its causes, can't be shown either
        where = "".join(traceback.format_tb(error.__traceback__))
        return f"{where}(the rest can't be shown: it raised {type(failed).__name__})\n"


def as_error(cause: Cause, processes: Sequence[int]) -> PenstockError:
    """What a rank raises for another rank's failure.

    Penstock's own kinds keep their type, so that a mistake is the same error on every rank; what
    the user's code raised comes as a ``PeerError``.

    Args:
        cause: the failure.
        processes: those of the pipeline in which it is raised now.
    """
    kinds: dict[str, type[PenstockError]] = {
        "BoundaryError": errors.BoundaryError,
        "ScheduleError": errors.ScheduleError,
        "PartitionError": errors.PartitionError,
    }
    kind = kinds.get(cause.kind, PeerError)
    told = cause.message if str(cause.where) in cause.message else f"{cause.where}: {cause.message}"
    if cause.processes != tuple(processes):
        listed = ", ".join(map(str, cause.processes))
        told = f"in another replica's pipeline (processes {listed}): {told}"
    if cause.traceback:
        told += f"\n\nThe original traceback, on rank {cause.rank}:\n{cause.traceback}"
    error = kind(told)
    error.where = cause.where
    return error
