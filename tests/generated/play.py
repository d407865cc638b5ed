"""Make a script's moves with the plain model and with a pipeline, and compare after each."""

from __future__ import annotations

import traceback

from penstock.errors import PenstockError
from tests.compare import assert_same
from tests.generated.case import Case
from tests.generated.piped import Piped, Place
from tests.generated.plain import Plain

__all__ = ["Unplayable", "play"]


class Unplayable(Exception):
    """The plain model itself can't do what the script says."""


def play(case: Case, place: Place | None = None, num_replicas: int = 1) -> str:
    """What was wrong; empty if nothing was.

    Args:
        case: the script.
        place: where this process stands; None where one plays all ranks.
        num_replicas: how many replicas of the pipeline there are.

    Raises:
        Unplayable: the plain model failed.
    """
    plain = Plain(case, num_replicas, 0 if place is None else place.replica)
    pipe, told = None, ""
    for number, move in enumerate((None, *case.moves)):
        try:
            expected = {} if move is None else move.do(plain)
        except Exception as error:
            raise Unplayable(f"move {number}, {move}") from error
        try:
            pipe = Piped(case, place) if pipe is None else pipe
            actual = {} if move is None else move.do(pipe)
            actual, expected = {**pipe.state(), **actual}, {**plain.state(), **expected}
            assert_same(actual, expected, tolerance=case.tolerance, partial=True)
        except AssertionError as error:
            # The other ranks go on, and would wait.
            told = told or f"move {number}, {move}: {error}"
        except PenstockError as error:
            return told or f"move {number}, {move}: refused, {type(error).__name__}: {error}"
        except Exception:
            return told or f"move {number}, {move}: {traceback.format_exc()}"
    return told
