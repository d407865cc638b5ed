"""How much a search may do: counted in work, so that it chooses alike on any machine.

A limit in seconds is turned into a number of actions to be placed, at a rate that a slow machine
keeps. The clock is asked too, but ends a search only where that rate is not kept; the search then
says that its result may differ from that of another run.
"""

from __future__ import annotations

import time

__all__ = ["Budget"]

# Placing an action takes 1 to 2.5 µs on the machine that this was written on.
ACTIONS_PER_S = 400_000
# A deterministic second of CP-SAT's takes 0.5 to 1.5 seconds there.
SOLVER_S_PER_S = 0.5


class Budget:
    """What is left of the work and of the time.

    Args:
        limit_s: the time limit in seconds.
        started: when it began to count, by ``time.monotonic``; now if None.

    Attributes:
        cut_short: whether the clock has ended anything.
    """

    def __init__(self, limit_s: float, *, started: float | None = None) -> None:
        self.limit_s = limit_s
        self.started = time.monotonic() if started is None else started
        self.cut_short = False

    @property
    def actions(self) -> int:
        """How many actions may be placed in all."""
        return int(self.limit_s * ACTIONS_PER_S)

    @property
    def solver_s(self) -> float:
        """CP-SAT's deterministic seconds that fit into the limit."""
        return self.limit_s * SOLVER_S_PER_S

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative behind it."""
        return self.limit_s - (time.monotonic() - self.started)

    def out_of_time(self, *, keep_s: float) -> bool:
        """Whether the clock has come to the limit, less what must be kept; noted if so.

        Args:
            keep_s: seconds that are needed afterwards.
        """
        if self.left_s <= keep_s:
            self.cut_short = True
            return True
        return False
