"""Exceptions of Penstock, with a type per party at fault, and the facts as attributes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "PenstockError",
    "ScheduleError",
    "PartitionError",
    "StageError",
    "BoundaryError",
    "PeerError",
    "InternalError",
    "Where",
]


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

    @property
    def rank(self) -> int | None:
        """The rank that failed first; None if unavailable."""
        return self.where.rank

    @property
    def stage(self) -> int | None:
        """The stage that was running; None if unavailable."""
        return self.where.stage

    @property
    def microbatch(self) -> int | None:
        """The microbatch that was running; None if unavailable."""
        return self.where.microbatch

    @property
    def action(self) -> str | None:
        """The failed action in text form; None if unavailable."""
        return self.where.action


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
