"""V-Min, V-Half, V-ZB, 1F1B-V and Hanayo: periodic patterns over Vs and waves, list-scheduled.

P = 2, M = 4 (tF = tB = tW = 1); lower case is a rank's second stage, on the way up. V-Min:

    rank 0  F0 F1 .. f0 i0 f1 w0 I0 i1 F2 W0 w1 I1 f2 i2 F3 W1 w2 I2 f3 i3 W2 w3 I3 W3
    rank 1  .. F0 f0 F1 f1 i0 I0 w0 W0 i1 F2 I1 f2 w1 W1 i2 F3 I2 f3 w2 W2 i3 I3 w3 W3

V-Half:

    rank 0  F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 f3 i3 I2 W1 I3 w3 W2 W3
    rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3

V-ZB:

    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 f3 i3 I2 w3 I3 W2 W3 ..
    rank 1  .. F0 f0 F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3

1F1B-V, with full backwards:

    rank 0  F0 F1 .. f0 b0 -- f1 b1 -- F2 B0 -- f2 b2 -- F3 B1 -- f3 b3 -- .. B2 -- .. .. B3 --
    rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- F2 f2 b1 -- B1 -- F3 f3 b2 -- B2 -- b3 -- B3 -- .. ..

A rank repeats two forwards and two backwards every six units. The distance from rank to rank is 1
on the way down, and as below on the way up. The longer it is, the longer activations live, each of
half the size of a 1F1B stage's. Bubbles, in chunks, where tF = tB = tW (1F1B's is 6(P - 1)):

              up    activations held      bubble
    v-min     1     2⌊(P + 4) / 3⌋        4P - 5 at most where 3 divides P - 1, else 4P - 7 (M ≥ P)
    v-half    2     2⌊(P + 2) / 2⌋        6⌊(P - 1) / 2⌋ - 1, for M ≥ P ≥ 3
    v-zb      5     2P                    (P - 1) tF, none in the ranks' own spans, for M ≥ 2P
    1f1b-v    1     2⌊(2P + 2) / 3⌋       5(P - 1) where 3 divides P - 1, 5P - 6 where it divides
                                          P - 2, for M ≥ P

Where 3 divides P, 1F1B-V's shortest pattern takes one activation more than its memory, so ranks
wait, and from M = 2P on the whole takes longer than 1F1B. Given costs and latency, patterns are
list-scheduled with these, too, and the order with the shortest span is taken. Any P ≥ 1, M ≥ 1.

Hanayo with one wave (V = 2), P = 2, M = 3:

    rank 0  F0 F1 F2 f0 b0 -- f1 b1 -- .. B0 -- .. .. B1 -- f2 b2 -- .. .. .. .. B2 --
    rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- b1 -- B1 -- F2 f2 .. .. .. b2 -- B2 -- .. ..

W waves put 2W stages on each rank, down and up again W times. P microbatches go together, each rank
running whatever is ready, backwards and later stages first; the next P start as soon as memory
allows. Each rank holds at most 2W·min(P, M) activations. Where tF = tB = tW = 1 and P ≥ 2 the
bubble of M = P microbatches is 4(P - 1) chunks for any W; every further P microbatches add 2P - 3
(simulated; the paper's formula gives other figures). Any P ≥ 1, M ≥ 1 and W ≥ 1.

Source: arXiv:2405.15362, sec. 3; the pattern of 1F1B-V is chosen here. Hanayo: arXiv:2308.15762.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedule.families.common import program_of
from penstock.schedule.families.costed import CostedStep
from penstock.schedule.families.periodic import chain_pattern
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.placement import v_shape, wave
from penstock.schedule.program import Program

__all__ = ["hanayo", "one_f_one_b_v", "v_half", "v_min", "v_zb"]


def v_min(*, ranks: int, microbatches: int, **costs: Any) -> Program:
    """About a third of 1F1B's memory, by a periodic pattern over a V-shape."""
    # Unless P = 1 (mod 3), passes down and up would conflict on some rank.
    turns = (1, 1, 1) if ranks % 3 == 1 else (2, 1, 1)
    limit = 2 * ((ranks + 4) // 3)
    return _v_program("v-min", ranks, microbatches, (1, 1, 1, 1), turns, limit, costs, spare=1)


def v_half(*, ranks: int, microbatches: int, **costs: Any) -> Program:
    """Half of 1F1B's memory and about half of its bubble, by a periodic pattern over a V-shape."""
    # For even P, backwards that start at once would conflict with forwards on every rank, and lose
    # a unit on each; with these turns they conflict with none after the first.
    turns = (3, 2, 2) if ranks % 2 == 0 else (1, 1, 1)
    limit = 2 * ((ranks + 2) // 2)
    return _v_program("v-half", ranks, microbatches, (1, 2, 1, 2), turns, limit, costs, spare=1)


def v_zb(*, ranks: int, microbatches: int, **costs: Any) -> Program:
    """Zero bubble by a periodic pattern over a V-shape, in the memory of 1F1B."""
    legs, turns, limit = (1, 5, 1, 5), (1, 1, 1), 2 * ranks
    return _v_program("v-zb", ranks, microbatches, legs, turns, limit, costs, spare=0)


def one_f_one_b_v(*, ranks: int, microbatches: int, **costs: Any) -> Program:
    """1F1B over a V-shape, with whole backwards, in two thirds of its memory."""
    # A pattern beyond its memory can continue only if any ready action may run out of order.
    tight = ranks % 3 == 0
    return _v_program(
        "1f1b-v",
        ranks,
        microbatches,
        (1, 1, 2, 2),
        (1, 1, 2),
        2 * ((2 * ranks + 2) // 3),
        costs,
        spare=int(not tight),
        overtake=tight,
        full=True,
    )


def _v_program(
    name: str,
    ranks: int,
    microbatches: int,
    legs: tuple[int, int, int, int],
    turns: tuple[int, int, int],
    limit: int,
    costs: Mapping[str, Any],
    *,
    spare: int,
    overtake: bool = False,
    full: bool = False,
) -> Program:
    """A V-shaped pattern, repeated every six units, then list-scheduled.

    ``legs`` are the gaps from rank to rank, of forwards down, forwards up, and backwards along each
    of these; ``turns`` the gaps between two actions on one rank: at the foot of the V, at the
    model's end, and at the foot again. The rest is as ``list_schedule`` takes it.
    """
    placement = v_shape(ranks)
    gaps = [legs[0]] * (ranks - 1)
    for turn, leg in zip(turns, legs[1:], strict=True):
        gaps += [turn, *[leg] * (ranks - 1)]
    pattern = chain_pattern(placement, gaps=gaps, period=6, full=full)
    orders = pattern.orders(placement, microbatches=microbatches)
    order = list_schedule(placement, orders, limit=limit, full=full, spare=spare, overtake=overtake)
    program = program_of(name, placement, microbatches, order, full=full)
    if not costs:
        return program
    step = CostedStep(name, placement, microbatches, limit, full=full, **costs)
    step.add(step.work.order(program))
    own = [[kind for kind in kinds if kind < 2 * placement.num_stages] for kinds in step.order]
    for order, other in product((orders, own), (spare, None)):
        # Slow messages may leave an order beyond its memory.
        with suppress(ScheduleError):
            step.add_filled(order, spare=other, overtake=overtake)
    return program_of(name, placement, microbatches, step.order, full=full)


def hanayo(*, ranks: int, microbatches: int, virtual: int) -> Program:
    """Waves of stages down and up the ranks, so that a microbatch turns without a message."""
    waves = virtual // 2
    placement = wave(ranks, waves)
    group = min(ranks, microbatches)
    limit = 2 * waves * group
    gaps = [1] * placement.num_stages + [2] * (placement.num_stages - 1)
    pattern = chain_pattern(placement, gaps=gaps, period=6 * waves, full=True)
    orders = pattern.orders(placement, microbatches=group)
    # The order of one group: ready actions, by their time in the pattern.
    once = list_schedule(placement, orders, limit=limit, full=True, spare=0, overtake=True)
    repeated = [_repeated(kinds, group, microbatches) for kinds in once]
    order = list_schedule(placement, repeated, limit=limit, full=True, spare=0)
    return program_of("hanayo", placement, microbatches, order, full=True)


def _repeated(kinds: Sequence[int], group: int, microbatches: int) -> list[int]:
    """The order of one group for all, of which the last may have fewer microbatches."""
    count: Counter[int] = Counter()
    repeated = []
    for kind in [*kinds] * -(-microbatches // group):
        count[kind] += 1
        if count[kind] <= microbatches:
            repeated.append(kind)
    return repeated
