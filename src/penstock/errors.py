"""Exceptions of Penstock, with a type per party at fault, and the facts as attributes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

__all__ = [
    "PenstockError", "ScheduleError", "PartitionError", "StageError", "BoundaryError", "PeerError",
    "InternalError", "Where", "OUR_FILES", "fold_tracebacks", "folds_tracebacks",
    "shows_full_tracebacks",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place of a failure; unavailable fields are None.

    Args:
        rank: the pipeline rank that failed.
        stage: the stage at work.
        microbatch: the microbatch at work.
        action: the action in text form, such as ``"2F3"``.
    """

    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    def __str__(self) -> str:
        """``rank 1, stage 2, microbatch 3, action 2F3``, without the unavailable fields."""
        known = {name: getattr(self, name) for name in ("rank", "stage", "microbatch", "action")}
        return ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)


NOWHERE = Where()


class PenstockError(Exception):
    """Base class of all Penstock exceptions.

    Args:
        message: the failure and the next step.
        where: the place of the failure, shown before the message if available.
        parameter: the argument at fault, such as ``"microbatches"`` or a field of ``Costs``, so
            that a command line can name its flag; None without a single such argument.
    """

    def __init__(
        self, message: str, *, where: Where = NOWHERE, parameter: str | None = None
    ) -> None:
        super().__init__(f"{where}: {message}" if str(where) else message)
        self.where = where
        self.parameter = parameter

    def locate(self, where: Where) -> None:
        """Set the place of the failure unless it is set; the message begins with the place."""
        if self.where == NOWHERE:
            self.where = where
            self.args = (f"{where}: {self}",)

    rank = property(attrgetter("where.rank"), doc="The rank that failed first, or None.")
    stage = property(attrgetter("where.stage"), doc="The stage that was running, or None.")
    microbatch = property(attrgetter("where.microbatch"), doc="The microbatch at work, or None.")
    action = property(attrgetter("where.action"), doc="The failed action as text, or None.")


class ScheduleError(PenstockError, ValueError):
    """A schedule or program is invalid; the mistake of its author."""


class PartitionError(PenstockError, ValueError):
    """A model can't be split as requested: the fault of the plan, or a limit of the model."""


class StageError(PenstockError, RuntimeError):
    """User code failed inside a stage (forward, backward, loss or hook), or a stage was used out of
    order. ``__cause__`` is the original exception, if any."""


class BoundaryError(PenstockError, RuntimeError):
    """A value between two stages has an unexpected shape, dtype or structure."""


class PeerError(PenstockError, RuntimeError):
    """Another rank failed, died or stopped responding; the message names the first known cause."""


class InternalError(PenstockError, RuntimeError):
    """A bug in Penstock. Please report it with its message."""


# --- tracebacks ----------------------------------------------------------------------------------

_FULL = "PENSTOCK_FULL_TRACEBACK"
_HINT = f"(frames inside Penstock and of torch's module calls are left out; {_FULL}=1 shows them)"
OUR_FILES = f"{Path(__file__).parent}{os.sep}"
_MODULE_CALLS = os.path.join("torch", "nn", "modules", "module.py")


def shows_full_tracebacks() -> bool:
    """True if the environment variable PENSTOCK_FULL_TRACEBACK is set."""
    return bool(os.environ.get(_FULL))


def folds_tracebacks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: exceptions leave it without internal frames."""

    @wraps(function)
    def folding(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            fold_tracebacks(error)
            raise

    return folding


def fold_tracebacks(error: BaseException | None) -> None:
    """Leave internal frames out of the tracebacks of ``error`` and of its causes.

    The innermost frame stays, except in errors of Penstock: their messages say more than it.
    """
    if error is None or isinstance(error, InternalError) or shows_full_tracebacks():
        return
    cause = error.__context__ if error.__cause__ is None else error.__cause__
    fold_tracebacks(None if cause is error else cause)  # as ``raise error from error`` makes it
    frames: list[TracebackType] = []
    each = error.__traceback__
    while each is not None:
        frames.append(each)
        each = each.tb_next
    kept = [tb for tb in frames if not _is_internal(tb.tb_frame.f_code.co_filename)]
    if not isinstance(error, PenstockError) and frames and frames[-1] not in kept:
        kept.append(frames[-1])
    folded = None
    for tb in reversed(kept):
        folded = TracebackType(folded, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    error.__traceback__ = folded
    if isinstance(error, PenstockError) and not hasattr(error, "__notes__"):
        error.add_note(_HINT)


def _is_internal(filename: str) -> bool:
    return filename.startswith(OUR_FILES) or filename.endswith(_MODULE_CALLS)
