"""ZB-1p and ZB-2p: zero bubble for given costs, in the memory of P or of 2P activations.

ZB-1p, P = 3, M = 5 (tF = tB = tW = 1), which is ZB-H1:

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

ZB-2p, P = 3, M = 6:

    rank 0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5

The best, by makespan and then by span, of list schedules with several warm-ups, from 1F1B's to the
longest that the memory allows, and of ZB-H1 and ZB-H2 where those fit. The result depends on the
costs alone; ``penstock.search`` takes more time, and finds more. Any P ≥ 1, M ≥ 1.

Source: arXiv:2401.10241, sec. 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.families.common import alternate, program_of
from penstock.schedule.families.zero_bubble import zb_h1, zb_h2
from penstock.schedule.index import index_program
from penstock.schedule.list_schedule import KIND_OPS, PerStage, Scheduled, list_schedule
from penstock.schedule.placement import linear
from penstock.schedule.program import Program
from penstock.schedule.replay import replay_of

__all__ = ["zb_1p", "zb_2p"]

_Costs: TypeAlias = tuple[PerStage, PerStage, PerStage]

# Candidate warm-ups: forwards before the first input gradient per later rank, and ``spare`` of
# ``list_schedule``.
_WARMUPS = ((1.0, None), (1.0, 0), (1.5, None), (2.0, None), (2.0, 0), (3.0, 0))


def zb_1p(*, ranks: int, microbatches: int, **costs: float | Sequence[float]) -> Program:
    """Zero bubble searched for given costs, in the memory of P activations."""
    return _best("zb-1p", ranks, microbatches, ranks, **costs)


def zb_2p(*, ranks: int, microbatches: int, **costs: float | Sequence[float]) -> Program:
    """Zero bubble searched for given costs, in the memory of 2P activations."""
    return _best("zb-2p", ranks, microbatches, 2 * ranks, **costs)


def _best(
    name: str,
    ranks: int,
    microbatches: int,
    limit: int,
    *,
    forward: float | Sequence[float] = 1,
    input_grad: float | Sequence[float] = 1,
    weight_grad: float | Sequence[float] = 1,
) -> Program:
    costs = (
        _per_stage(name, "forward", forward, ranks),
        _per_stage(name, "input_grad", input_grad, ranks),
        _per_stage(name, "weight_grad", weight_grad, ranks),
    )
    placement, least = linear(ranks), _least(microbatches, costs)
    best = Scheduled(order=(), makespan=inf, span=inf)
    for candidate in (*_WARMUPS, zb_h1, zb_h2):
        if (best.makespan, best.span) <= least:
            break
        if isinstance(candidate, tuple):
            ahead, spare = candidate
            warmups = [min(limit - 1, math.ceil(ahead * (ranks - 1 - r))) for r in range(ranks)]
            orders = [
                alternate([rank] * microbatches, [rank + ranks] * microbatches, warmup=warmup)
                for rank, warmup in enumerate(warmups)
            ]
            found = list_schedule(
                placement, orders, limit=limit, spare=spare, costs=costs, within=best.makespan
            )
        elif candidate is zb_h1 or limit >= 2 * ranks - 1:
            found = _timed(candidate(ranks=ranks, microbatches=microbatches), costs)
        # Ties go to the first: the shortest warm-up.
        best = min(best, found, key=lambda each: (each.makespan, each.span))
    return program_of(name, placement, microbatches, best.order)


def _least(microbatches: int, costs: _Costs) -> tuple[float, float]:
    """A lower bound on makespan and span: the work of a rank, after the forwards of earlier ones.

    Zeros for fractions, since their sums depend on the order.
    """
    if not all(cost.is_integer() for kind in costs for cost in kind):
        return 0.0, 0.0
    work = [microbatches * sum(each) for each in zip(*costs, strict=True)]
    starts = accumulate(costs[0], initial=0.0)
    return max(start + each for start, each in zip(starts, work, strict=False)), max(work)


def _timed(program: Program, costs: _Costs) -> Scheduled:
    """A program of another family, with its times."""
    indexed = index_program(program)
    durations = [0.0] * indexed.num_rows
    for op, per_stage in zip(KIND_OPS, costs, strict=True):
        for stage, cost in enumerate(per_stage):
            durations[indexed.row(op, stage)] = cost
    replay = replay_of(indexed, indexed.required(), durations=durations)
    replay.play()
    spans = (ends[-1] - starts[0] for starts, ends in zip(replay.starts, replay.ends, strict=True))
    return Scheduled(
        order=[
            [
                KIND_OPS.index(act.op) * program.num_stages + act.stage
                for step in steps
                for act in step.parts
            ]
            for steps in program.ranks
        ],
        makespan=max(ends[-1] for ends in replay.ends),
        span=max(spans),
    )


def _per_stage(name: str, kind: str, given: float | Sequence[float], ranks: int) -> PerStage:
    numbers = tuple(given) if isinstance(given, Sequence) else (given,) * ranks
    if len(numbers) != ranks:
        raise ScheduleError(
            f"{name}: {kind} has {len(numbers)} numbers for {ranks} stages; give one number for "
            "all, or one per stage"
        )
    for each in numbers:
        real = isinstance(each, (int, float)) and not isinstance(each, bool)
        if not (real and 0 <= each < inf):
            raise ScheduleError(f"{name}: {kind}={each!r} must be a finite number from 0 on")
    return tuple(map(float, numbers))
