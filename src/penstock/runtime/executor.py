"""One loop over bound calls: it knows no schedule, no stage and no message."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from penstock.runtime.call import Call
from penstock.runtime.torch_private import profiler_is_on

__all__ = ["Executor"]


class Executor:
    """Runs calls in order and notes when each began and ended.

    Args:
        calls: what to run; each is bound once, and run at every step.

    Attributes:
        marks: the clock before the first call and after each one (``time.perf_counter``, s).
        events: on CUDA, the same as recorded events, where ``record_events`` is set.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self._runs = [call.run for call in calls]
        self.marks: list[float] = []
        self.events: list[torch.cuda.Event] = []
        self.record_events = False

    def run(self) -> None:
        """Run all calls. When one raises, ``failed`` is that call."""
        if self.record_events or profiler_is_on():
            self._run_observed()
            return
        clock = perf_counter
        marks = self.marks = [clock()]
        note = marks.append
        for run in self._runs:
            run()
            note(clock())

    @property
    def failed(self) -> Call | None:
        """The call that the last run did not finish."""
        done = len(self.marks) - 1
        return self.calls[done] if 0 <= done < len(self.calls) else None

    def _run_observed(self) -> None:
        self.marks = [perf_counter()]
        self.events = [self._event()] if self.record_events else []
        for call in self.calls:
            with torch.profiler.record_function(
                f"penstock.{'wait ' if call.waits else ''}{call.action}"
            ):
                call.run()
            self.marks.append(perf_counter())
            if self.record_events:
                self.events.append(self._event())

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
