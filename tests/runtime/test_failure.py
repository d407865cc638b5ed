"""The error store: what is written to it is read over a second connection, one for each store."""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from penstock import _torch_compat
from penstock.cause import EARLY, FailureLog, as_error, cause_of, key_of
from penstock.errors import PartitionError, StageError
from penstock.partition.forward.leaf_modules import NotByModule
from penstock.runtime import failure
from penstock.runtime.comm.nccl import NcclTransport
from penstock.runtime.failure import ErrorStore, Watchdog


def test_one_second_connection_per_store_and_no_longer_than_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores: list[Any] = [dist.TCPStore("127.0.0.1", 0, 1, True)]
    group: Any = SimpleNamespace(group_name="0", size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(failure, "store_of", lambda group: stores[0])
    monkeypatch.setattr(failure, "record_of", lambda group: failure.GroupRecord())
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    errors = ErrorStore(group, 0)
    aside, other = (ErrorStore(group, number) for number in (0, 1))
    assert errors._store is aside._store is other._store
    assert aside._store is not stores[0]
    cause = cause_of(StageError("it burst"), 1, (0, 1))
    assert (aside.read(0.0), errors.write(cause)) == (None, cause)
    found = aside.read(0.0)
    assert found == ("0", cause)
    # Of another schedule, read after a while only.
    assert other.read(0.0) is None
    assert other.read() is not None
    # A process that joins a second job must not find the first one's keys in a server kept alive.
    alive = weakref.ref(stores[0])
    stores.clear()
    del errors
    assert alive() is None


def test_the_first_cause_of_each_call_stands_and_notes_can_be_withdrawn() -> None:
    store, first = dist.HashStore(), cause_of(StageError("first"), 0, (0, 1))
    log, reader = FailureLog(store, "a"), FailureLog(store, "a")
    assert log.append("0", first) == first
    second = cause_of(StageError("second"), 1, (0, 1))
    assert log.append("0", second) == first
    early = f"{EARLY}/1"
    assert log.append(early, second) == second
    assert reader.read() == [("0", first), (early, second)]
    log.withdraw(early)
    assert reader.read() == [("0", first)]
    log.append(early, second)
    assert [call for call, _ in reader.read()] == ["0", early]


def test_groups_of_thousands_of_processes_have_keys_that_a_store_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server of torch's breaks the connection over which a key of more than 8 KiB comes."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.processes)
    store: Any = dist.TCPStore("127.0.0.1", 0, 1, True)
    every, others = (
        SimpleNamespace(group_name="0", processes=list(range(first, first + 4096)))
        for first in (0, 1)
    )
    for group in every, others:
        store.set(key_of(group, "0"), repr(group.processes))  # type: ignore[arg-type]
    assert store.get(key_of(every, "0")) == repr(every.processes).encode()  # type: ignore[arg-type]

    transport: Any = object.__new__(NcclTransport)
    transport._group, transport._processes, transport.schedule_index = every, every.processes, 0
    transport._watchdog = Watchdog(1.0, lambda peer: None)
    monkeypatch.setattr(_torch_compat, "make_group", lambda *told, **_: store.set(told[2], "here"))
    transport._new_group("up")


class Untellable(Exception):
    """An error that can't say what it is."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class Falsy(Exception):
    """An exception that is no cause, to who asks carelessly."""

    def __len__(self) -> int:
        return 0


def test_any_exception_can_be_reported() -> None:
    told = cause_of(Untellable(), 1, (0, 1))
    assert told.kind == "Untellable"
    assert told.message.endswith("Untellable, whose __str__ raised KeyboardInterrupt")

    # More than 8 MiB would break the connection to the store.
    long = cause_of(ValueError("a" + "\0" * 20_000_000 + "b"), 1, (0, 1))
    assert len(json.dumps(asdict(long))) < 2 << 20
    assert long.message.startswith("ValueError: a") and long.message.endswith("b")
    assert "characters left out" in long.message and "ValueError" in long.traceback

    # As ``raise error from error`` leaves it.
    own = ValueError("its own cause")
    own.__cause__ = own
    assert cause_of(own, 1, (0, 1)).message == "ValueError: its own cause"

    error = StageError("outer")
    error.__cause__ = Falsy("inner")
    assert "Falsy: inner" in cause_of(error, 1, (0, 1)).traceback


@pytest.mark.parametrize("kind", [PartitionError, NotByModule])
def test_a_kind_of_error_is_the_same_on_every_rank(kind: type[PartitionError]) -> None:
    """Also one of a class of its own, which is for the library alone to tell apart."""
    raised = as_error(cause_of(kind("it can't be cut"), 0, (0, 1)), (0, 1))
    assert type(raised) is PartitionError
    assert "rank 0: it can't be cut" in str(raised)
