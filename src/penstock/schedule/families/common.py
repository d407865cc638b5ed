"""Shared parts of the builders: orders of forwards and backwards, and their alternation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.placement import Placement, v_shape
from penstock.schedule.program import Program

__all__ = [
    "Chunk",
    "Phases",
    "alternate",
    "alternating",
    "chunks",
    "even_groups",
    "first_microbatches",
    "looped_order",
    "phased",
    "phased_v",
    "program_of",
]

Chunk: TypeAlias = tuple[int, int]
"""A loop (the index of a stage on its rank) and a microbatch."""

Phases: TypeAlias = Sequence[tuple[int, str]]
"""Repeat counts (below 1 for none) and patterns: ops with their loop, such as ``F0``; ``F0+B1`` for
an overlapped pair, and ``W`` for the weight gradient of the rank's oldest input gradient that has
none yet."""


def program_of(
    name: str, placement: Placement, microbatches: int, ranks: Iterable[Iterable[Step]]
) -> Program:
    """Build the program of these steps."""
    steps = tuple(map(tuple, ranks))
    return Program(name=name, placement=placement, num_microbatches=microbatches, ranks=steps)


def chunks(op: Op, order: Sequence[Chunk], *, stages: Sequence[int]) -> list[Action]:
    """``op`` on each chunk in order, where ``stages`` are the rank's stages."""
    return [action(stages[loop], op, microbatch) for loop, microbatch in order]


def phased(phases: Phases, *, stages: Sequence[int]) -> list[Step]:
    """The phases of a rank as steps, each op with its next microbatch."""
    started: Counter[tuple[bool, int]] = Counter()
    waiting: deque[Chunk] = deque()

    def following(op: Op, loop: int) -> Action:
        if op is Op.WEIGHT_GRAD:
            loop, microbatch = waiting.popleft()
        else:
            microbatch = started[op is Op.FORWARD, loop]
            started[op is Op.FORWARD, loop] += 1
        if op is Op.INPUT_GRAD:
            waiting.append((loop, microbatch))
        return action(stages[loop], op, microbatch)

    steps: list[Step] = []
    for times, pattern in phases:
        cells = [
            [(Op(text[0]), int(text[1:] or 0)) for text in cell.split("+")]
            for cell in pattern.split()
        ]
        for cell in cells * times:
            parts = tuple(following(op, loop) for op, loop in cell)
            steps.append(parts[0] if len(parts) == 1 else Overlap(parts=parts))
    return steps


def even_groups(microbatches: int, *, ranks: int, number: int | None = None) -> tuple[int, ...]:
    """The sizes of ``number`` groups of microbatches per loop, as even as possible.

    By default as many as leave no group below ``ranks``: a smaller group leaves ranks idle at each
    turn of the loop.
    """
    number = number or max(1, microbatches // ranks)
    size, larger = divmod(microbatches, number)
    return (size + 1,) * larger + (size,) * (number - larger)


def looped_order(*, virtual: int, groups: Sequence[int]) -> list[Chunk]:
    """Chunks group by group: each group goes through all loops before the next group starts."""
    order, first = [], 0
    for size in groups:
        order += [(loop, first + place) for loop in range(virtual) for place in range(size)]
        first += size
    return order


def alternate(forwards: list[Action], backwards: list[Action], *, warmup: int) -> list[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the other backwards."""
    steps = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards, strict=False):
        steps += pair
    return steps + backwards[max(0, len(forwards) - warmup) :]


def alternating(
    name: str,
    placement: Placement,
    microbatches: int,
    *,
    groups: Sequence[int],
    warmups: Sequence[int],
    behind: Sequence[int] | None = None,
) -> Program:
    """On each rank, a warm-up of forwards, followed by one forward and one backward in turn.

    Args:
        placement: stages in a loop.
        groups: the sizes of the groups in which microbatches go round; microbatches beyond the
            program's are left out.
        warmups: for each rank, its forwards before the first backward.
        behind: for each rank, the number of input gradients by which weight gradients lag; None for
            full backwards.
    """
    virtual = placement.num_stages // placement.num_ranks
    order = looped_order(virtual=virtual, groups=groups)
    backward = [(virtual - 1 - loop, microbatch) for loop, microbatch in order]
    op = Op.FULL_BACKWARD if behind is None else Op.INPUT_GRAD
    ranks = []
    for rank, warmup in enumerate(warmups):
        stages = placement.stages_of(rank)
        forwards = chunks(Op.FORWARD, order, stages=stages)
        steps = alternate(forwards, chunks(op, backward, stages=stages), warmup=warmup)
        ranks.append(steps if behind is None else _with_weight_grads(steps, behind[rank]))
    if sum(groups) == microbatches:
        return program_of(name, placement, microbatches, ranks)
    return first_microbatches(name, placement, microbatches, ranks)


def _with_weight_grads(steps: list[Action], behind: int) -> list[Action]:
    """``steps`` with a weight gradient after each input gradient but the first ``behind``."""
    merged: list[Action] = []
    waiting: deque[Action] = deque()
    for step in steps:
        merged.append(step)
        if step.op is Op.INPUT_GRAD:
            waiting.append(action(step.stage, Op.WEIGHT_GRAD, step.microbatch))
            if len(waiting) > behind:
                merged.append(waiting.popleft())
    return [*merged, *waiting]


def first_microbatches(
    name: str, placement: Placement, microbatches: int, ranks: Iterable[Iterable[Step]]
) -> Program:
    """The program restricted to the first ``microbatches``.

    Microbatches depend on each other only through their order. So the remaining order stays valid
    when some are removed, and holds no more activations. An overlapped pair with one action left
    becomes that action.
    """
    restricted = []
    for steps in ranks:
        kept: list[Step] = []
        for step in steps:
            parts = [part for part in step.parts if (part.microbatch or 0) < microbatches]
            kept += [step] if len(parts) == len(step.parts) else parts
        restricted.append(kept)
    return program_of(name, placement, microbatches, restricted)


def phased_v(name: str, ranks: int, microbatches: int, phases: Callable[..., Phases]) -> Program:
    """A program over a V from the phases of each rank, called with its position, ranks and
    microbatches."""
    # Below 2P the phases would overlap, so take the first microbatches of a full V.
    full = max(microbatches, 2 * ranks)
    steps = (
        phased(phases(rank, ranks, full), stages=(rank, 2 * ranks - 1 - rank))
        for rank in range(ranks)
    )
    return first_microbatches(name, v_shape(ranks), microbatches, steps)
