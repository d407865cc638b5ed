"""How much slower this machine is, now, than the one for which bounds in seconds are meant."""

from __future__ import annotations

import time

__all__ = ["slowness"]

# What ``_work`` takes there: 30 ns for each turn of a loop in Python 3.11.
REFERENCE_S = 0.03


def slowness() -> float:
    """1, or on a slower machine, by what factor more processor time work takes here."""
    return max(1.0, min(_work() for _ in range(5)) / REFERENCE_S)


def _work() -> float:
    start, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - start
