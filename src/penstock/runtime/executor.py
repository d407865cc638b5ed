"""The loop over bound actions, independent of schedules, stages and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from penstock._torch_compat import profiler_is_on
from penstock.schedule.action import Action
from penstock.stage.device_streams import DeviceStreams, Event

__all__ = ["BoundAction", "Executor"]


@dataclass(frozen=True, slots=True)
class BoundAction:
    """An action, or the wait for its message, with its handler.

    Args:
        action: the action.
        run: the handler with its arguments.
        is_wait: True for the wait for a message, whose time counts as idle.
        prologue: with dual streams, switches to the action's stream and synchronizes it.
    """

    action: Action
    run: Callable[[], None]
    is_wait: bool = False
    prologue: Callable[[], None] | None = None


class Executor:
    """Runs bound actions in order and records the time of each.

    Args:
        actions: the actions of every step.
        streams: the device's streams, on which events are recorded.

    Attributes:
        marks: the clock before the first action and after each one (``time.perf_counter``, s).
        events: per action of the last step, the events before and after it.
    """

    def __init__(
        self, actions: Sequence[BoundAction], streams: DeviceStreams | None = None
    ) -> None:
        self.actions = tuple(actions)
        self._runs = [action.run for action in actions]
        self._streams = streams
        self.marks: list[float] = []
        self.events: list[tuple[Event, Event]] = []

    def run(self) -> None:
        """Run all actions. After an exception, ``failed`` is the action that raised it."""
        if self._streams is not None:
            self._run_on_device(self._streams)
        elif profiler_is_on():
            self._run_profiled()
        else:
            self._run()

    @property
    def failed(self) -> BoundAction | None:
        """The action that the last run did not finish."""
        done = len(self.marks) - 1
        return self.actions[done] if 0 <= done < len(self.actions) else None

    def _run(self) -> None:
        clock = perf_counter
        marks = self.marks = [clock()]
        mark = marks.append
        for run in self._runs:
            run()
            mark(clock())

    def _run_profiled(self) -> None:
        self.marks = [perf_counter()]
        for action in self.actions:
            with torch.profiler.record_function(_name(action)):
                action.run()
            self.marks.append(perf_counter())

    def _run_on_device(self, streams: DeviceStreams) -> None:
        if not self.events:
            self.events = [
                (streams.event(timed=True), streams.event(timed=True)) for _ in self.actions
            ]
        is_profiled = profiler_is_on()
        self.marks = [perf_counter()]
        for action, (begin, end) in zip(self.actions, self.events, strict=True):
            if action.prologue is not None:
                action.prologue()
            stream = streams.current()
            streams.mark(begin, stream)
            if is_profiled:
                with torch.profiler.record_function(_name(action)):
                    action.run()
            else:
                action.run()
            streams.mark(end, stream)
            self.marks.append(perf_counter())


def _name(bound: BoundAction) -> str:
    return f"penstock.{'wait ' if bound.is_wait else ''}{bound.action}"
