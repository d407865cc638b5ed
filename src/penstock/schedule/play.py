"""Plays all ranks of a program against each other, and finds who is stuck.

There are no times here: a rank goes on until its next step waits for something that another rank
has not done, then another rank goes on. What can be reached does not depend on who goes first, so
one play decides whether a program ends. The checker, the order of one process and the placing of
transfers all stand on it; it judges nothing and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from penstock.schedule.coding import Coded, Distances

__all__ = ["ProgramPlayer"]


class ProgramPlayer:
    """A play of all ranks, which can be helped along where it is stuck.

    Args:
        coded: the program in integers.
        needs: by key, what must be done before an action (``Coding.needs``). What the pieces of
            a sequence need of each other is added here.
        more: by code, the codes that must be done beside that.

    Attributes:
        positions: for each rank the index of its next step.
        awaits: for each rank the code that it waits for, or None.
        runs: steps taken without a break, as (rank, start, stop without stop itself), in an order
            in which nothing waits.
    """

    __slots__ = (
        "_coded",
        "_done",
        "_gives",
        "_needs",
        "_ready",
        "_unfinished",
        "_waiting",
        "_width",
        "awaits",
        "positions",
        "runs",
    )

    def __init__(
        self, coded: Coded, needs: Distances, more: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        num_ranks = len(coded.queues)
        self._coded = coded
        self._needs = needs
        self._gives = coded.coding.gives()
        # Codes with one key: all microbatches, unless what they wait for differs.
        self._width = coded.coding.num_microbatches
        in_sequence = coded.coding.needs_in_sequence()
        if more or in_sequence:
            self._needs = [row for row in needs for _ in range(self._width)]
            self._gives = [row for row in self._gives for _ in range(self._width)]
            self._width = 1
            for code, awaited in (more or {}).items():
                self._needs[code] += tuple(other - code for other in awaited)
            for code, other in in_sequence.items():
                self._needs[code] += (other - code,)
        self._done = bytearray(coded.coding.size)
        self._waiting: dict[int, list[int]] = {}
        self._ready = deque(range(num_ranks))
        self._unfinished = num_ranks
        self.positions = [0] * num_ranks
        self.awaits: list[int | None] = [None] * num_ranks
        self.runs: list[tuple[int, int, int]] = []

    def play(self) -> bool:
        """Let all ranks go on until each has ended or waits; whether all have ended."""
        # The one hot loop of checking and lowering: locals, integers, and no calls for an action
        # that is ready.
        done, waiting, ready = self._done, self._waiting, self._ready
        needs, gives, blocks = self._needs, self._gives, self._coded.blocks
        width = self._width
        while ready:
            rank = ready.popleft()
            queue = self._coded.queues[rank]
            start = index = self.positions[rank]
            stop = len(queue)
            missing: int | None = None
            while index < stop:
                code = queue[index]
                if code >= 0:
                    key = code // width
                    for distance in needs[key]:
                        if not done[code + distance]:
                            missing = code + distance
                            break
                    else:
                        for distance in gives[key]:
                            given = code + distance
                            done[given] = 1
                            if given in waiting:
                                ready.extend(waiting.pop(given))
                        index += 1
                        continue
                    break
                missing = self._first_lacking(blocks[~code])
                if missing is not None:
                    break
                for part in blocks[~code]:
                    self.do(part)
                index += 1
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
            if index > start:
                self.runs.append((rank, start, index))
            self.positions[rank] = index
            self.awaits[rank] = missing
            self._unfinished -= missing is None
        return self._unfinished == 0

    def do(self, code: int) -> None:
        """Take the action of ``code``, in its turn or out of it, and wake who waits for it."""
        for distance in self._gives[code // self._width]:
            given = code + distance
            self._done[given] = 1
            if given in self._waiting:
                self._ready.extend(self._waiting.pop(given))

    def lacking(self, rank: int) -> list[int]:
        """All that a rank's next step waits for."""
        queue = self._coded.queues[rank]
        if self.positions[rank] == len(queue):
            return []
        return [
            code + distance
            for code in self._coded.parts(queue[self.positions[rank]])
            for distance in self._needs[code // self._width]
            if not self._done[code + distance]
        ]

    def _first_lacking(self, block: tuple[int, ...]) -> int | None:
        """What a block waits for: its parts may run side by side, so none gives to another."""
        for code in block:
            for distance in self._needs[code // self._width]:
                if not self._done[code + distance]:
                    return code + distance
        return None
