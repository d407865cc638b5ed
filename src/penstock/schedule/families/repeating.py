"""Building blocks: one microbatch's passes, placed so that the same again fits every interval.

    P = 2, V = 2, interval 6, forwards and input gradients of 1, hops of 1 (V-Min):

    rank 0  F0 .. .. f0 i0 .. | F1 .. I0 f1 i1 .. | F2 .. I1 f2 i2 ..
    rank 1  .. F0 f0 .. .. i0 | I0 F1 f1 .. .. i1 | I1 F2 f2 .. .. i2

A pass starts at the earliest time, not before its gap from the pass before it, at which its rank
is free in every repetition: its slot, the time modulo the interval, is taken by no other pass.
So ranks never wait once the pipeline is full, and the longer a stage's activation lives from its
forward to its backward, divided by the interval, the more of them its rank holds. Weight
gradients need no slot of their own: what the interval leaves over is theirs.

This module knows no family, and neither the warm-up nor the cool-down: what a repeated block
leaves idle there, ``penstock.schedule.families.squeezing`` fills.

Source: arXiv:2405.15362, sec. 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement

__all__ = ["Pass", "PassBlock", "place_block", "repeat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward or backward of a block's microbatch.

    Args:
        start: when it starts, in units of a forward.
        stage: the stage.
        op: FORWARD, INPUT_GRAD or FULL_BACKWARD.
    """

    start: int
    stage: int
    op: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBlock:
    """The passes of one microbatch.

    Args:
        ranks: for each rank its passes, as they follow one another.
        interval: time from a microbatch's start to the next one's.
    """

    ranks: tuple[tuple[Pass, ...], ...]
    interval: int


def place_block(
    placement: Placement, *, gaps: Sequence[int], interval: int, backward: Op = Op.INPUT_GRAD
) -> PassBlock:
    """The passes of one microbatch, down all stages and back, each as early as can be.

    A forward and an input gradient take 1 each, a full backward takes 2.

    Args:
        placement: which rank holds which stage.
        gaps: for each pass after the first, forwards of stages 0, 1, ... and backwards of ...,
            1, 0: the least time from the start of the pass before it to its own.
        interval: time from a microbatch to the next.
        backward: INPUT_GRAD, or FULL_BACKWARD.

    Raises:
        ScheduleError: the interval is too short for the passes of a rank.

    Example:
        >>> from penstock.schedule.placement import v_shape
        >>> block = place_block(v_shape(2), gaps=(1,) * 7, interval=6)
        >>> [[f"{p.stage}{p.op.value}@{p.start}" for p in passes] for passes in block.ranks]
        [['0F@0', '3F@3', '3I@4', '0I@7'], ['1F@1', '2F@2', '2I@5', '1I@6']]
    """
    stages = range(placement.num_stages)
    length = 2 if backward is Op.FULL_BACKWARD else 1
    chain = [(stage, Op.FORWARD, 1) for stage in stages]
    chain += [(stage, backward, length) for stage in reversed(stages)]
    ranks: list[list[Pass]] = [[] for _ in range(placement.num_ranks)]
    slots = [bytearray(interval) for _ in ranks]
    long = [len(placement.stages_of(rank)) * (length > 1) for rank in range(len(ranks))]
    start = 0
    for (stage, op, taken), gap in zip(chain, (0, *gaps), strict=True):
        rank = placement.rank_of(stage)
        long[rank] -= taken > 1
        start = _earliest(slots[rank], start + gap, taken, long[rank])
        ranks[rank].append(Pass(start=start, stage=stage, op=op))
    return PassBlock(ranks=tuple(map(tuple, ranks)), interval=interval)


def _earliest(slots: bytearray, start: int, length: int, long: int) -> int:
    """The first time from ``start`` on at which a pass fits, and ``long`` of two units still do."""
    interval = len(slots)
    for time in range(start, start + interval):
        places = [(time + unit) % interval for unit in range(length)]
        if any(slots[place] for place in places):
            continue
        for place in places:
            slots[place] = 1
        if _pairs(slots) >= long:
            return time
        for place in places:
            slots[place] = 0
    raise ScheduleError(f"an interval of {interval} is too short for the passes of a rank")


def _pairs(slots: bytearray) -> int:
    """How many passes of two units fit into the free slots of an interval, which is a circle."""
    if 1 not in slots:
        return len(slots) // 2
    first = slots.index(1)
    runs = bytes(slots[first:] + slots[:first]).split(b"\1")
    return sum(len(run) // 2 for run in runs)


def repeat(block: PassBlock, *, microbatches: int) -> list[list[Action]]:
    """For each rank, the forwards and backwards of a block started over every interval, in order.

    Args:
        block: the passes of one microbatch.
        microbatches: how often.

    Example:
        >>> from penstock.schedule.placement import v_shape
        >>> block = place_block(v_shape(1), gaps=(1, 1, 1), interval=6)
        >>> " ".join(map(str, repeat(block, microbatches=2)[0]))
        '0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1'
    """
    orders = []
    for passes in block.ranks:
        timed = sorted(
            (each.start + block.interval * microbatch, place, microbatch)
            for place, each in enumerate(passes)
            for microbatch in range(microbatches)
        )
        orders.append([action(passes[p].stage, passes[p].op, mb) for _, p, mb in timed])
    return orders
