"""The first cause of a failed step, told on every rank.

A rank that fails writes a ``Cause`` on the board, a key of the process group's store; only the
first one stays. The others read it there and raise it as their own. This module moves no tensors
and wakes nobody; see ``c10d.py`` for that.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from penstock import errors
from penstock.errors import PeerError, PenstockError, Where

__all__ = ["Board", "Cause", "as_error", "cause_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What failed first.

    Args:
        kind: the exception's class name.
        message: its message.
        rank: the pipeline rank that it was raised on.
        stage, microbatch, action: what was at work, where known.
        traceback: the original traceback.
    """

    kind: str
    message: str
    rank: int
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


def cause_of(error: BaseException, rank: int) -> Cause:
    """The cause that ``error``, raised on ``rank``, is to the other ranks."""
    where = error.where if isinstance(error, PenstockError) else Where()
    original = error.__cause__ or error
    return Cause(
        kind=type(error).__name__,
        message=str(error),
        rank=rank,
        stage=where.stage,
        microbatch=where.microbatch,
        action=where.action,
        traceback="".join(traceback.format_exception(original)),
    )


def as_error(cause: Cause) -> PenstockError:
    """What a rank raises for another rank's failure.

    Penstock's own kinds keep their type, so that a mistake is the same error on every rank; what
    the user's code raised comes as a ``PeerError``.
    """
    kinds: dict[str, type[PenstockError]] = {
        "BoundaryError": errors.BoundaryError,
        "ScheduleError": errors.ScheduleError,
        "PartitionError": errors.PartitionError,
    }
    kind = kinds.get(cause.kind, PeerError)
    told = cause.message if str(cause.where) in cause.message else f"{cause.where}: {cause.message}"
    error = kind(f"{told}\n\nThe original traceback, on rank {cause.rank}:\n{cause.traceback}")
    error.where = cause.where
    return error


class Board:
    """Where the first cause is written, for all ranks of one schedule.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share; each thread needs a clone of
            its own.
        key: names the schedule, alike on all ranks.

    Attributes:
        is_lost: whether the store is gone, and with it most likely the process that held it.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        # Once lost, a store stays lost, and asking it again costs a page of log each time.
        self.is_lost = False

    def write(self, cause: Cause) -> Cause:
        """Write ``cause`` unless another one came first; returns the one that stands."""
        if self.is_lost:
            return cause
        try:
            data = self._store.compare_set(self._key, "", json.dumps(asdict(cause)))
        except (RuntimeError, dist.DistError):
            self.is_lost = True
            return cause
        return Cause(**json.loads(data))

    def read(self) -> Cause | None:
        """The cause, if there is one. Where the store is gone, ``is_lost`` says so."""
        if self.is_lost:
            return None
        try:
            if not self._store.check([self._key]):
                return None
            return Cause(**json.loads(self._store.get(self._key)))
        except (RuntimeError, dist.DistError):
            self.is_lost = True
            return None
