"""A stand-in for a device's streams, which checks that every use of memory is ordered.

    write on a ─ event ─ wait on b ─ read on b        right
    write on a ────────────────────── read on b       Unordered: nothing makes b wait for a

Operations run on the CPU, at once and in the order of the host; what is recorded is what a device
with streams would be told. Each stream has a clock, each event is a copy of its stream's vector of
clocks, and a wait merges the event's into the stream's. Every operation of torch, those of
backwards among them, is seen by a dispatch mode: what it reads must have been written before it,
and what it writes must have been written and read before it, by those clocks. Memory that is
dropped goes back to the stream on which it was made, as in torch's allocator: what that stream does
next must come after all other streams' uses.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.stage import device_streams

__all__ = ["FakeEvent", "FakeStream", "Recorder", "UnorderedError", "recorded"]

HOST = -1
Clock = Counter[int]  # by the number of a stream


class UnorderedError(AssertionError):
    """Two uses of the same memory are in no order on the device."""


@dataclass(eq=False)
class FakeStream:
    """A stream: how far it is, and how far others were when it waited for them."""

    number: int
    clock: Clock = field(default_factory=Counter)

    def tick(self) -> int:
        """One more operation; returns its number on this stream."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def is_after(self, number: int, tick: int) -> bool:
        """Whether what it does next comes after an operation of stream ``number``."""
        return self.clock[number] >= tick


@dataclass(eq=False)
class FakeEvent:
    """What its stream was given until it was marked."""

    clock: Clock = field(default_factory=Counter)
    at: float = 0.0


@dataclass
class _Memory:
    """The uses of one storage."""

    home: int
    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)

    def uses(self) -> Iterator[tuple[int, int, str]]:
        if self.write is not None:
            yield self.write
        for number, (tick, what) in self.reads.items():
            yield number, tick, what


class Recorder(TorchDispatchMode):
    """Fake streams, and the checks. Active as a context, in which all operations are recorded.

    Attributes:
        ran: how many operations each stream was given.
        waits: how often a stream was told to wait.
        syncs: how often the host asked for a value, which on a device it would wait for.
        met: how many operations may run beside one of another stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._streams: list[FakeStream] = []
        self._now = self.new()
        self._memory: dict[int, _Memory] = {}
        self._dropped: list[_Memory] = []
        self.ran: Counter[int] = Counter()
        self.waits = 0
        self.syncs = 0
        self.met = 0
        self._last: dict[int, int] = {}

    # --- what penstock.stage.device_streams offers ---------------------------------------------

    def current(self) -> FakeStream:
        return self._now

    def new(self) -> FakeStream:
        stream = FakeStream(len(self._streams))
        self._streams.append(stream)
        return stream

    def switch(self, stream: FakeStream) -> None:
        self._now = stream

    def event(self, *, timed: bool = False) -> FakeEvent:
        return FakeEvent()

    def mark(self, event: FakeEvent, stream: FakeStream) -> None:
        event.clock = Counter(stream.clock)
        event.at = time.perf_counter()

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self.waits += 1
        stream.clock |= event.clock

    def follow(self, stream: FakeStream, other: FakeStream) -> None:
        event = self.event()
        self.mark(event, other)
        self.wait(stream, event)

    def pinned(self, num_bytes: int) -> Tensor:
        host = torch.empty(num_bytes, dtype=torch.uint8)
        self._of(host).home = HOST  # whose allocator waits for copies by itself
        return host

    def elapsed_s(self, first: FakeEvent, second: FakeEvent) -> float:
        self.syncs += 1
        return second.at - first.at

    def host_time_of(self, event: FakeEvent) -> float:
        self.syncs += 1
        return event.at

    # --- the checks ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        before = {id(t): t._version for t in given}
        known = {t.untyped_storage()._cdata for t in given}
        written = _written(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        stream, what = self._now, str(func)
        if _is_view(func) or func in _ABOUT_TENSORS:
            return result
        self.syncs += func in _SYNCHRONIZING
        made = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        changed = [t for t in given if t._version != before[id(t)] or id(t) in written]
        self._check_reuse(stream, what)
        tick = stream.tick()
        self.ran[stream.number] += 1
        self._note_meetings(stream)
        for tensor in given:
            if all(tensor is not other for other in changed):
                self._read(tensor, stream, tick, what)
        for tensor in changed:
            self._write(tensor, stream, tick, what)
        for tensor in made:
            memory = self._of(tensor)
            memory.home = stream.number
            self._write(tensor, stream, tick, what)
        return result

    def _note_meetings(self, stream: FakeStream) -> None:
        for number, tick in self._last.items():
            if number != stream.number and not stream.is_after(number, tick):
                self.met += 1
        self._last[stream.number] = stream.clock[stream.number]

    def _read(self, tensor: Tensor, stream: FakeStream, tick: int, what: str) -> None:
        memory = self._of(tensor)
        if memory.write is not None:
            self._demand(stream, memory.write, f"{what} reads {tuple(tensor.shape)}")
        memory.reads[stream.number] = (tick, what)

    def _write(self, tensor: Tensor, stream: FakeStream, tick: int, what: str) -> None:
        memory = self._of(tensor)
        for use in memory.uses():
            self._demand(stream, use, f"{what} writes {tuple(tensor.shape)}")
        memory.write, memory.reads = (stream.number, tick, what), {}

    def _check_reuse(self, stream: FakeStream, what: str) -> None:
        """What was dropped is the stream's again: may it write there?"""
        mine = [m for m in self._dropped if m.home == stream.number]
        self._dropped = [m for m in self._dropped if m.home != stream.number]
        for memory in mine:
            for use in memory.uses():
                self._demand(stream, use, f"{what} may be given dropped memory")

    def _demand(self, stream: FakeStream, use: tuple[int, int, str], what: str) -> None:
        number, tick, before = use
        if not stream.is_after(number, tick):
            raise UnorderedError(
                f"stream {stream.number}: {what}, which stream {number} uses in {before}, and "
                "waits for nothing that comes after that"
            )

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            # What was there before is the caller's: of the stream that was current at first.
            self._memory[key] = memory = _Memory(home=0)
            weakref.finalize(storage, self._forget, key, memory)
        return self._memory[key]

    def _forget(self, key: int, memory: _Memory) -> None:
        self._memory.pop(key, None)
        self._dropped.append(memory)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The ids of the tensors that an operation says it writes into, beside its result."""
    named = {each.name: each for each in func._schema.arguments}
    pairs = [*zip(named.values(), args, strict=False), *((named[n], v) for n, v in kwargs.items())]
    return {
        id(tensor)
        for argument, value in pairs
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    }


# They change what a tensor is, and touch no memory.
_ABOUT_TENSORS = {
    torch.ops.aten.set_.source_Storage_storage_offset,
    torch.ops.aten.set_.source_Storage,
}

_SYNCHRONIZING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """All that is made and run in this is on fake streams, and checked."""
    recorder = Recorder()
    with patch.context() as within:
        within.setattr(device_streams, "streams_of", lambda device: recorder)
        with recorder:
            yield recorder
