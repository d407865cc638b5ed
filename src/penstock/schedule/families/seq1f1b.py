"""Seq1F1B: 1F1B over pieces of sequences, for models that look back along a sequence, never ahead.

A sequence goes through the stages piece by piece, and its backward comes back from the last piece
to the first, for a piece's keys and values are used by all pieces after it. So P = 3, M = 2,
k = 2 (tF = tB = tW = 1 for a piece; F2 and F3 are the pieces of microbatch 1):

    rank 0  F0 F1 F2 F3 .. .. .. .. B1 -- .. B0 -- .. B3 -- B2 --
    rank 1  .. F0 F1 F2 .. .. B1 -- F3 B0 -- .. B3 -- B2 -- .. ..
    rank 2  .. .. F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -- .. .. .. ..

Bubble (P - 1)(tF + tB + tW) of a piece, which is 1F1B's divided by k; rank r holds
min(Mk, P - r + k - 1) pieces at its peak. Any P ≥ 1, M ≥ 1, k ≥ 2.

Source: arXiv:2406.03488 (Seq1F1B), sec. 3.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.families.common import alternate, chunks
from penstock.schedule.family import refuse_sizes
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["seq1f1b"]


def seq1f1b(*, ranks: int, microbatches: int, splits: int = 2) -> Program:
    """P - 2 - r + k forwards of pieces on rank r, then one forward and one backward in turn.

    Args:
        splits: k, into how many pieces each sequence is split; 1 would be 1F1B.

    Raises:
        ScheduleError: ``splits`` is no whole number from 2 on.

    Example:
        >>> " ".join(map(str, seq1f1b(ranks=1, microbatches=2).ranks[0]))
        '0F0 0F1 0B1 0F2 0B0 0F3 0B3 0B2'
    """
    if not isinstance(splits, int) or isinstance(splits, bool) or splits < 2:
        raise ScheduleError(
            f"seq1f1b: splits={splits!r} must be a whole number from 2 on; 1f1b is the schedule "
            "of whole sequences"
        )
    refuse_sizes("seq1f1b", ranks=ranks, microbatches=microbatches, splits=splits)
    pieces = [(0, piece) for piece in range(microbatches * splits)]
    reverse = [
        (0, microbatch * splits + piece)
        for microbatch in range(microbatches)
        for piece in reversed(range(splits))
    ]
    return Program(
        name="seq1f1b",
        placement=linear(ranks),
        num_microbatches=len(pieces),
        num_splits=splits,
        ranks=tuple(
            tuple(
                alternate(
                    chunks(Op.FORWARD, pieces, stages=(rank,)),
                    chunks(Op.FULL_BACKWARD, reverse, stages=(rank,)),
                    warmup=ranks - 2 - rank + splits,
                )
            )
            for rank in range(ranks)
        ),
    )
