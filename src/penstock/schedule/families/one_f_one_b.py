"""1F1B and eager 1F1B: after a warm-up, a rank runs one forward and one backward in turn.

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
peak. Any P ≥ 1, M ≥ 1.

Source: 1F1B: arXiv:2007.01045 (DAPPLE), sec. 3; arXiv:1806.03377 (PipeDream), sec. 3.2, with a
flush. Eager 1F1B: arXiv:2211.05322 (overlapping-friendly 1F1B).
"""

from __future__ import annotations

from penstock.schedule.families.common import alternating
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["eager_1f1b", "one_f_one_b"]


def one_f_one_b(*, ranks: int, microbatches: int) -> Program:
    """After its warm-up a rank runs one forward and one backward in turn."""
    return _with_warmup("1f1b", ranks, microbatches, per_rank=1)


def eager_1f1b(*, ranks: int, microbatches: int) -> Program:
    """1F1B with twice the warm-up, so that messages travel while ranks compute."""
    return _with_warmup("eager-1f1b", ranks, microbatches, per_rank=2)


def _with_warmup(name: str, ranks: int, microbatches: int, per_rank: int) -> Program:
    warmups = [per_rank * (ranks - 1 - rank) for rank in range(ranks)]
    return alternating(name, linear(ranks), microbatches, groups=(microbatches,), warmups=warmups)
