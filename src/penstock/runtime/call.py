"""Pieces of actions, bound to what they are carried out on: what the executor runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Action

__all__ = ["Call", "Enter"]

Enter: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Call:
    """A bound piece of an action.

    Args:
        action: the action that it is a piece of.
        run: what to call.
        waits: whether it only waits for a message: such time is idle, not work.
        enter: what to call before it, where it may run on one of several streams: that stream
            is then the current one, and waits for what it has to.
    """

    action: Action
    run: Callable[[], None]
    waits: bool = False
    enter: Enter | None = None
