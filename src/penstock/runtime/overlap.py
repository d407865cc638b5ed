"""Run overlapped pairs of a forward and a backward by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch

from penstock._torch_compat import autocast_state
from penstock.errors import StageError
from penstock.runtime.executor import BoundAction
from penstock.schedule.action import Action, Step
from penstock.stage import device_streams
from penstock.stage.device_streams import Stream

__all__ = ["PairFunction", "bind_pair"]

PairFunction: TypeAlias = Callable[..., Any]
"""``function(pair, forward, backward)``: the step, and a callable for each of its parts."""


def bind_pair(
    function: PairFunction, pair: Step, bound: Sequence[Sequence[BoundAction]], device: torch.device
) -> list[BoundAction]:
    """Bind a pair to a function that runs its parts, perhaps in threads of its own.

    Returns the waits of both parts, and per part a check that it has run, which re-raises the
    part's exception at the part's own place. The first check also calls the function.
    """
    streams = device_streams.streams_of(device)
    waits = [action for actions in bound for action in actions[:-1]]
    parts = [actions[-1] for actions in bound]
    begun: set[Action] = set()
    ended: dict[Action, BaseException | None] = {}  # with the exception of each part
    between: dict[Action, list[Any]] = {part.action: [] for part in parts}  # begin and end

    def now() -> Any:
        if streams is None:
            return perf_counter()
        event = streams.event(timed=True)
        streams.mark(event, streams.current())
        return event

    def run(part: BoundAction, stream: Stream, casts: Sequence[tuple[str, torch.dtype]]) -> None:
        if part.action in begun:
            raise StageError(
                f"the custom function has called {part.action} twice; it calls each part once"
            )
        begun.add(part.action)
        try:
            # A thread begins on the device's default stream, and without autocast.
            if streams is not None:
                streams.switch(stream)
            with ExitStack() as stack:
                for kind, dtype in casts:
                    stack.enter_context(torch.autocast(kind, dtype))
                begin = now()
                part.run()
                between[part.action][:] = begin, now()
        except BaseException as error:
            ended[part.action] = error
            raise
        ended[part.action] = None

    def call() -> None:
        stream = None if streams is None else streams.current()
        casts = autocast_state(device)
        begun.clear()
        ended.clear()
        try:
            function(pair, *(partial(run, part, stream, casts) for part in parts))
        except Exception:
            # The exception of a part is the cause, and is raised in its own place.
            if all(error is None for error in ended.values()):
                raise
        finish(parts[0].action)

    def finish(action: Action) -> None:
        if (error := ended.get(action)) is not None:
            ended.clear()
            raise error
        if action not in ended and all(error is None for error in ended.values()):
            raise StageError(
                "the custom function has returned without calling it; it calls each part once, and "
                "joins the threads that it has started"
            )

    first, second = (part.action for part in parts)
    return [
        *waits,
        BoundAction(first, call, between=between[first]),
        BoundAction(second, partial(finish, second), between=between[second]),
    ]
