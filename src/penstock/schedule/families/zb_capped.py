"""ZB-1p and ZB-2p: zero bubble for given costs, in the memory of P or of 2P activations.

ZB-1p, P = 3, M = 5 (tF = tB = tW = 1), which is ZB-H1:

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

ZB-2p, P = 3, M = 6:

    rank 0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .. ..
    rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 ..
    rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5

The best of list schedules with several warm-ups, from 1F1B's to the longest that the memory allows,
of ZB-H1 and ZB-H2 where those fit, and of list schedules that run input gradients first: by span,
then by makespan. If it is faster so, ZB-2p counts memory as its paper does: from I to W a rank
holds only what W needs, 0.4 of an activation (0.37 to 0.43 in the paper's models). Any P ≥ 1,
M ≥ 1.

Source: arXiv:2401.10241, sec. 3.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.schedule.families.common import alternate, program_of
from penstock.schedule.families.costed import CostedStep, StageCost
from penstock.schedule.families.zero_bubble import zb_h1, zb_h2
from penstock.schedule.placement import linear
from penstock.schedule.program import Program

__all__ = ["zb_1p", "zb_2p"]

# Candidate warm-ups: forwards before the first input gradient per later rank, and ``spare`` of
# ``list_schedule``.
_WARMUPS = ((1.0, None), (1.0, 0), (1.5, None), (2.0, None), (2.0, 0), (3.0, 0))
# Candidate patience of forwards and of weight gradients, where input gradients go first.
_PATIENCE = ((0.0, 0.0), (0.3, 0.1), (0.0, 0.3), (0.0, 0.6))
# The share of an activation that ZB-2p counts from I to W.
_WEIGHT_SHARE = 0.4


def zb_1p(*, ranks: int, microbatches: int, **costs: StageCost) -> Program:
    """Zero bubble built for given costs, in the memory of P activations; ZB-H1 without costs."""
    if not costs:
        return replace(zb_h1(ranks=ranks, microbatches=microbatches), name="zb-1p")
    return _best("zb-1p", ranks, microbatches, ranks, (1.0,), **costs)


def zb_2p(*, ranks: int, microbatches: int, **costs: StageCost) -> Program:
    """Zero bubble built for given costs, in the memory of 2P activations."""
    return _best("zb-2p", ranks, microbatches, 2 * ranks, (1.0, _WEIGHT_SHARE), **costs)


def _best(
    name: str,
    ranks: int,
    microbatches: int,
    limit: int,
    weight_shares: tuple[float, ...],
    **costs: Any,
) -> Program:
    placement = linear(ranks)
    step = CostedStep(name, placement, microbatches, limit, **costs)
    for ahead, spare in _WARMUPS:
        if step.is_done:
            break
        warmups = [min(limit - 1, math.ceil(ahead * (ranks - 1 - r))) for r in range(ranks)]
        orders = [
            alternate([rank] * microbatches, [rank + ranks] * microbatches, warmup=warmup)
            for rank, warmup in enumerate(warmups)
        ]
        step.add_filled(orders, spare=spare)
    for other in (zb_h1, zb_h2):
        if other is zb_h1 or limit >= 2 * ranks - 1:
            step.add(step.work.order(other(ranks=ranks, microbatches=microbatches)))
    for share, (forwards, weights) in product(weight_shares, _PATIENCE):
        if not step.is_done:
            step.add_urgent(forwards=forwards, weights=weights, weight_share=share)
    return program_of(name, placement, microbatches, step.order)
