"""Builds schedules that look at costs, such as the searched ones, for the costs of a simulation."""

from __future__ import annotations

from dataclasses import fields

from penstock.schedule.program import Program
from penstock.schedule.registry import build, family
from penstock.simulate.costs import Costs

__all__ = ["build_for", "wanted_costs"]

_COSTS = frozenset(field.name for field in fields(Costs))


def build_for(
    costs: Costs,
    name: str,
    /,
    *,
    ranks: int,
    microbatches: int,
    virtual: int | None = None,
    **options: object,
) -> Program:
    """``penstock.build``, where options of the schedule that are costs are those of ``costs``.

    Args:
        costs: what each kind of action costs.
        name: the schedule's.
        ranks: number of ranks.
        microbatches: microbatches per step.
        virtual: stages per rank; None for what is usual.
        options: the schedule's; they go before ``costs``.

    Raises:
        ScheduleError: as ``penstock.build``.

    Example:
        >>> build_for(Costs(forward=2), "1f1b", ranks=2, microbatches=4).num_stages
        2
    """
    wanted = wanted_costs(costs, name)
    return build(
        name, ranks=ranks, microbatches=microbatches, virtual=virtual, **{**wanted, **options}
    )


def wanted_costs(costs: Costs, name: str) -> dict[str, object]:
    """Those of ``costs`` that a schedule is built for, as options of it.

    Raises:
        ScheduleError: there is no such schedule.

    Example:
        >>> wanted_costs(Costs(forward=2), "zb-1p"), wanted_costs(Costs(forward=2), "1f1b")
        ({'forward': 2.0, 'input_grad': 1.0, 'weight_grad': 1.0}, {})
    """
    return {each: getattr(costs, each) for each in family(name).options if each in _COSTS}
