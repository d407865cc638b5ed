"""The error of a model that can't be captured: what stands in the way, and the ways around it.

    what; do this, or that, or cut it by module instead
    what; do this, or that                                 for whom cutting by module has failed

This module knows nothing of capturing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from penstock.errors import PartitionError

__all__ = ["LostInGraph", "NotCaptured"]

_BY_MODULE = "cut it by module instead (split_by_module), which runs the code as it is"


class NotCaptured(PartitionError):
    """A model can't be captured, or not be cut as a graph.

    Attributes:
        what: what stands in the way.
        ways: what to do about it, other than to cut by module.
        by_module: whether the model may be cut by module instead, for all that is known.

    Example:
        >>> error = NotCaptured.of("it has hooks", "take them off")
        >>> str(error)[:46]
        'it has hooks; take them off, or cut it by modu'
        >>> error.without_by_module
        'it has hooks; take them off'
    """

    what: str = ""
    ways: tuple[str, ...] = ()
    by_module: bool = True

    @classmethod
    def of(cls, what: str, *ways: str, by_module: bool = True) -> Self:
        """The error with these attributes."""
        error = cls(_told(what, [*ways, _BY_MODULE] if by_module else ways))
        error.what, error.ways, error.by_module = what, ways, by_module
        return error

    @property
    def without_by_module(self) -> str:
        """The message for whom cutting by module has failed."""
        return _told(self.what, self.ways)


class LostInGraph(NotCaptured):
    """A forward does what changes gradients and is no operation."""


def _told(what: str, ways: Sequence[str]) -> str:
    return f"{what}; {', or '.join(ways)}" if ways else what
