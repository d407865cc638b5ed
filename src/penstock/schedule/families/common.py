"""Shared parts of the builders: orders of forwards and backwards, and their alternation.

An order of a rank is a list of kinds, numbered as ``penstock.schedule.list_schedule`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TypeAlias

from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.list_schedule import KIND_OPS
from penstock.schedule.placement import Placement, v_shape
from penstock.schedule.program import Program

__all__ = [
    "Phases", "alternate", "alternating", "even_groups", "looped_order", "phased", "phased_v",
    "program_of", "with_weight_grads",
]  # fmt: skip

Phases: TypeAlias = Sequence[tuple[int, str]]
"""Repeat counts (below 1 for none) and patterns: ops with their loop, such as ``F0``; ``F0+B1`` for
an overlapped pair, and ``W`` for the weight gradient of the rank's oldest input gradient that has
none yet."""


def program_of(
    name: str,
    placement: Placement,
    microbatches: int,
    orders: Iterable[Sequence[int]],
    *,
    full: bool = False,
) -> Program:
    """Build the program of these orders, with ``full`` or split backwards.

    Microbatches beyond ``microbatches`` are left out: they depend on each other only through their
    order, so what remains stays valid, and holds no more activations. With ``full`` backwards, so
    are weight gradients.

    Examples:
        >>> from penstock.schedule.placement import linear
        >>> " ".join(map(str, program_of("", linear(1), 2, [[0, 0, 1, 2, 1]]).ranks[0]))
        '0F0 0F1 0I0 0W0 0I1'
    """
    ops = (Op.FORWARD, Op.FULL_BACKWARD) if full else KIND_OPS
    shared = list(range(microbatches))  # An integer each, for all actions.
    ranks = []
    for kinds in orders:
        rows: dict[int, Iterator[Action]] = {}
        for kind in set(kinds):
            number, stage = divmod(kind, placement.num_stages)
            passing = placement.passing(stage, microbatches) if number < len(ops) else ()
            rows[kind] = iter([action(stage, ops[number], shared[each]) for each in passing])
        ranks.append(tuple(act for kind in kinds if (act := next(rows[kind], None)) is not None))
    return Program(
        name=name, placement=placement, num_microbatches=microbatches, ranks=tuple(ranks)
    )


def even_groups(microbatches: int, *, ranks: int, number: int | None = None) -> tuple[int, ...]:
    """The sizes of ``number`` groups of microbatches per loop, as even as possible.

    By default as many as leave no group below ``ranks``: a smaller group leaves ranks idle at each
    turn of the loop.
    """
    number = number or max(1, microbatches // ranks)
    size, larger = divmod(microbatches, number)
    return (size + 1,) * larger + (size,) * (number - larger)


def looped_order(stages: Sequence[int], groups: Iterable[int]) -> list[int]:
    """The stages of a rank, group by group: each group of microbatches passes all of them before
    the next group starts."""
    return [stage for size in groups for stage in stages for _ in range(size)]


def alternate(forwards: list[int], backwards: list[int], *, warmup: int) -> list[int]:
    """``warmup`` forwards, then one forward and one backward in turn, then the other backwards."""
    order = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards, strict=False):
        order += pair
    return order + backwards[max(0, len(forwards) - warmup) :]


def alternating(
    name: str,
    placement: Placement,
    microbatches: int,
    *,
    groups: Sequence[int] | None = None,
    ahead: int,
    extra: int = 0,
    behind: int | None = None,
) -> Program:
    """On each rank, a warm-up of forwards, followed by one forward and one backward in turn.

    Args:
        placement: stages in a loop.
        groups: the sizes of the groups in which microbatches go round, whose sum may exceed
            ``microbatches``; None for one group.
        ahead: the forwards of the warm-up per later rank, ...
        extra: ... and further ones, besides the rounds of the first group but the last.
        behind: the number of input gradients, per earlier rank, by which weight gradients lag; None
            for full backwards.
    """
    num_ranks, num_stages, orders = placement.num_ranks, placement.num_stages, []
    groups = groups or (microbatches,)
    extra += (num_stages // num_ranks - 1) * max(groups)
    for rank in range(num_ranks):
        stages = placement.stages_of(rank)
        order = alternate(
            looped_order(stages, groups),
            looped_order([stage + num_stages for stage in reversed(stages)], groups),
            warmup=extra + ahead * (num_ranks - 1 - rank),
        )
        if behind is not None:
            order = with_weight_grads(order, num_stages, behind * rank)
        orders.append(order)
    return program_of(name, placement, microbatches, orders, full=behind is None)


def with_weight_grads(order: Sequence[int], stages: int, behind: int = 0) -> list[int]:
    """``order`` with a weight gradient after each input gradient but the first ``behind``."""
    merged: list[int] = []
    waiting: deque[int] = deque()
    for kind in order:
        merged.append(kind)
        if kind >= stages:
            waiting.append(kind + stages)
            if len(waiting) > behind:
                merged.append(waiting.popleft())
    return [*merged, *waiting]


def phased(
    name: str,
    placement: Placement,
    microbatches: int,
    ranks: Iterable[tuple[Sequence[int], Phases]],
) -> Program:
    """A program from the phases of each rank, with its stages by loop."""
    return Program(
        name=name,
        placement=placement,
        num_microbatches=microbatches,
        ranks=tuple(_phased(placement, microbatches, *each) for each in ranks),
    )


def _phased(
    placement: Placement, microbatches: int, stages: Sequence[int], phases: Phases
) -> tuple[Step, ...]:
    """The phases of a rank with these ``stages`` as steps, each op with its next microbatch.

    An overlapped pair with one action left within ``microbatches`` becomes that action.
    """
    # By loop, the next microbatch of its forwards and of its backwards.
    forwards, backwards = (
        [count(placement.direction_of(stage), placement.num_directions) for stage in stages]
        for _ in range(2)
    )

    def parsed(text: str) -> tuple[Op, int, Iterator[int]]:
        op, loop = Op(text[0]), int(text[1:] or 0)
        return op, stages[loop], (forwards if op is Op.FORWARD else backwards)[loop]

    waiting: deque[Action] = deque()
    steps: list[Step] = []
    for times, pattern in phases:
        cells = [[parsed(text) for text in cell.split("+")] for cell in pattern.split()]
        for cell in cells * times:
            parts = []
            for op, stage, following in cell:
                if op is Op.WEIGHT_GRAD:
                    act = waiting.popleft()
                else:
                    act = action(stage, op, next(following))
                if op is Op.INPUT_GRAD:
                    waiting.append(action(stage, Op.WEIGHT_GRAD, act.microbatch))
                if (act.microbatch or 0) < microbatches:
                    parts.append(act)
            steps += parts if len(parts) < 2 else [Overlap(parts=tuple(parts))]
    return tuple(steps)


def phased_v(name: str, ranks: int, microbatches: int, phases: Callable[..., Phases]) -> Program:
    """A program over a V from the phases of each rank, called with its position, ranks and
    microbatches."""
    placement = v_shape(ranks)
    # Below 2P the phases would overlap, so take the first microbatches of a full V.
    full = max(microbatches, 2 * ranks)
    each = ((placement.stages_of(rank), phases(rank, ranks, full)) for rank in range(ranks))
    return phased(name, placement, microbatches, each)
