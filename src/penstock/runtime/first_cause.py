"""What a failed call ended by: found where ranks write it, and written there for the others.

    this rank fails by itself     its own error is the cause, unless another one came first
    its wait broke, or was vain   the cause of whom it waited for; with none, a PeerError says so

Raised is the first cause, on every rank alike. This module breaks no waits (``watcher.py``,
``breaking.py``), and does not know what was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.cause import Cause, as_error, cause_of
from penstock.errors import PeerError, PenstockError, Where
from penstock.runtime.comm.answer import Answer, poll
from penstock.runtime.failure import Board
from penstock.runtime.group_log import Calls
from penstock.runtime.watcher import Others, Wait, Watcher, Whom
from penstock.schedule.messages import runs_of

__all__ = ["FirstCause"]

T = TypeVar("T")

# How long the store may take, after a failure, to say who was first.
MAX_ANSWER_S = 10.0


class FirstCause:
    """Finds and tells the causes of one rank's failures.

    Args:
        board: where they are written.
        calls: this process's calls over the group.
        number: of the schedule.
        rank: this rank.
        processes: the numbers of the group's processes, by rank.
    """

    def __init__(
        self, board: Board, calls: Calls, number: int, rank: int, processes: tuple[int, ...]
    ) -> None:
        self.board = board
        self._calls = calls
        self._number = number
        self._rank = rank
        self._processes = processes
        # As the last good call has found it.
        self._num_failed = 0

    def note_success(self) -> None:
        """A call has ended well: connections that others may have broken are whole."""
        self._num_failed = len(self._calls.failed)

    def settle(
        self, error: BaseException, waited_for: Wait | None, watcher: Watcher
    ) -> PenstockError | None:
        """What this rank raises for ``error``, where that is not ``error`` itself.

        Args:
            error: what has ended the call here.
            waited_for: the wait that it has ended, if it has.
            watcher: who watched; stopped by now.
        """
        self.board.is_lost |= watcher.lost_the_store
        found = self._ask(self.board.read)
        if found is None and waited_for is not None and not watcher.timed_out:
            # A wait broke: its peer may have failed a moment before it could say so.
            pace_s = self.board.pace_s
            found = poll(
                lambda: self._ask(self.board.read) or self._elsewhere(),
                for_s=2.0 + 2 * pace_s,
                every_s=max(0.05, pace_s),
            )
        is_own = found is None
        if found is None:
            if waited_for is not None:
                error = self._broken_wait(error, waited_for[1], watcher)
            found = cause_of(error, self._rank, self._processes)
        # Also what was found: it may not have been told yet wherever this rank is heard.
        stands = self._tell(found) or found
        if not is_own or stands != found:
            return as_error(stands, self._processes)
        return error if isinstance(error, PeerError) else None

    def tell_of_end(self, error: BaseException) -> bool:
        """See ``last_words.py``; what has been told already is not told again."""
        if self._number not in self._calls.failed:
            self._tell(cause_of(error, self._rank, self._processes))
        return not self.board.is_lost

    def _tell(self, cause: Cause) -> Cause | None:
        """Write ``cause``; returns the one that stands, if the store says so."""
        self._calls.failed.add(self._number)
        return self._ask(lambda: self.board.write(cause))

    def _elsewhere(self) -> Cause | None:
        """What has failed in another call over the group, if this one has waited in vain for it."""
        found = self._ask(self.board.read_elsewhere)
        if found is None:
            return None
        place, cause = found
        self._calls.met.add(place)
        return cause

    def _ask(self, ask: Callable[[], T]) -> T | None:
        """What the store has to say; one that keeps silent is lost."""
        answer = Answer(ask)
        if answer.is_there(within_s=MAX_ANSWER_S):
            return answer.value
        self.board.is_lost = True
        return None

    def _absent(self) -> str | None:
        """The ranks that have not come, where some others have."""
        absent = self._ask(self.board.read_absent) or ()
        if not absent or 1 < len(absent) == len(self._processes) - 1:
            return None
        return f"rank{'s' if len(absent) > 1 else ''} {runs_of(absent)}"

    def _broken_wait(self, error: BaseException, whom: Whom, watcher: Watcher) -> PeerError:
        name = whom.value if isinstance(whom, Others) else f"rank {whom}"
        if watcher.timed_out:
            if whom is Others.RANKS:
                name = self._absent() or name
            others = "and no rank reports a failure"
            if self.board.is_lost:
                others = "nor does the store that joins the ranks answer"
            told = (
                f"no word from {name} within {watcher.timeout_s:g} s, {others}; pass a "
                "longer timeout_s if a step may take so long"
            )
        elif self.board.is_lost:
            told = "the store that joins the ranks is gone; the process that holds it (the group's "
            told += f"rank 0, most often) may have died. This rank was waiting for {name} ({error})"
        elif whom is Others.REPLICAS:
            told = f"reducing or gathering over {name} failed; one of them may have died ({error})"
        else:
            told = f"the connection to {name} broke; its process may have died"
            # Each schedule that has failed may leave connections broken.
            if len(self._calls.failed) > self._num_failed:
                told += ", or it broke when another schedule over this process group failed: then "
                told += "make stages over a new one (torch.distributed.new_group), on every rank"
            told += f" ({error})"
        raised = PeerError(told, where=Where(rank=self._rank))
        raised.__cause__ = error
        return raised
