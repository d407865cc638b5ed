"""1F1B, eager 1F1B and Seq1F1B: after a warm-up, one forward and one backward in turn.

1F1B, P = 3, M = 4 (tF = tB = tW = 1):

    rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

Bubble (P - 1)(tF + tB + tW), as GPipe's; rank r holds min(M, P - r) activations at its peak.

Eager 1F1B, P = 3, M = 4, with twice the warm-up, so that messages travel while ranks compute:

    rank 0  F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
    rank 1  .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

With messages that take tC each, 2tC ≤ T = tF + tB + tW, its bubble is (P - 1) T + 2(P - 1) tC; in
1F1B each microbatch waits for its messages. Rank r holds min(M, 2(P - r) - 1) activations at its
peak.

Seq1F1B, P = 3, M = 2, over k = 2 chunks of each sequence; F2 and F3 are the chunks of microbatch 1.
Backwards run from the last chunk to the first, since a chunk's keys and values are used by all
chunks after it:

    rank 0  F0 F1 F2 F3 .. .. .. .. B1 -- .. B0 -- .. B3 -- B2 --
    rank 1  .. F0 F1 F2 .. .. B1 -- F3 B0 -- .. B3 -- B2 -- .. ..
    rank 2  .. .. F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -- .. .. .. ..

Bubble (P - 1)(tF + tB + tW) of a chunk, which is 1F1B's divided by k; rank r holds
min(Mk, P - r + k - 1) chunks at its peak. Any P ≥ 1, M ≥ 1, k ≥ 2.

Source: 1F1B: arXiv:2007.01045 (DAPPLE), sec. 3; arXiv:1806.03377 (PipeDream), sec. 3.2, with a
flush. Eager 1F1B: arXiv:2211.05322 (overlapping-friendly 1F1B). Seq1F1B: arXiv:2406.03488, sec. 3.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.action import Action, Op, action
from penstock.schedule.families.common import alternating
from penstock.schedule.family import refuse_option, refuse_sizes
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["eager_1f1b", "one_f_one_b", "seq1f1b"]


def one_f_one_b(*, ranks: int, microbatches: int) -> Program:
    """After its warm-up a rank runs one forward and one backward in turn."""
    return alternating("1f1b", linear(ranks), microbatches, ahead=1)


def eager_1f1b(*, ranks: int, microbatches: int) -> Program:
    """1F1B with twice the warm-up, so that messages travel while ranks compute."""
    return alternating("eager-1f1b", linear(ranks), microbatches, ahead=2)


def seq1f1b(*, ranks: int, microbatches: int, splits: int = 2) -> Program:
    """1F1B over chunks of sequences, for causal models: a smaller bubble, less memory."""
    refuse_option("seq1f1b", "splits", splits, 2)
    refuse_sizes("seq1f1b", ranks=ranks, microbatches=microbatches, splits=splits)
    rising = alternating("seq1f1b", linear(ranks), microbatches * splits, ahead=1, extra=splits - 1)
    return replace(
        rising.with_ranks(
            [_reversed(act, splits) for step in steps for act in step.parts]
            for steps in rising.ranks
        ),
        num_splits=splits,
    )


def _reversed(act: Action, splits: int) -> Action:
    """A backward on the chunk at the same place from the other end of its sequence."""
    if act.op is Op.FORWARD:
        return act
    sequence, chunk = divmod(act.microbatch or 0, splits)
    return action(act.stage, act.op, (sequence + 1) * splits - 1 - chunk)
