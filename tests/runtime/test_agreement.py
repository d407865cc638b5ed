"""What ranks tell each other before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.runtime.comm.agreement import check_consistent


class Recorder:
    """A rank beside another one that sends the same bytes, unless ``theirs`` replaces them."""

    rank = 0

    def __init__(self, theirs: bytes | None = None) -> None:
        self.theirs = theirs
        self.sent = b""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent = data
        return [data, data if self.theirs is None else self.theirs]


def test_long_facts_are_compared_by_digest() -> None:
    what, long = "what stages share", "weight " * 10_000
    alike: Any = Recorder()
    check_consistent({what: long}, alike, {})
    assert len(alike.sent) < 400
    unlike: Any = Recorder(alike.sent)
    with pytest.raises(ScheduleError, match="do not agree on what stages share"):
        check_consistent({what: f"{long}bias"}, unlike, {})


def test_the_error_shows_each_ranks_value() -> None:
    other: Any = Recorder()
    check_consistent({"the program": "two"}, other, {})
    unlike: Any = Recorder(other.sent)
    with pytest.raises(ScheduleError, match="rank 0: one, rank 1: two"):
        check_consistent({"the program": "one"}, unlike, {})
