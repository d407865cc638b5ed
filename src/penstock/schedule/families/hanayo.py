"""Hanayo: waves of stages down and up the ranks, so that a microbatch turns without a message.

One wave (V = 2), P = 2, M = 3 (tF = tB = tW = 1); lower case is a rank's second stage:

    rank 0  F0 F1 F2 f0 b0 -- f1 b1 -- .. B0 -- .. .. B1 -- f2 b2 -- .. .. .. .. B2 --
    rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- b1 -- B1 -- F2 f2 .. .. .. b2 -- B2 -- .. ..

W waves put 2W stages on each rank, down and up again W times. P microbatches go together, each rank
running whatever is ready, backwards and later stages first; the next P start as soon as memory
allows. Each rank holds at most 2W·min(P, M) activations. Where tF = tB = tW = 1 and P ≥ 2 the
bubble of M = P microbatches is 4(P - 1) chunks for any W; every further P microbatches add 2P - 3
(simulated; the paper's formula gives other figures). Any P ≥ 1, M ≥ 1 and W ≥ 1.

Source: arXiv:2308.15762.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.families.common import program_of
from penstock.schedule.families.periodic import chain_pattern
from penstock.schedule.family import refuse_option, refuse_sizes
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.placement import wave
from penstock.schedule.program import Program

__all__ = ["hanayo"]


def hanayo(*, ranks: int, microbatches: int, virtual: int, waves: int | None = None) -> Program:
    """Waves of stages down and up the ranks, so that a microbatch turns without a message."""
    if waves is None:
        waves = virtual // 2
    refuse_option("hanayo", "waves", waves, 1)
    if virtual not in (2, 2 * waves):
        raise ScheduleError(
            f"hanayo: waves={waves} make {2 * waves} stages per rank, not virtual={virtual}; give "
            "one of the two"
        )
    refuse_sizes("hanayo", ranks=ranks, microbatches=microbatches, virtual=2 * waves)
    placement = wave(ranks, waves)
    group = min(ranks, microbatches)
    limit = 2 * waves * group
    gaps = [1] * placement.num_stages + [2] * (placement.num_stages - 1)
    pattern = chain_pattern(placement, gaps=gaps, period=6 * waves, full=True)
    orders = pattern.orders(placement, microbatches=group)
    # The order of one group: ready actions, by their time in the pattern.
    once = list_schedule(placement, orders, limit=limit, full=True, spare=0, overtake=True).order
    repeated = [_repeated(kinds, group, microbatches) for kinds in once]
    scheduled = list_schedule(placement, repeated, limit=limit, full=True, spare=0)
    return program_of("hanayo", placement, microbatches, scheduled.order, full=True)


def _repeated(kinds: Sequence[int], group: int, microbatches: int) -> list[int]:
    """The order of one group for all, of which the last may have fewer microbatches."""
    count: Counter[int] = Counter()
    repeated = []
    for kind in [*kinds] * -(-microbatches // group):
        count[kind] += 1
        if count[kind] <= microbatches:
            repeated.append(kind)
    return repeated
