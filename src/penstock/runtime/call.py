"""Pieces of actions, bound to what they are carried out on: what the executor runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.schedule.action import Action

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """A bound piece of an action.

    Args:
        action: the action that it is a piece of.
        run: what to call.
        waits: whether it only waits for a message: such time is idle, not work.
    """

    action: Action
    run: Callable[[], None]
    waits: bool = False
