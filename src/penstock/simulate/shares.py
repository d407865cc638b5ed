"""Costs of a rank's whole part of a model, shared out over its stages.

    1f1b, one stage per rank     F costs 2
    zbv, two stages per rank     F costs 1 each: the same model, cut finer

This module knows no program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.errors import ScheduleError
from penstock.simulate.costs import Costs

__all__ = ["share_out"]

_SHARED = ("forward", "input_grad", "weight_grad", "overlap", "activation_bytes")


def share_out(costs: Costs, virtual: int) -> Costs:
    """What one of ``virtual`` equal stages costs, where ``costs`` are those of all together.

    Args:
        costs: one number each; what messages take is left as it is.
        virtual: stages per rank; where sequences are split, times the pieces of each.

    Raises:
        ScheduleError: a cost that is given per stage.

    Example:
        >>> share_out(Costs(forward=3, latency=1), 2).forward
        1.5
    """
    shared: dict[str, Any] = {}
    for name in _SHARED:
        cost = getattr(costs, name, None)
        if cost is None:
            continue
        if not isinstance(cost, float):
            raise ScheduleError(
                f"{name} is given per stage; costs of a rank's whole part are one number each"
            )
        shared[name] = cost / virtual
    return replace(costs, **shared)
