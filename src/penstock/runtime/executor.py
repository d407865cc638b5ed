"""One loop over bound calls: it knows no schedule, no stage and no message."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from penstock._torch_compat import profiler_is_on
from penstock.runtime.call import Call
from penstock.stage.device_streams import DeviceStreams, Event

__all__ = ["Executor"]


class Executor:
    """Runs calls in order and notes when each began and ended.

    Args:
        calls: what to run; each is bound once, and run at every step.
        streams: those of the device, where it runs by itself what it is asked for: then events
            are noted as well.

    Attributes:
        marks: the clock before the first call and after each one (``time.perf_counter``, s).
        events: per call, marked on its stream before and after it; anew at every step.
    """

    def __init__(self, calls: Sequence[Call], streams: DeviceStreams | None = None) -> None:
        self.calls = tuple(calls)
        self._runs = [call.run for call in calls]
        self._streams = streams
        self.marks: list[float] = []
        self.events: list[tuple[Event, Event]] = []

    def run(self) -> None:
        """Run all calls. When one raises, ``failed`` is that call."""
        if self._streams is not None:
            self._run_on_device(self._streams)
        elif profiler_is_on():
            self._run_observed()
        else:
            self._run()

    @property
    def failed(self) -> Call | None:
        """The call that the last run did not finish."""
        done = len(self.marks) - 1
        return self.calls[done] if 0 <= done < len(self.calls) else None

    def _run(self) -> None:
        clock = perf_counter
        marks = self.marks = [clock()]
        note = marks.append
        for run in self._runs:
            run()
            note(clock())

    def _run_observed(self) -> None:
        self.marks = [perf_counter()]
        for call in self.calls:
            with torch.profiler.record_function(_name(call)):
                call.run()
            self.marks.append(perf_counter())

    def _run_on_device(self, streams: DeviceStreams) -> None:
        if not self.events:
            self.events = [
                (streams.event(timed=True), streams.event(timed=True)) for _ in self.calls
            ]
        is_observed = profiler_is_on()
        self.marks = [perf_counter()]
        for call, (begin, end) in zip(self.calls, self.events, strict=True):
            if call.enter is not None:
                call.enter()
            stream = streams.current()
            streams.mark(begin, stream)
            if is_observed:
                with torch.profiler.record_function(_name(call)):
                    call.run()
            else:
                call.run()
            streams.mark(end, stream)
            self.marks.append(perf_counter())


def _name(call: Call) -> str:
    return f"penstock.{'wait ' if call.waits else ''}{call.action}"
