"""Seq1F1B: 1F1B over chunks of sequences, for causal models: a smaller bubble, less memory.

A sequence goes forward chunk by chunk and backward from the last chunk to the first, since a
chunk's keys and values are used by all chunks after it. P = 3, M = 2, k = 2 (tF = tB = tW = 1 for a
chunk; F2 and F3 are the chunks of microbatch 1):

    rank 0  F0 F1 F2 F3 .. .. .. .. B1 -- .. B0 -- .. B3 -- B2 --
    rank 1  .. F0 F1 F2 .. .. B1 -- F3 B0 -- .. B3 -- B2 -- .. ..
    rank 2  .. .. F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -- .. .. .. ..

Bubble (P - 1)(tF + tB + tW) of a chunk, which is 1F1B's divided by k; rank r holds
min(Mk, P - r + k - 1) chunks at its peak. Any P ≥ 1, M ≥ 1, k ≥ 2.

Source: arXiv:2406.03488 (Seq1F1B), sec. 3.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.families.common import alternate, chunks, program_of
from penstock.schedule.family import refuse_sizes
from penstock.schedule.messages import is_count
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["seq1f1b"]


def seq1f1b(*, ranks: int, microbatches: int, splits: int = 2) -> Program:
    """1F1B over chunks of sequences, for causal models: a smaller bubble, less memory.

    Args:
        splits: k, the number of chunks per sequence.

    Raises:
        ScheduleError: ``splits`` is not a whole number from 2 on.
    """
    if not is_count(splits, 2):
        raise ScheduleError(
            f"seq1f1b: splits={splits!r} must be a whole number from 2 on; 1f1b is the schedule "
            "of whole sequences"
        )
    refuse_sizes("seq1f1b", ranks=ranks, microbatches=microbatches, splits=splits)
    order = [(0, chunk) for chunk in range(microbatches * splits)]
    reverse = [
        (0, microbatch * splits + chunk)
        for microbatch in range(microbatches)
        for chunk in reversed(range(splits))
    ]
    steps = (
        alternate(
            chunks(Op.FORWARD, order, stages=(rank,)),
            chunks(Op.FULL_BACKWARD, reverse, stages=(rank,)),
            warmup=ranks - 2 - rank + splits,
        )
        for rank in range(ranks)
    )
    return replace(
        program_of("seq1f1b", linear(ranks), microbatches * splits, steps), num_splits=splits
    )
