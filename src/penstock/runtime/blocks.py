"""A block played by a function of the user's, which calls its parts as it likes.

    (0F3;1B2)   wait F, wait B, function(block, forward, backward), what became of F, and of B
                                         └ in threads of their own, for instance

The calls after the function's see to it that each part has run, and raise what it has raised, at
its own place. This module knows neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from penstock.errors import StageError
from penstock.runtime.call import Call
from penstock.schedule.action import Action, Step

__all__ = ["BlockFunction", "played_by"]

BlockFunction: TypeAlias = Callable[..., Any]
"""``function(block, forward, backward)``: the step, and a callable for each of its parts."""


def played_by(function: BlockFunction, block: Step, bound: Sequence[Sequence[Call]]) -> list[Call]:
    """The calls that play a block by ``function``.

    Args:
        function: what plays it.
        block: the step.
        bound: for each part its calls: waits for messages, and the part itself.
    """
    parts = [_Part(calls[-1]) for calls in bound]
    waits = [call for calls in bound for call in calls[:-1]]
    first, *others = (Call(part.action, part.finish) for part in parts)
    play = Call(first.action, partial(_play, function, block, parts))
    return [*waits, play, first, *others]


class _Part:
    """One part of a block: called once, in whichever thread."""

    def __init__(self, call: Call) -> None:
        self.action: Action = call.action
        self._run = call.run
        self.begin()

    def begin(self) -> None:
        """A step begins: it has not run."""
        self._has_begun = self._is_done = False
        self.error: BaseException | None = None

    def __call__(self) -> None:
        if self._has_begun:
            raise StageError(
                f"the function that plays blocks has called {self.action} twice; it calls each "
                "part once"
            )
        self._has_begun = True
        try:
            self._run()
        except BaseException as error:
            self.error = error
            raise
        self._is_done = True

    def finish(self) -> None:
        """The function has returned: what became of the part?"""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not self._is_done:
            how = "while it was still running" if self._has_begun else "without calling it"
            raise StageError(
                f"the function that plays blocks has returned {how}; it calls each part once, and "
                "joins the threads that it has started"
            )


def _play(function: BlockFunction, block: Step, parts: Sequence[_Part]) -> None:
    for part in parts:
        part.begin()
    try:
        function(block, *parts)
    except Exception:
        # What a part has raised is the cause, and is raised at its place.
        if all(part.error is None for part in parts):
            raise
