"""Plays all ranks of a program against each other, and finds who is stuck.

There are no times here: a rank goes on until its next step waits for something that another rank
has not done, then another rank goes on. What can be reached does not depend on who goes first, so
one play decides whether a program ends. The checker, the order of one process and the placing of
transfers all stand on it; it judges nothing and changes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.schedule.coding import Coded, Tables

__all__ = ["Player", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """Steps that a rank took without a break: ``start`` up to, but without, ``stop``."""

    rank: int
    start: int
    stop: int


class Player:
    """A play of all ranks, which can be helped along where it is stuck.

    Args:
        coded: the program in integers.
        needs: by key, what must be done before an action (``Coding.needs``).

    Attributes:
        positions: for each rank the index of its next step.
        awaits: for each rank the code that it waits for, or None.
        runs: what was taken so far, in an order in which nothing waits.
    """

    __slots__ = (
        "_coded",
        "_done",
        "_gives",
        "_needs",
        "_ready",
        "_unfinished",
        "_waiting",
        "awaits",
        "positions",
        "runs",
    )

    def __init__(self, coded: Coded, needs: Tables) -> None:
        self._coded = coded
        self._needs = needs
        self._gives = coded.coding.gives()
        self._done = bytearray(coded.coding.size)
        self._waiting: dict[int, list[int]] = {}
        self._ready = deque(range(len(coded.queues)))
        self._unfinished = len(coded.queues)
        self.positions = [0] * len(coded.queues)
        self.awaits: list[int | None] = [None] * len(coded.queues)
        self.runs: list[Run] = []

    @property
    def ended(self) -> bool:
        """Whether every rank has taken all its steps."""
        return self._unfinished == 0

    def play(self) -> bool:
        """Let all ranks go on until each has ended or waits; whether all have ended."""
        while self._ready:
            rank = self._ready.popleft()
            start = self.positions[rank]
            self._advance(rank)
            if self.positions[rank] > start:
                self.runs.append(Run(rank, start, self.positions[rank]))
        return self.ended

    def do(self, code: int) -> None:
        """Take the action of ``code`` out of turn, and wake who waits for it."""
        for distance in self._gives[code // self._coded.coding.num_microbatches]:
            given = code + distance
            self._done[given] = 1
            if given in self._waiting:
                self._ready.extend(self._waiting.pop(given))

    def _advance(self, rank: int) -> None:
        # The one hot loop of checking and lowering: locals, integers, and no calls for a plain
        # action that is ready.
        done, waiting, ready = self._done, self._waiting, self._ready
        needs, gives, blocks = self._needs, self._gives, self._coded.blocks
        num_microbatches = self._coded.coding.num_microbatches
        queue = self._coded.queues[rank]
        index, stop = self.positions[rank], len(queue)
        missing: int | None = None
        while index < stop:
            code = queue[index]
            parts = (code,) if code >= 0 else blocks[~code]
            for part in parts:
                for distance in needs[part // num_microbatches]:
                    if not done[part + distance]:
                        missing = part + distance
                        break
                if missing is not None:
                    break
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            for part in parts:
                for distance in gives[part // num_microbatches]:
                    given = part + distance
                    done[given] = 1
                    if given in waiting:
                        ready.extend(waiting.pop(given))
            index += 1
        self.positions[rank] = index
        self._unfinished -= index == stop
        self.awaits[rank] = missing
