"""Forward-only: forwards alone, as an evaluation runs them.

P = 3, V = 1, M = 4:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3

P = 2, V = 2, M = 4, in groups of two; lower case is a rank's second stage:

    rank 0  F0 F1 f0 f1 F2 F3 f2 f3 ..
    rank 1  .. F0 F1 f0 f1 F2 F3 f2 f3

With equal stages the bubble is (P - 1) tF for M ≥ P; below that the loop can't be filled, and costs
another (V - 1)(P - M) tF. Nothing is kept for a backward, so that each rank holds 1 activation at
its peak, that of the forward which it runs.

Any P ≥ 1, V ≥ 1, M ≥ 1. The evaluation beside a training program is made from that
(``penstock.schedule.passes.forward_only``), over any placement.

Source: the forward half of arXiv:2104.04473, sec. 2.2.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.families.common import chunks, even_groups, looped_order, program_of
from penstock.schedule.placement import looped
from penstock.schedule.program import Program

__all__ = ["forward_only"]


def forward_only(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """Forwards of every microbatch over a looped placement.

    Example:
        >>> program = forward_only(ranks=2, microbatches=2, virtual=1)
        >>> " ".join(map(str, program.ranks[1]))
        '1F0 1F1'
    """
    placement = looped(ranks, virtual)
    groups = even_groups(microbatches=microbatches, group=ranks)
    order = looped_order(virtual=virtual, groups=groups)
    steps = (chunks(Op.FORWARD, order, stages=placement.stages_of(rank)) for rank in range(ranks))
    return program_of("forward-only", placement, microbatches, steps)
