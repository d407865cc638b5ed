"""Shared parts of the builders: orders of forwards and backwards, and their alternation.

This module knows no family; each family's file combines these parts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TypeAlias

from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program

__all__ = [
    "Chunk",
    "Kind",
    "Pattern",
    "alternate",
    "alternating",
    "chunks",
    "even_groups",
    "first_microbatches",
    "looped_order",
    "phased",
    "program_of",
    "trailing",
]

Chunk: TypeAlias = tuple[int, int]
"""A loop (the index of a stage on its rank) and a microbatch."""

Kind: TypeAlias = tuple[Op, int]
"""An operation and a loop."""

Pattern: TypeAlias = Sequence[Kind | tuple[Kind, Kind] | Op]
"""Kinds in order: a pair of kinds is overlapped, and a lone ``Op.WEIGHT_GRAD`` serves any loop."""


def program_of(
    name: str, placement: Placement, microbatches: int, ranks: Iterable[Sequence[Step]]
) -> Program:
    """Build the program of these steps."""
    return Program(
        name=name,
        placement=placement,
        num_microbatches=microbatches,
        ranks=tuple(map(tuple, ranks)),
    )


def chunks(op: Op, order: Sequence[Chunk], *, stages: Sequence[int]) -> list[Action]:
    """``op`` on each chunk in order, where ``stages`` are the rank's stages.

    Example:
        >>> [str(a) for a in chunks(Op.FORWARD, [(0, 0), (1, 0)], stages=(1, 5))]
        ['1F0', '5F0']
    """
    return [action(stages[loop], op, microbatch) for loop, microbatch in order]


def phased(phases: Sequence[tuple[int, Pattern]], *, stages: Sequence[int]) -> list[Step]:
    """Repeated patterns as steps, each kind with its next microbatch.

    Forwards are counted by loop, and so are full backwards and input gradients. A weight gradient
    belongs to the rank's oldest input gradient that has none yet.

    Args:
        phases: pairs of a repeat count (below 1 for none) and a pattern.
        stages: the rank's stages.

    Example:
        >>> f, b, i = (Op.FORWARD, 0), (Op.FULL_BACKWARD, 0), (Op.INPUT_GRAD, 0)
        >>> steps = phased([(1, [f]), (1, [(f, b)]), (2, [i, Op.WEIGHT_GRAD])], stages=(2,))
        >>> [str(step) for step in steps]
        ['2F0', '(2F1;2B0)OVERLAP_F_B', '2I1', '2W1', '2I2', '2W2']
    """
    forward: dict[int, Iterator[int]] = defaultdict(count)
    backward: dict[int, Iterator[int]] = defaultdict(count)
    waiting: deque[Chunk] = deque()

    def following(kind: Kind) -> Action:
        op, loop = kind
        microbatch = next((forward if op is Op.FORWARD else backward)[loop])
        if op is Op.INPUT_GRAD:
            waiting.append((loop, microbatch))
        return action(stages[loop], op, microbatch)

    steps: list[Step] = []
    for times, pattern in phases:
        for _ in range(times):
            for each in pattern:
                match each:
                    case Op():
                        loop, microbatch = waiting.popleft()
                        steps.append(action(stages[loop], each, microbatch))
                    case (Op() as op, int() as loop):
                        steps.append(following((op, loop)))
                    case (tuple() as first, tuple() as second):
                        steps.append(Overlap(parts=(following(first), following(second))))
    return steps


def even_groups(*, microbatches: int, group: int) -> tuple[int, ...]:
    """The sizes of the groups of microbatches per loop: as even as possible, none below ``group``.

    A group smaller than the number of ranks leaves ranks idle at each turn of the loop, so leftover
    microbatches are spread over the other groups.

    Example:
        >>> even_groups(microbatches=8, group=4), even_groups(microbatches=9, group=4)
        ((4, 4), (5, 4))
        >>> even_groups(microbatches=3, group=4)
        (3,)
    """
    number = max(1, microbatches // group)
    size, larger = divmod(microbatches, number)
    return (size + 1,) * larger + (size,) * (number - larger)


def looped_order(*, virtual: int, groups: Sequence[int]) -> list[Chunk]:
    """Chunks group by group: each group goes through all loops before the next group starts.

    Example:
        >>> looped_order(virtual=2, groups=(2, 1))
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    order, first = [], 0
    for size in groups:
        for loop in range(virtual):
            order += [(loop, first + place) for place in range(size)]
        first += size
    return order


def alternate(forwards: list[Action], backwards: list[Action], *, warmup: int) -> list[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the other backwards.

    Example:
        >>> order = [(0, 0), (0, 1), (0, 2)]
        >>> f, b = (chunks(op, order, stages=(0,)) for op in (Op.FORWARD, Op.FULL_BACKWARD))
        >>> " ".join(map(str, alternate(f, b, warmup=1)))
        '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    steps = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards[:steady], strict=True):
        steps += pair
    return steps + backwards[steady:]


def trailing(steps: list[Action], weights: list[Action], *, behind: int) -> list[Action]:
    """``steps`` with a weight gradient after each input gradient but the first ``behind``.

    Example:
        >>> ops = (Op.INPUT_GRAD, Op.WEIGHT_GRAD)
        >>> i, w = (chunks(op, [(0, 0), (0, 1)], stages=(0,)) for op in ops)
        >>> " ".join(map(str, trailing(i, w, behind=1)))
        '0I0 0I1 0W0 0W1'
    """
    merged, inputs = [], 0
    for step in steps:
        merged.append(step)
        if step.op is Op.INPUT_GRAD:
            inputs += 1
            if inputs > behind:
                merged.append(weights[inputs - 1 - behind])
    return merged + weights[max(0, inputs - behind) :]


def alternating(
    placement: Placement,
    *,
    groups: Sequence[int],
    warmups: Sequence[int],
    behind: Sequence[int] | None = None,
) -> list[list[Action]]:
    """For each rank, a warm-up of forwards, followed by one forward and one backward in turn.

    Args:
        placement: stages in a loop.
        groups: the sizes of the groups in which microbatches go round.
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
        if behind is not None:
            weights = chunks(Op.WEIGHT_GRAD, backward, stages=stages)
            steps = trailing(steps, weights, behind=behind[rank])
        ranks.append(steps)
    return ranks


def first_microbatches(
    ranks: Sequence[Sequence[Step]], *, name: str, placement: Placement, microbatches: int
) -> Program:
    """The program restricted to the first ``microbatches``.

    Microbatches depend on each other only through their order. So the remaining order stays valid
    when some are removed, and holds no more activations. An overlapped pair with one action left
    becomes that action.

    Example:
        >>> from penstock.schedule.placement import linear
        >>> pair = Overlap(parts=(action(0, Op.FORWARD, 1), action(0, Op.FULL_BACKWARD, 0)))
        >>> program = first_microbatches(
        ...     [[action(0, Op.FORWARD, 0), pair, action(0, Op.FULL_BACKWARD, 1)]],
        ...     name="example", placement=linear(1), microbatches=1,
        ... )
        >>> " ".join(map(str, program.ranks[0]))
        '0F0 0B0'
    """
    kept = (tuple(_kept(steps, microbatches)) for steps in ranks)
    return program_of(name, placement, microbatches, kept)


def _kept(steps: Sequence[Step], microbatches: int) -> Iterator[Step]:
    for step in steps:
        parts = tuple(
            part for part in step.parts if part.microbatch is None or part.microbatch < microbatches
        )
        if len(parts) == len(step.parts):
            yield step
        elif len(parts) > 1:
            yield Overlap(parts=parts)
        else:
            yield from parts
