"""The streams and events of a device: created, ordered, and synchronized here alone.

    stream a   ── write x ──● mark            a's work up to here
                            │
    stream b   ─────────────▼ wait ── read x ──

Memory that is dropped serves its own stream again, so the host holds x until a waits for b.

The host waits only in ``elapsed_s`` and ``host_time_of``, which are not called within a step. All
streams and events go through this module, so that tests can record their order.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["DeviceStreams", "Event", "Stream", "indexed", "streams_of", "widest_float"]

Stream: TypeAlias = Any
Event: TypeAlias = Any


class DeviceStreams:
    """The streams of one CUDA device, given with its index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def switch(self, stream: Stream) -> None:
        """Make ``stream`` the calling thread's stream; the current device stays."""
        before = torch.cuda.current_device()
        torch.cuda.set_stream(stream)
        if before != self._device.index:
            torch.cuda.set_device(before)

    def event(self, *, timed: bool = False) -> Event:
        """A new event, which may be marked repeatedly."""
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def mark(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work on ``stream`` wait for ``event``."""
        stream.wait_event(event)

    def follow(self, stream: Stream, other: Stream) -> None:
        """Let later work on ``stream`` wait for all work so far on ``other``."""
        stream.wait_stream(other)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_over(self, event: Event) -> bool:
        """True if ``event`` has completed; does not block."""
        return bool(event.query())

    def elapsed_s(self, first: Event, second: Event) -> float:
        """The time between two timed events, in seconds; waits for the second."""
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def host_time_of(self, event: Event) -> float:
        """The ``time.perf_counter`` of a timed event; synchronizes the device."""
        now = self.event(timed=True)
        torch.cuda.synchronize(self._device)
        self.mark(now, self.current())
        now.synchronize()
        return time.perf_counter() - self.elapsed_s(event, now)


def streams_of(device: torch.device) -> DeviceStreams | None:
    """The streams of a device; None if it has none."""
    return DeviceStreams(device) if device.type == "cuda" else None


def widest_float(device: torch.device) -> torch.dtype:
    """The floating-point dtype with the most digits; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def indexed(device: torch.device) -> torch.device:
    """A device with its index: ``cuda`` is the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
