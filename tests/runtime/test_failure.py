"""The board's places: what is written to them is read over a second connection, of which one is."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from penstock.cause import cause_of
from penstock.errors import StageError
from penstock.runtime.failure import Place


def test_one_second_connection_per_store_and_no_longer_than_it() -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, 1, True)
    place = Place(store=store, key="a")
    aside, other = place.aside(), replace(place, key="b").aside()
    assert aside.store is other.store
    assert aside.store is not store
    cause = cause_of(StageError("it burst"), 1, (0, 1))
    assert (aside.read(), place.write(cause)) == (b"", cause)
    assert aside.read() == cause.to_json().encode()
    assert other.read() == b""
    # A process that joins a second job must not find the first one's keys in a server kept alive.
    alive = weakref.ref(store)
    del store, place
    assert alive() is None
