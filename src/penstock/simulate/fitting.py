"""Builds schedules that look at costs, such as the searched ones, for the costs of a simulation."""

from __future__ import annotations

from dataclasses import fields

from penstock.schedule.catalog import build, family
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs

__all__ = ["build_for"]

_COSTS = frozenset(field.name for field in fields(Costs))


def build_for(
    costs: Costs,
    name: str,
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
    known = {each: getattr(costs, each) for each in family(name).options if each in _COSTS}
    return build(
        name, ranks=ranks, microbatches=microbatches, virtual=virtual, **{**known, **options}
    )
