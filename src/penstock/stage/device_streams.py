"""The streams of a device: the one place where they are made, ordered, and kept memory for.

    stream a   ── write x ──● mark            a's work up to here
                            │
    stream b   ─────────────▼ wait ── read x ──
                                 keep(x, b)   x's memory is not given out anew before b is done

The host waits in ``elapsed_s`` and ``host_time_of`` alone, which nothing calls within a step. All
of Penstock's own streams and events go through this module, so that tests can put a recording
stand-in here and check who waits for whom (``tests/streams.py``). It knows no stages.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["DeviceStreams", "Event", "Stream", "indexed", "streams_of"]

Stream: TypeAlias = Any
Event: TypeAlias = Any


class DeviceStreams(Protocol):
    """What a device with streams offers."""

    def current(self) -> Stream:
        """The stream on which the calling thread's operations run."""
        ...

    def new(self) -> Stream:
        """A stream beside all others."""
        ...

    def switch(self, stream: Stream) -> None:
        """Run the calling thread's operations on ``stream`` from now on."""
        ...

    def event(self, *, timed: bool = False) -> Event:
        """An event to be marked, as often as wanted."""
        ...

    def mark(self, event: Event, stream: Stream) -> None:
        """Have ``event`` stand for all that ``stream`` was given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what ``stream`` is given from now on wait for what ``event`` stands for."""
        ...

    def follow(self, stream: Stream, other: Stream) -> None:
        """Let what ``stream`` is given from now on wait for all that ``other`` was given."""
        ...

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Once ``tensor`` is dropped, don't reuse its memory before ``stream`` has used it."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host that streams copy to and from by themselves."""
        ...

    def is_over(self, event: Event) -> bool:
        """Whether what ``event`` stands for is done; the host does not wait for it."""
        ...

    def elapsed_s(self, first: Event, second: Event) -> float:
        """The time between two events that are over, in seconds."""
        ...

    def host_time_of(self, event: Event) -> float:
        """When a timed event came, by ``time.perf_counter``; waits for all that was asked for."""
        ...


class CudaStreams:
    """Those of one CUDA device.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def switch(self, stream: Stream) -> None:
        before = torch.cuda.current_device()
        torch.cuda.set_stream(stream)  # makes the stream's device the current one, too
        if before != self._device.index:
            torch.cuda.set_device(before)

    def event(self, *, timed: bool = False) -> Event:
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def mark(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def follow(self, stream: Stream, other: Stream) -> None:
        stream.wait_stream(other)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_over(self, event: Event) -> bool:
        return bool(event.query())

    def elapsed_s(self, first: Event, second: Event) -> float:
        second.synchronize()
        elapsed_ms: float = first.elapsed_time(second)
        return elapsed_ms / 1e3

    def host_time_of(self, event: Event) -> float:
        now = self.event(timed=True)
        torch.cuda.synchronize(self._device)
        self.mark(now, self.current())
        now.synchronize()
        return time.perf_counter() - self.elapsed_s(event, now)


def streams_of(device: torch.device) -> DeviceStreams | None:
    """The streams of a device; None where it has none.

    Example:
        >>> streams_of(torch.device("cpu")) is None
        True
    """
    return CudaStreams(device) if device.type == "cuda" else None


def indexed(device: torch.device) -> torch.device:
    """A device as its tensors name it: ``cuda`` is the current one of several.

    Example:
        >>> indexed(torch.device("cpu"))
        device(type='cpu')
    """
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
