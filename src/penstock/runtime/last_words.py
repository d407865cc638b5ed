"""What ends this process outside of any step, told to the ranks that wait for it in one.

    rank 0   step ── optimizer ── step ── waits for rank 1 ──────┐
    rank 1   step ── optimizer raises, nobody catches it ── tells ┘

The others would learn of a broken connection alone. Only what nobody catches is told: the process
ends by it. This module knows neither schedules nor stores.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

__all__ = ["Teller", "tells_at_the_end"]


class Teller(Protocol):
    """Reaches other ranks."""

    def tell_of_end(self, error: BaseException) -> bool:
        """Tell that ``error`` ends this process; returns whether the others may be reached."""
        ...


_tellers: WeakSet[Teller] = WeakSet()
_is_set_up = False


def tells_at_the_end(teller: Teller) -> None:
    """From now on, and as long as it lives, ``teller`` is told what ends the process."""
    global _is_set_up
    _tellers.add(teller)
    if _is_set_up:
        return
    _is_set_up = True
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        # At a prompt, and with python -i, the process goes on.
        if not (hasattr(sys, "ps1") or sys.flags.interactive):
            _tell(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def _tell(error: BaseException) -> None:
    for teller in list(_tellers):
        try:
            if not teller.tell_of_end(error):
                return  # one that keeps silent would be asked in vain for each of them
        except Exception:  # the traceback shall be shown, whatever happens here
            return
