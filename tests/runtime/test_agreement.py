"""What ranks tell each other before the first step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.runtime.comm.agreement import check_consistent


class Recorder:
    """Stands for a rank beside another one that says the same, unless it is told what else."""

    rank = 0

    def __init__(self, theirs: dict[bytes, bytes]) -> None:
        self.theirs = theirs
        self.notes: list[bytes] = []

    def all_gather_bytes(self, note: bytes) -> list[bytes]:
        self.notes.append(note)
        return [note, self.theirs.get(note, note)]


def test_facts_go_out_in_full_only_where_they_differ() -> None:
    what = "what stages share"
    alike: Any = Recorder({})
    check_consistent({what: "weight " * 10_000}, [alike], {})
    assert sum(map(len, alike.notes)) < 100

    briefs = []
    for each in "one", "two":
        alike = Recorder({})
        check_consistent({what: each}, [alike], {})
        briefs += alike.notes
    full = [json.dumps([{what: each}] * 2).encode() for each in ("one", "two")]
    unlike: Any = Recorder(dict([briefs, full]))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="rank 0: one, rank 1: two"):
        check_consistent({what: "one"}, [unlike], {})
