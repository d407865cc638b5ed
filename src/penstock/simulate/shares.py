"""Costs of a rank's whole part of a model, shared out over its stages.

    1f1b, one stage per rank     F costs 2
    zbv, two stages per rank     F costs 1 each: the same model, cut finer

A rank's part is one P-th of the model: several stages, one, or less where ranks hold copies.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs

__all__ = ["share_of", "share_out"]

# Of messages, of channels, and of how these work: nothing of that gets less with finer stages.
_WHOLE = (
    "latency",
    "message_bytes",
    "bandwidth",
    "offload_bandwidth",
    "transfers_overlap",
    "one_message_at_a_time",
)
# Without ``activation_bytes`` these are in activations of a stage, which are smaller by themselves.
_HELD = ("weight_grad_bytes", "recompute_bytes")


def share_of(program: Program) -> float:
    """By what a rank's costs are divided for a stage, or for a stage's piece of a sequence.

    Of two copies of a model a microbatch passes one, so that a rank may have less than one stage.

    Example:
        >>> from penstock.schedule.registry import build
        >>> [share_of(build(name, ranks=4, microbatches=8)) for name in ("zbv", "dualpipe")]
        [2.0, 1.0]
    """
    return program.placement.num_model_stages / program.num_ranks * program.num_splits


def share_out(costs: Costs, share: float) -> Costs:
    """What one of several equal stages costs, where ``costs`` are those of a rank's whole part.

    Args:
        costs: one number each; what messages take is left as it is.
        share: by what to divide them (``share_of``).

    Raises:
        ScheduleError: a cost that is given per stage.

    Example:
        >>> share_out(Costs(forward=3, latency=1), 2).forward
        1.5
    """
    shared: dict[str, Any] = {}
    whole = (*_WHOLE, *_HELD) if costs.activation_bytes is None else _WHOLE
    for name in (field.name for field in fields(costs) if field.name not in whole):
        cost = getattr(costs, name)
        if cost is None:
            continue
        if not isinstance(cost, float):
            raise ScheduleError(
                f"{name} is given per stage; costs of a rank's whole part are one number each"
            )
        shared[name] = cost / share
    return replace(costs, **shared)
