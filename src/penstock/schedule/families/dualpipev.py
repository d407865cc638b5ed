"""DualPipeV: forwards of one half of a V overlapped with backwards of the other.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, ``+`` joins a pair:

    rank 0  F0 F1 F2 f0 i0 w0 f1 F3+b1 -- .. f2+B0 -- b2 -- .. f3+B1 -- b3 -- I2 W2 I3 W3
    rank 1  .. F0 f0 F1 f1 F2 b0 -- f2+B0 -- F3+b1 -- f3+B1 -- b2 -- B2 -- .. i3 I3 w3 W3

In the steady state every step is a pair of a forward and a full backward, whose messages hide
behind the other's compute. On one stream its parts run in turn: what is saved then is the waiting
for messages, not the time of the compute; on two, side by side, what one leaves of the device is
the other's.

Where tF = tB ≥ tW, M ≥ 2P and a pair takes as long as its parts in turn, the bubble is
(P - 1)(F&B + B - 3W) in chunks, F&B being the pair's time, B the full backward's and W that of a
weight gradient. Each rank holds 2P + 1 activations at its peak.

Any P ≥ 1, M ≥ 1; below 2P microbatches the steady state can't be reached, and bubbles appear.

Source: arXiv:2412.19437, sec. 3.2.1 (DualPipe), cut in half along its axis of symmetry:
DeepSeek-AI, "DualPipe and DualPipeV", 2025.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.families.common import Pattern, first_microbatches, phased
from penstock.schedule.placement import v_shape
from penstock.schedule.program import Program

__all__ = ["dualpipev", "phases"]

_F0, _F1 = (Op.FORWARD, 0), (Op.FORWARD, 1)
_B0, _B1 = (Op.FULL_BACKWARD, 0), (Op.FULL_BACKWARD, 1)
_I0, _I1 = (Op.INPUT_GRAD, 0), (Op.INPUT_GRAD, 1)
_W = Op.WEIGHT_GRAD


def dualpipev(*, ranks: int, microbatches: int) -> Program:
    """The phases of every rank, from its place in the V.

    Example:
        >>> " ".join(map(str, dualpipev(ranks=1, microbatches=2).ranks[0]))
        '0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1'
    """
    # Below 2P the phases would overlap, so take the first microbatches of a full V.
    full = max(microbatches, 2 * ranks)
    return first_microbatches(
        [
            phased(phases(rank, ranks, full), stages=(rank, 2 * ranks - 1 - rank))
            for rank in range(ranks)
        ],
        name="dualpipev",
        placement=v_shape(ranks),
        microbatches=microbatches,
    )


def phases(rank: int, ranks: int, microbatches: int) -> list[tuple[int, Pattern]]:
    """The patterns of a rank and their repeat counts, for a full V.

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
        (2 * above, [_F0]),
        (rank + 1, [_F0, _F1]),
        (above, [_I1, _W, _F1]),
        (turn, [_F0, _B1, (_F1, _B0)]),
        (microbatches - ranks - above - turn, [(_F0, _B1), (_F1, _B0)]),
        (above, [_B1, (_F1, _B0)]),
        # From the middle of the cool-down on, weight gradients follow once no input gradient is
        # waiting.
        (half, [_B1, _B0]),
        (odd, [_B1, _I0]),
        (half, [_I1, _I0]),
        (above, [_W, _I0]),
        (rank + 1, [_W]),
    ]
