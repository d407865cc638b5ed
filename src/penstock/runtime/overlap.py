"""Run overlapped pairs of a forward and a backward by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from penstock.errors import StageError
from penstock.runtime.executor import BoundAction
from penstock.schedule.action import Step

__all__ = ["PairFunction", "bind_pair"]

PairFunction: TypeAlias = Callable[..., Any]
"""``function(pair, forward, backward)``: the step, and a callable for each of its parts."""


def bind_pair(
    function: PairFunction, pair: Step, bound: Sequence[Sequence[BoundAction]]
) -> list[BoundAction]:
    """Bind a pair to a function that runs its parts, perhaps in threads of its own.

    Returns the waits of both parts, the call of the function, and per part a check that it has run,
    which re-raises the part's exception at the part's own place.
    """
    parts = [_Part(actions[-1]) for actions in bound]
    waits = [action for actions in bound for action in actions[:-1]]
    checks = [BoundAction(part.action, part.finish) for part in parts]
    return [*waits, BoundAction(checks[0].action, partial(_call, function, pair, parts)), *checks]


class _Part:
    """One part of a pair: called once per step, in any thread."""

    def __init__(self, bound: BoundAction) -> None:
        self.action, self._run = bound.action, bound.run
        self.begin()

    def begin(self) -> None:
        self._has_begun = self._is_done = False
        self.error: BaseException | None = None

    def __call__(self) -> None:
        if self._has_begun:
            raise StageError(
                f"the custom function has called {self.action} twice; it calls each part once"
            )
        self._has_begun = True
        try:
            self._run()
        except BaseException as error:
            self.error = error
            raise
        self._is_done = True

    def finish(self) -> None:
        error, self.error = self.error, None
        if error is None and not self._is_done:
            error = StageError(
                "the custom function has returned without calling it; it calls each part once, and "
                "joins the threads that it has started"
            )
        if error is not None:
            raise error


def _call(function: PairFunction, pair: Step, parts: Sequence[_Part]) -> None:
    for part in parts:
        part.begin()
    try:
        function(pair, *parts)
    except Exception:
        # The exception of a part is the cause, and is raised in its own place.
        if all(part.error is None for part in parts):
            raise
