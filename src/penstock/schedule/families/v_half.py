"""V-Half: half of 1F1B's memory and about half of its bubble, by a periodic pattern over a V-shape.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, on the way up:

    rank 0  F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 f3 i3 I2 W1 I3 w3 W2 W3
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3

A pattern's actions come 1 after one another on the way down and 2 on the way up, there and back, so
that every rank's activations live about 6P units together: P of them, in chunks, every six units.
Where tF = tB = tW and M ≥ P the bubble is 6⌊(P - 1) / 2⌋ - 1 for P ≥ 3, of chunks, where 1F1B's
is 6(P - 1). Each rank holds at most 2⌊(P + 2) / 2⌋ activations, each of
half the size of a 1F1B stage's.

Any P ≥ 1, M ≥ 1.

Source: arXiv:2405.15362, sec. 3.
"""

from __future__ import annotations

from penstock.schedule.families.periodic import v_program
from penstock.schedule.program import Program

__all__ = ["v_half"]


def v_half(*, ranks: int, microbatches: int) -> Program:
    """A pattern whose activations live half as long as V-ZB's.

    Example:
        >>> " ".join(map(str, v_half(ranks=1, microbatches=1).ranks[0]))
        '0F0 1F0 1I0 0I0 1W0 0W0'
    """
    # For even P, backwards that start at once would conflict with forwards on every rank, and lose
    # a unit on each; with these turns they conflict with none after the first.
    turns = (3, 2, 2) if ranks % 2 == 0 else (1, 1, 1)
    return v_program(
        "v-half",
        ranks=ranks,
        microbatches=microbatches,
        legs=(1, 2, 1, 2),
        turns=turns,
        limit=2 * ((ranks + 2) // 2),
        spare=1,
    )
