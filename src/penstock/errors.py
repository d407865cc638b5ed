"""Every exception that Penstock raises on purpose, typed by whose fault it is.

The facts of a failure are attributes, so that a program can act on them; the message says where,
what was expected, what was found and what to do next. This module knows no other part.
"""

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
    """The place of a failure; what is not known of it is None.

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
        """``rank 1, stage 2, microbatch 3, action 2F3``, leaving out what is not known."""
        names = ("rank", "stage", "microbatch", "action")
        known = [(name, getattr(self, name)) for name in names]
        return ", ".join(f"{name} {value}" for name, value in known if value is not None)


NOWHERE = Where()


class PenstockError(Exception):
    """Base of all of Penstock's own exceptions.

    Args:
        message: what happened and what to do next.
        where: the place of the failure; shown before the message when known.
        parameter: the argument at fault, such as ``"microbatches"`` or a field of ``Costs``, so
            that a command line can name its flag; None where no single argument is.
    """

    def __init__(
        self, message: str, *, where: Where = NOWHERE, parameter: str | None = None
    ) -> None:
        place = str(where)
        super().__init__(f"{place}: {message}" if place else message)
        self.where = where
        self.parameter = parameter

    def locate(self, where: Where) -> None:
        """Say where it happened, unless that is known already; the message begins with it.

        Args:
            where: the place of the failure.
        """
        if self.where == NOWHERE:
            self.where = where
            self.args = (f"{where}: {self}",)

    @property
    def rank(self) -> int | None:
        """The rank that failed first, where known."""
        return self.where.rank

    @property
    def stage(self) -> int | None:
        """The stage at work when it failed, where known."""
        return self.where.stage

    @property
    def microbatch(self) -> int | None:
        """The microbatch at work when it failed, where known."""
        return self.where.microbatch

    @property
    def action(self) -> str | None:
        """The action that failed, in text form, where known."""
        return self.where.action


class ScheduleError(PenstockError, ValueError):
    """A schedule or program is wrong or impossible; the mistake of its author."""


class PartitionError(PenstockError, ValueError):
    """A model can't be cut as asked: the fault of the plan, or a limit of the model."""


class StageError(PenstockError, RuntimeError):
    """The user's code failed inside a stage (forward, backward, loss or hook), or a stage was
    used out of order. Its ``__cause__`` is the original exception where there is one."""


class BoundaryError(PenstockError, RuntimeError):
    """A value between two stages has another shape, dtype or structure than was agreed."""


class PeerError(PenstockError, RuntimeError):
    """Another rank failed, died or fell silent; this rank stops with the first cause known."""


class InternalError(PenstockError, RuntimeError):
    """A fault of Penstock's own. Please report it with its message."""
