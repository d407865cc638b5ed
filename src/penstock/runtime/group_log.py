"""What befalls a process group beside any one schedule: for ranks that are in different calls.

    rank 0   step() of schedule 0 ── waits ─┐   each is its rank's 7th call over the group, and
    rank 1   eval() of schedule 1 ── waits ─┘   they differ: none will ever come to the other's

A schedule's failure is written to its own place (``failure.py``), where ranks that are in a step of
another one would not look: here all of them are listed. Where nobody has failed, but ranks wait in
calls that differ, whoever notices lists that as a failure. This module breaks no waits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from penstock.cause import Cause
from penstock.compat.announcing import key_of

__all__ = ["NOBODY", "Calls", "GroupLog", "calls_over"]

# In place of the number of a schedule: a failure that is no schedule's. Smaller numbers are those
# of calls that belong to none.
NOBODY = -1


@dataclass(slots=True)
class Calls:
    """This process's calls over one group. Every rank makes them in the same order.

    Args:
        count: how many so far.
        what: the last one.
        meetings: how often this process has waited for all ranks; each does so in the same order.
        failed: the numbers of the schedules that have failed here.
        met: the listed failures that a call here has ended by, by their places in the list.
    """

    count: int = 0
    what: str = ""
    meetings: int = 0
    failed: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)

    def begin(self, what: str) -> None:
        """Another call begins."""
        self.what = what
        self.count += 1


_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_over(group: dist.ProcessGroup) -> Calls:
    """This process's calls over ``group``."""
    return _calls.setdefault(group, Calls())


class GroupLog:
    """The failures over a group, and the call that its ranks wait in, as its store has them.

    Args:
        store: where it is kept.
        group: the group.
        number: of the schedule whose failures are listed by ``add``; of those listed by others,
            what this process has met is left out.
    """

    def __init__(self, store: Any, group: dist.ProcessGroup, number: int) -> None:
        self._store = store
        self._rank = group.rank()
        self._processes = tuple(dist.get_process_group_ranks(group))
        self._count_key, self._call_key = key_of(group, "failed"), key_of(group, "call")
        self._number = number
        self._calls = calls_over(group)
        self._listed: dict[int, tuple[int, Cause]] = {}
        # Until which meeting this rank is known to have come.
        self._came = 0

    def aside(self, store: Any) -> GroupLog:
        """The same over another connection to its store."""
        other: GroupLog = object.__new__(GroupLog)
        vars(other).update(vars(self), _store=store, _listed={})
        return other

    def add(self, cause: Cause, number: int | None = None) -> None:
        """List a failure: this log's schedule's, or that of another number."""
        number = self._number if number is None else number
        place = self._store.add(self._count_key, 1)
        self._store.set(f"{self._count_key}/{place}", json.dumps([number, cause.to_json()]))

    def elsewhere(self) -> tuple[int, Cause] | None:
        """The first failure that this process has not met, and its place in the list."""
        for place in range(1, self._store.add(self._count_key, 0) + 1):
            key = f"{self._count_key}/{place}"
            if place not in self._listed and self._store.check([key]):
                number, text = json.loads(self._store.get(key))
                self._listed[place] = number, Cause.from_json(text)
            number, cause = self._listed.get(place, (self._number, None))
            is_own = number == self._number or number in self._calls.failed
            if cause is not None and not is_own and place not in self._calls.met:
                return place, cause
        return None

    def absent(self) -> list[int]:
        """The ranks that have not come to the meeting that this one waits in, as far as is known:
        who has come may have told so (see ``compare``) a while later, or not yet."""
        return [
            rank
            for rank in range(len(self._processes))
            if rank != self._rank and self._meetings_of(rank) < self._calls.meetings
        ]

    def _meetings_of(self, rank: int) -> int:
        key = f"{self._call_key}/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def compare(self) -> None:
        """Tell that this rank waits; list a failure if another one waits in a call that is as many
        as this one's and differs. After a failure counts may differ: nothing is told then."""
        count, what = self._calls.count, self._calls.what
        if self._calls.failed or self._calls.met:
            return
        if self._came != self._calls.meetings:
            self._came = self._calls.meetings
            self._store.set(f"{self._call_key}/{self._rank}", str(self._came))
        mine = json.dumps([count, what, self._rank])
        told = bytes(self._store.compare_set(self._call_key, "", mine))
        theirs, their_what, rank = json.loads(told)
        if theirs < count:
            self._store.compare_set(self._call_key, told.decode(), mine)
        elif theirs == count and their_what != what:
            (low, at_low), (high, at_high) = sorted([(rank, their_what), (self._rank, what)])
            told_of = f"rank {low} waits in {at_low}, and rank {high} in {at_high}"
            cause = Cause(
                kind="ScheduleError",
                message=f"{told_of}: call them in the same order on every rank",
                rank=low,
                processes=self._processes,
                stage=None,
                microbatch=None,
                action=None,
                traceback="",
            )
            self.add(cause, NOBODY)
