"""V-Min: about a third of 1F1B's memory, by a periodic pattern over a V-shape.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, on the way up:

    rank 0  F0 F1 .. f0 i0 f1 w0 I0 i1 F2 W0 w1 I1 f2 i2 F3 W1 w2 I2 f3 i3 W2 w3 I3 W3
    rank 1  .. F0 f0 F1 f1 i0 I0 w0 W0 i1 F2 I1 f2 w1 W1 i2 F3 I2 f3 w2 W2 i3 I3 w3 W3

Every action of a pattern comes 1 after the one before, so that every rank's activations live about
4P units together: the least that a V allows. Where tF = tB = tW and M ≥ P ≥ 2 the bubble is about
two thirds of 1F1B's 6(P - 1) chunks: 4P - 5 at most where 3 divides P - 1, else at most 4P - 7.
Each rank holds at most 2⌊(P + 4) / 3⌋ activations, each of half the size of a 1F1B stage's. Uneven
costs cost V-Min more than others: its ranks have no results in store.

Any P ≥ 1, M ≥ 1.

Source: arXiv:2405.15362, sec. 3.
"""

from __future__ import annotations

from penstock.schedule.families.periodic import v_program
from penstock.schedule.program import Program

__all__ = ["v_min"]


def v_min(*, ranks: int, microbatches: int) -> Program:
    """A pattern whose actions follow one another as closely as can be.

    Example:
        >>> " ".join(map(str, v_min(ranks=1, microbatches=1).ranks[0]))
        '0F0 1F0 1I0 0I0 1W0 0W0'
    """
    # Unless P = 1 (mod 3), passes down and up would conflict on some rank.
    turns = (1, 1, 1) if ranks % 3 == 1 else (2, 1, 1)
    return v_program(
        "v-min",
        ranks=ranks,
        microbatches=microbatches,
        legs=(1, 1, 1, 1),
        turns=turns,
        limit=2 * ((ranks + 4) // 3),
        spare=1,
    )
