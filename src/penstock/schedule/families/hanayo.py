"""Hanayo: waves of stages down and up the ranks, so that a microbatch turns without a message.

One wave (V = 2), P = 2, M = 3 (tF = tB = tW = 1); lower case is a rank's second stage:

    rank 0  F0 F1 F2 f0 b0 -- f1 b1 -- .. B0 -- .. .. B1 -- f2 b2 -- .. .. .. .. B2 --
    rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- b1 -- B1 -- F2 f2 .. .. .. b2 -- B2 -- .. ..

W waves put 2W stages on each rank, down and up again W times. P microbatches go together, each
rank running whatever is ready, backwards and later stages before earlier ones; the next P start
as soon as memory allows. Where tF = tB = tW = 1 and P ≥ 2 the bubble of M = P microbatches is
4(P - 1) chunks: the same for any number of waves, so that its share of the step falls as 1 / W.
Every further P microbatches add 2P - 3 to it. This is what the simulation measures; the paper's
formula gives other values. Each rank holds at most 2W·min(P, M) activations.

Any P ≥ 1, M ≥ 1 and W ≥ 1; microbatches that don't fill P leave ranks waiting.

Source: arXiv:2308.15762.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.families.common import program_of
from penstock.schedule.families.periodic import chain_pattern
from penstock.schedule.family import refuse_sizes
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.messages import is_count
from penstock.schedule.placement import Placement, wave
from penstock.schedule.program import Program

__all__ = ["hanayo"]


def hanayo(*, ranks: int, microbatches: int, virtual: int, waves: int | None = None) -> Program:
    """Groups of P microbatches over a wave placement.

    Args:
        virtual: stages per rank, twice the number of waves.
        waves: number of waves; None for what follows from ``virtual``. It overrides ``virtual``
            where that is the default, 2.

    Raises:
        ScheduleError: an odd number of stages per rank, or one that is not twice the waves.

    Example:
        >>> " ".join(map(str, hanayo(ranks=1, microbatches=2, virtual=2).ranks[0]))
        '0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1'
    """
    waves = _waves(virtual, waves)
    refuse_sizes("hanayo", ranks=ranks, microbatches=microbatches, virtual=2 * waves)
    placement = wave(ranks, waves)
    group = min(ranks, microbatches)
    limit = 2 * waves * group
    pattern = _pattern(placement, group, limit)
    groups = range(0, microbatches, group)
    orders = [
        [
            action(act.stage, act.op, first + (act.microbatch or 0))
            for first in groups
            for act in order
            if first + (act.microbatch or 0) < microbatches
        ]
        for order in pattern
    ]
    scheduled = list_schedule(placement, orders, limit=limit, spare=0)
    return program_of("hanayo", placement, microbatches, scheduled.ranks)


def _pattern(placement: Placement, group: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """The order of one group: ready actions, by their time in the pattern."""
    num_stages = placement.num_stages
    backward = Op.FULL_BACKWARD
    pattern = chain_pattern(
        placement,
        gaps=[1] * num_stages + [2] * (num_stages - 1),
        period=3 * num_stages // placement.num_ranks,
        backward=backward,
    )
    orders = pattern.orders(placement, microbatches=group, backward=backward)
    return list_schedule(placement, orders, limit=limit, spare=0, overtake=True).ranks


def _waves(virtual: int, waves: int | None) -> int:
    if waves is None:
        if virtual % 2:
            raise ScheduleError(
                f"hanayo: virtual={virtual} stages per rank do not work, a wave has two; "
                f"{virtual + 1} do"
            )
        return virtual // 2
    if not is_count(waves, 1):
        raise ScheduleError(f"hanayo: waves={waves!r} must be a whole number from 1 on")
    if virtual not in (2, 2 * waves):
        raise ScheduleError(
            f"hanayo: waves={waves} make {2 * waves} stages per rank, not virtual={virtual}; give "
            "one of the two"
        )
    return waves
