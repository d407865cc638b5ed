"""DualPipe: microbatches enter a pipeline at both ends, each end overlapping the other's passes.

P = 4, M = 8 (tF = tB = tW = 1). Even microbatches go down through stages 0 to 3, odd ones (lower
case) up through stages 4 to 7, which are the model's stages 0 to 3 again: every rank holds two
stages, and the weights are there twice. ``+`` joins an overlapped pair:

    rank 0  F0 F2 F4 f1 i1 w1 f3 F6+b3 -- .. f5+B0 -- b5 -- .. f7+B2 -- b7 -- I4 W4 I6 W6
    rank 1  .. F0 f1 F2 f3 F4 b1 -- f5+B0 -- F6+b3 -- f7+B2 -- b5 -- B4 -- .. i7 I6 w7 W6
    rank 2  .. f1 F0 f3 F2 f5 B0 -- F4+b1 -- f7+B2 -- F6+b3 -- B4 -- b5 -- .. I6 i7 W6 w7
    rank 3  f1 f3 f5 F0 I0 W0 F2 f7+B2 -- .. F4+b1 -- B4 -- .. F6+b3 -- B6 -- i5 w5 i7 w7

The lower half of the ranks mirrors the upper. Cut along that axis, each half is DualPipeV's V of
P/2 ranks and M/2 microbatches, with the turn of the V between the two middle ranks.

In the steady state every step is a pair of a forward and a full backward, whose messages hide
behind the other's compute. On one stream its parts run in turn: what is saved then is the waiting
for messages, not the time of the compute; on two, side by side, what one leaves of the device is
the other's.

Where tF = tB ≥ tW and a pair takes as long as its parts in turn, the bubble is
(P/2 - 1)(F&B + B - 3W), F&B being the pair's time, B the full backward's and W that of a weight
gradient. Each rank holds P + 1 activations at its peak. After a step the gradients of the two
copies are summed, once for each of the P/2 pairs of ranks that hold the same stages.

P and M even, M ≥ 2P.

Source: arXiv:2412.19437, sec. 3.2.1 (DualPipe).
"""

from __future__ import annotations

from penstock.schedule.action import Action, Overlap, Step, action
from penstock.schedule.families.common import phased, program_of
from penstock.schedule.families.dualpipev import phases
from penstock.schedule.placement import Placement, bidirectional
from penstock.schedule.program import Program

__all__ = ["dualpipe", "nearest"]


def nearest(ranks: int, microbatches: int) -> tuple[int, int]:
    """The nearest numbers of ranks and microbatches that DualPipe supports.

    Example:
        >>> nearest(4, 8), nearest(3, 5)
        ((4, 8), (4, 8))
    """
    ranks += ranks % 2
    return ranks, max(microbatches + microbatches % 2, 2 * ranks)


def dualpipe(*, ranks: int, microbatches: int) -> Program:
    """The phases of DualPipeV on both halves of the ranks, the halves in opposite directions.

    Example:
        >>> " ".join(map(str, dualpipe(ranks=2, microbatches=4).ranks[0]))
        '0F0 3F1 0F2 3B1 (3F3;0B0)OVERLAP_F_B 3B3 0I2 0W2'
    """
    placement = bidirectional(ranks)
    programs = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        # The stage nearer to the entry of its copy is the upper arm of the V.
        stages = (down, up) if rank < ranks // 2 else (up, down)
        place = min(rank, ranks - 1 - rank)
        steps = phased(phases(place, ranks // 2, microbatches // 2), stages=stages)
        programs.append(tuple(_numbered(step, placement) for step in steps))
    return program_of("dualpipe", placement, microbatches, programs)


def _numbered(step: Step, placement: Placement) -> Step:
    """Renumber a step from microbatches of its own copy to microbatches of both."""

    def numbered(act: Action) -> Action:
        assert act.microbatch is not None, "a builder computes, which is on a microbatch"
        copy = placement.copy_of(act.stage)
        return action(act.stage, act.op, placement.copies * act.microbatch + copy)

    if isinstance(step, Overlap):
        return Overlap(parts=tuple(map(numbered, step.parts)))
    return numbered(step)
