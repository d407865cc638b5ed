"""What each action costs in a simulated step.

Costs are abstract: their unit is the caller's (1, seconds, microseconds), and the simulated times
come in the same unit. This module knows neither programs nor the order in which anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Op

__all__ = ["Cost", "Costs"]

Cost: TypeAlias = float | Sequence[float]
"""One number for all stages, or a sequence with one number per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The time that each kind of action takes, per stage.

    Args:
        forward: a forward F.
        input_grad: an input-gradient backward I.
        weight_grad: a weight-gradient backward W. A full backward B takes ``input_grad`` and
            ``weight_grad`` together.
        latency: from the end of an action to the arrival of its result on another rank; per
            sending stage. It takes no compute time.
        overlap: a block that overlaps a forward and a backward, at the stage of its first part;
            None where it lasts as long as its parts one after the other.

    Each is one number for all stages, or a sequence of one number per stage. They are kept as
    floats and tuples of floats, so that costs are hashable and compare by value.

    Raises:
        ScheduleError: a cost that is negative, infinite, not a number, or an empty sequence.

    Example:
        >>> Costs(forward=[1, 2]).of(Op.FORWARD, num_stages=2)
        (1.0, 2.0)
        >>> Costs(input_grad=1, weight_grad=0.5).of(Op.FULL_BACKWARD, num_stages=3)
        (1.5, 1.5, 1.5)
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    latency: Cost = 0.0
    overlap: Cost | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None:
                object.__setattr__(self, field.name, _normal(field.name, given))

    def of(self, op: Op, *, num_stages: int) -> tuple[float, ...]:
        """The cost of ``op`` on each stage; 0 for what takes no compute time.

        Args:
            op: the operation.
            num_stages: number of stages of the program.

        Raises:
            ScheduleError: a cost was given per stage, but not for ``num_stages`` stages.
        """
        match op:
            case Op.FORWARD:
                return self.per_stage("forward", num_stages=num_stages)
            case Op.INPUT_GRAD:
                return self.per_stage("input_grad", num_stages=num_stages)
            case Op.WEIGHT_GRAD:
                return self.per_stage("weight_grad", num_stages=num_stages)
            case Op.FULL_BACKWARD:
                inputs = self.per_stage("input_grad", num_stages=num_stages)
                weights = self.per_stage("weight_grad", num_stages=num_stages)
                return tuple(i + w for i, w in zip(inputs, weights, strict=True))
            case _:
                return (0.0,) * num_stages

    def per_stage(self, name: str, *, num_stages: int) -> tuple[float, ...]:
        """The cost called ``name`` (a field that is not None), one number per stage.

        Args:
            name: one of the fields, such as ``"latency"``.
            num_stages: number of stages of the program.

        Raises:
            ScheduleError: the cost was given per stage, but not for ``num_stages`` stages.
        """
        value = getattr(self, name)
        if isinstance(value, float):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise ScheduleError(
                f"Costs({name}=...) has {len(value)} numbers, but the program has {num_stages} "
                "stages; give one number for all stages, or one per stage"
            )
        return tuple(value)


def _normal(name: str, given: Cost) -> float | tuple[float, ...]:
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        if not given:
            raise ScheduleError(f"Costs({name}=...) is empty; give at least one number")
        return tuple(_number(name, each) for each in given)
    return _number(name, given)


def _number(name: str, given: object) -> float:
    try:
        number = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ScheduleError(f"Costs({name}=...): {given!r} is not a finite number ≥ 0")
    return number
