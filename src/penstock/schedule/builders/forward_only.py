"""Forwards alone, as an evaluation runs them. Knows nothing of backwards.

P = 3, V = 1, M = 4:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3

P = 2, V = 2, M = 4, in groups of two; lower case is a rank's second stage:

    rank 0  F0 F1 f0 f1 F2 F3 f2 f3 ..
    rank 1  .. F0 F1 f0 f1 F2 F3 f2 f3

With equal stages the bubble is (P - 1) tF for M ≥ P. Over a V-shape a microbatch enters every
second unit, so that on each rank the way up fits in between the way down, and the bubble is
2 (P - 1) tF, of which no order can save anything: the last rank starts after P - 1 units and its
last forward has P - 1 more to climb.

Source: the forward half of arXiv:2104.04473, sec. 2.2.
"""

from __future__ import annotations

from penstock.schedule.action import Op, action
from penstock.schedule.builders.common import chunks, even_groups, looped_order
from penstock.schedule.placement import Placement, looped
from penstock.schedule.program import Program

__all__ = ["forward_only", "forwards_over"]


def forward_only(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """Forwards of every microbatch over a looped placement.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches.
        virtual: stages per rank.

    Example:
        >>> program = forward_only(ranks=2, microbatches=2, virtual=1)
        >>> " ".join(map(str, program.ranks[1]))
        '1F0 1F1'
    """
    placement = looped(ranks, virtual)
    groups = even_groups(microbatches=microbatches, group=ranks)
    order = looped_order(virtual=virtual, groups=groups)
    return Program(
        name="forward-only",
        placement=placement,
        num_microbatches=microbatches,
        ranks=tuple(
            tuple(chunks(Op.FORWARD, order, stages=placement.stages_of(rank)))
            for rank in range(ranks)
        ),
    )


def forwards_over(placement: Placement, *, microbatches: int) -> Program:
    """Forwards of every microbatch over any placement: the evaluation beside any training program.

    Looped placements go round group by group. Elsewhere the forward of stage s on microbatch m
    has its place at unit V·m + s of its rank, V being the most stages of a rank; the program
    is right for every placement, and without needless waits on a V-shape.

    Args:
        placement: which rank holds which stage.
        microbatches: number of microbatches.

    Example:
        >>> from penstock.schedule.placement import v_shape
        >>> " ".join(map(str, forwards_over(v_shape(2), microbatches=2).ranks[0]))
        '0F0 0F1 3F0 3F1'
    """
    virtual, remainder = divmod(placement.num_stages, placement.num_ranks)
    if not remainder and placement == looped(placement.num_ranks, virtual):
        return forward_only(ranks=placement.num_ranks, microbatches=microbatches, virtual=virtual)
    every = range(placement.num_ranks)
    most = max(len(placement.stages_of(rank)) for rank in every)
    return Program(
        name="forward-only",
        placement=placement,
        num_microbatches=microbatches,
        ranks=tuple(
            tuple(
                action(stage, Op.FORWARD, microbatch)
                for _, stage, microbatch in sorted(
                    (most * microbatch + stage, stage, microbatch)
                    for stage in placement.stages_of(rank)
                    for microbatch in range(microbatches)
                )
            )
            for rank in every
        ),
    )
