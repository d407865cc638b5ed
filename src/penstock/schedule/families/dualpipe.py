"""DualPipe and DualPipeV: forwards of one direction overlapped with backwards of the other.

DualPipeV, P = 2, M = 4 (tF = tB = tW = 1), over a V; lower case is a rank's second stage, ``+``
joins an overlapped pair:

    rank 0  F0 F1 F2 f0 i0 w0 f1 F3+b1 -- .. f2+B0 -- b2 -- .. f3+B1 -- b3 -- I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0 -- f2+B0 -- F3+b1 -- f3+B1 -- b2 -- B2 -- .. i3 I3 w3 W3

DualPipe, P = 4, M = 8. Even microbatches go down through stages 0 to 3, odd ones (lower case) up
through stages 4 to 7, a second copy of the model: every rank holds two stages.

    rank 0  F0 F2 F4 f1 i1 w1 f3 F6+b3 -- .. f5+B0 -- b5 -- .. f7+B2 -- b7 -- I4 W4 I6 W6
    rank 1  .. F0 f1 F2 f3 F4 b1 -- f5+B0 -- F6+b3 -- f7+B2 -- b5 -- B4 -- .. i7 I6 w7 W6
    rank 2  .. f1 F0 f3 F2 f5 B0 -- F4+b1 -- f7+B2 -- F6+b3 -- B4 -- b5 -- .. I6 i7 W6 w7
    rank 3  f1 f3 f5 F0 I0 W0 F2 f7+B2 -- .. F4+b1 -- B4 -- .. F6+b3 -- B6 -- i5 w5 i7 w7

The lower half of the ranks mirrors the upper; each half is DualPipeV's V of P/2 ranks and M/2
microbatches. In the steady state every step is a pair of a forward and a full backward, each of
which hides the other's messages.

Bubbles in chunks, where tF = tB ≥ tW and a pair takes as long as its parts in turn, with F&B the
pair's time, B the full backward's and W a weight gradient's:

                 activations held   bubble
    dualpipev    2P + 1             (P - 1)(F&B + B - 3W), for M ≥ 2P; P ≥ 1, M ≥ 1
    dualpipe     P + 1              (P/2 - 1)(F&B + B - 3W); P and M even, M ≥ 2P

After a step of DualPipe the gradients of both copies are summed.

Source: arXiv:2412.19437, sec. 3.2.1 (DualPipe). DualPipeV is DualPipe cut in half along its axis of
symmetry: DeepSeek-AI, "DualPipe and DualPipeV", 2025.
"""

from __future__ import annotations

from penstock.schedule.families.common import Phases, phased, phased_v
from penstock.schedule.placement import bidirectional
from penstock.schedule.program import Program

__all__ = ["dualpipe", "dualpipev"]


def dualpipev(*, ranks: int, microbatches: int) -> Program:
    """Forwards of one half of a V overlapped with backwards of the other."""
    return phased_v("dualpipev", ranks, microbatches, _phases)


def dualpipe(*, ranks: int, microbatches: int) -> Program:
    """Microbatches enter a pipeline at both ends, each end overlapping the other's passes."""
    placement, phases = bidirectional(ranks), []
    for rank in range(ranks):
        place = min(rank, ranks - 1 - rank)
        # The stage nearer to the entry of its copy is the upper arm of the V.
        stages = placement.stages_of(rank)[:: 1 if rank == place else -1]
        phases.append((stages, _phases(place, ranks // 2, microbatches // 2)))
    return phased("dualpipe", placement, microbatches, phases)


def _phases(rank: int, ranks: int, microbatches: int) -> Phases:
    """The phases of a rank, for a full V.

    Args:
        rank: its position, from 0 at the top of the V to ``ranks`` - 1 at its turn.
        ranks: ranks of the V.
        microbatches: at least 2·``ranks``.
    """
    above = ranks - 1 - rank
    # At the turn of the V the first pair runs as two actions, as published: in a pair, the backward
    # that all other ranks wait for would share its device with a forward.
    turn = int(above == 0)
    half, odd = divmod(rank + 1, 2)
    return [
        (2 * above, "F0"),
        (rank + 1, "F0 F1"),
        (above, "I1 W F1"),
        (turn, "F0 B1 F1+B0"),
        (microbatches - ranks - above - turn, "F0+B1 F1+B0"),
        (above, "B1 F1+B0"),
        # From the middle of the cool-down on, weight gradients follow once no input gradient is
        # waiting.
        (half, "B1 B0"),
        (odd, "B1 I0"),
        (half, "I1 I0"),
        (above, "W I0"),
        (rank + 1, "W"),
    ]
