"""The cost of each action in a simulated step: time, messages, memory.

Costs are abstract: simulated times and peaks come in the caller's unit (1, seconds, microseconds;
bytes, activations).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family
from penstock.schedule.wording import number_of

__all__ = [
    "Cost", "Costs", "as_number", "build_for", "costs_divisor", "per_stage_costs",
    "refuse_no_costs",
]  # fmt: skip

Cost: TypeAlias = float | Sequence[float]
"""One number for all stages, or a sequence with one number per stage."""

_Stored: TypeAlias = float | tuple[float, ...]

_SWITCHES = ("transfers_overlap", "one_message_at_a_time")
# The costs that the stages of a rank share; the second only if activations are sized.
_SHARED = ("forward", "input_grad", "weight_grad", "overlap", "recompute", "offload", "reload")
_SHARED_BYTES = ("activation_bytes", "weight_grad_bytes", "recompute_bytes")
# The costs that make up the time of an op; others take none.
_TIMES = {
    Op.FORWARD: ("forward",),
    Op.FULL_BACKWARD: ("input_grad", "weight_grad"),
    Op.INPUT_GRAD: ("input_grad",),
    Op.WEIGHT_GRAD: ("weight_grad",),
    Op.RECOMPUTE: ("recompute",),
    Op.OFFLOAD: ("offload",),
    Op.RELOAD: ("reload",),
}
# Sums and quotients of numbers in this range are finite, and above 0.
_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The compute time, messages and memory of each kind of action, per stage.

    Args:
        forward: a forward F.
        input_grad: an input-gradient backward I.
        weight_grad: a weight-gradient backward W. A full backward B takes I's and W's time.
        latency: from the end of an action to the arrival of its result on another rank, beside the
            compute. Of one number per stage, each holds between the stage and the next one, both
            ways, and the last stage's value is ignored.
        overlap: an overlapped pair of a forward and a backward, by the stage of its first action;
            None for the sum of both times.
        recompute: a second forward, ahead of the backward; None for the cost of ``forward``.
        offload: the copy of an activation to the host, beside the compute; None for no time.
        reload: the copy back to the device; None as for ``offload``.
        message_bytes: the size of a stage's message to the next stage, per microbatch, and of the
            gradient sent back. The last stage's value is ignored.
        bandwidth: bytes per unit of time between two ranks, given as ``latency``. A message takes
            its bytes ÷ bandwidth, then the latency. None for the latency alone.
        activation_bytes: held by a stage for a microbatch from the start of F to the end of I, or
            of B; None to count activations instead of bytes, 1 each.
        weight_grad_bytes: held from the end of I to the end of W, less or more than
            ``activation_bytes``; None for the same.
        recompute_bytes: held from F to the recomputation, if a stage is recomputed.
        transfers_overlap: if True, a rank computes while its messages travel; if False, it idles
            for bytes ÷ bandwidth after each result that it sends.
        one_message_at_a_time: if True, messages from one rank to another travel one after another;
            if False, each has the full bandwidth.

    UNSHARD, RESHARD and REDUCE_GRAD cost nothing: what replicas gather and reduce is not simulated.
    A cost is one number for all stages, or a sequence with one number per stage. Costs are stored
    as floats and tuples of floats, so that they are hashable and compare by value.

    Raises:
        ScheduleError: a cost that is negative, infinite, beyond 1e100, not a number, or an empty
            sequence; a bandwidth of 0.

    Examples:
        >>> Costs(input_grad=[1, 2], weight_grad=0.5).of(Op.FULL_BACKWARD, num_stages=2)
        (1.5, 2.5)
        >>> slow = Costs(latency=[0, 5, 0])
        >>> [slow.latency_between(*edge, num_stages=3) for edge in ((0, 1), (1, 2), (2, 1))]
        [0.0, 5.0, 5.0]
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    latency: Cost = 0.0
    overlap: Cost | None = None
    recompute: Cost | None = None
    offload: Cost | None = None
    reload: Cost | None = None
    message_bytes: Cost = 0.0
    bandwidth: Cost | None = None
    activation_bytes: Cost | None = None
    weight_grad_bytes: Cost | None = None
    recompute_bytes: Cost = 0.0
    transfers_overlap: bool = True
    one_message_at_a_time: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            name, given = field.name, getattr(self, field.name)
            if name in _SWITCHES:
                if not isinstance(given, bool):
                    raise _wrong(name, f": {given!r} is not True or False")
            elif given is not None or field.default is not None:
                object.__setattr__(self, name, _normal(name, given))

    def of(self, op: Op, *, num_stages: int) -> tuple[float, ...]:
        """The time of ``op`` on each stage; 0 for an op that has no cost.

        Raises:
            ScheduleError: a cost was given per stage, but not for ``num_stages`` stages.
        """
        plain = op is Op.RECOMPUTE and self.recompute is None
        names = ("forward",) if plain else _TIMES.get(op, ())
        given = [name for name in names if getattr(self, name) is not None]
        costs = [self.per_stage(name, num_stages=num_stages) for name in given]
        return tuple(map(sum, zip(*costs, strict=True))) if costs else (0.0,) * num_stages

    def latency_between(self, stage: int, to_stage: int, *, num_stages: int) -> float:
        """The latency of a message from a stage to a neighbour on another rank."""
        return self.per_stage("latency", num_stages=num_stages)[min(stage, to_stage)]

    def transfer(self, stage: int, to_stage: int, *, num_stages: int) -> float:
        """The transfer time of a message to a neighbour on another rank, without latency."""
        if self.bandwidth is None:
            return 0.0
        # The gradient that a stage receives is as large as the activation it sent.
        lower = min(stage, to_stage)
        size = self.per_stage("message_bytes", num_stages=num_stages)[lower]
        return size / self.per_stage("bandwidth", num_stages=num_stages)[lower]

    def travel(self, stage: int, to_stage: int, placement: Placement) -> float:
        """The time that a result travels from a stage to a neighbour; 0 on the same rank."""
        if placement.same_rank(stage, to_stage):
            return 0.0
        latency = self.latency_between(stage, to_stage, num_stages=placement.num_stages)
        return latency + self.transfer(stage, to_stage, num_stages=placement.num_stages)

    def per_stage(self, name: str, *, num_stages: int) -> tuple[float, ...]:
        """The cost of a field that is not None, as one number per stage.

        Raises:
            ScheduleError: the cost was given for another number of stages.
        """
        value: _Stored = getattr(self, name)
        if isinstance(value, float):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise _wrong(
                name,
                f" has {number_of(len(value), 'number')}, but the program has "
                f"{number_of(num_stages, 'stage')}; give one number for all stages, or one each",
            )
        return value

    def refuse_misfits(self, placement: Placement) -> None:
        """Refuse costs that do not fit a placement, even if no program uses them.

        Raises:
            ScheduleError: a cost for another number of stages.
        """
        for field in fields(self):
            if field.name not in _SWITCHES and getattr(self, field.name) is not None:
                self.per_stage(field.name, num_stages=placement.num_stages)


def build_for(costs: Costs, name: str, /, *, per_rank: bool = False, **options: Any) -> Program:
    """Call ``penstock.build`` with the costs that are options of the schedule.

    With ``per_rank``, costs are those of a rank's whole part of the model (``per_stage_costs``).

    Examples:
        >>> build_for(Costs(forward=2), "1f1b", ranks=2, microbatches=4).num_stages
        2
    """
    chosen = family(name)
    if per_rank and chosen.costs:
        costs = per_stage_costs(costs, chosen.default_virtual)
    wanted = {each: getattr(costs, each) for each in chosen.costs}
    if "latency" in wanted and costs.bandwidth is not None:
        stages = options["ranks"] * chosen.default_virtual
        wanted["latency"] = [
            costs.latency_between(stage, stage + 1, num_stages=stages)
            + costs.transfer(stage, stage + 1, num_stages=stages)
            for stage in range(stages)
        ]
    return build(name, **{**wanted, **options})


def costs_divisor(program: Program) -> float:
    """The ratio of a rank's costs to those of one of its stages, or of one sequence chunk.

    A rank's part is one P-th of the model: several stages, one, or less if ranks hold copies.

    Examples:
        >>> [costs_divisor(build(name, ranks=4, microbatches=8)) for name in ("zbv", "dualpipe")]
        [2.0, 1.0]
    """
    return program.placement.num_model_stages / program.num_ranks * program.num_splits


def per_stage_costs(costs: Costs, share: float) -> Costs:
    """The costs of one of several equal stages, from the costs of a rank's whole part of the model.

    ``share`` is the divisor (``costs_divisor``); costs of messages are kept.

    Raises:
        ScheduleError: a cost that is given per stage, unless ``share`` is 1.
    """
    if share == 1:
        return costs
    names = _SHARED if costs.activation_bytes is None else _SHARED + _SHARED_BYTES
    shared = {name: cost for name in names if (cost := getattr(costs, name)) is not None}
    for name, cost in shared.items():
        if not isinstance(cost, float):
            raise ScheduleError(
                f"{name} is given per stage; give one number for a rank's whole part, or compare "
                "schedules per stage"
            )
    return replace(costs, **{name: cost / share for name, cost in shared.items()})


def _wrong(name: str, text: str) -> ScheduleError:
    return ScheduleError(f"Costs({name}=...){text}", parameter=name)


def _normal(name: str, given: object) -> _Stored:
    """A cost as it is stored."""
    if isinstance(given, Collection) and not isinstance(given, (str, bytes, Set, Mapping)):
        # An array without dimensions is a number.
        with suppress(TypeError):
            given = tuple(given)
    if not isinstance(given, tuple):
        return _number(name, given)
    if not given:
        raise _wrong(name, " is empty; give at least one number")
    return tuple(_number(name, each) for each in given)


def _number(name: str, given: object) -> float:
    number = as_number(given)
    if number == 0 and name == "bandwidth":
        raise _wrong(name, ": 0 moves nothing; leave it out where it is no limit")
    if not (math.isfinite(number) and number >= 0):
        shown = number if math.isinf(number) else given
        raise _wrong(name, f": {shown!r} is not a finite number ≥ 0")
    if number and not _LEAST <= number <= _MOST:
        raise _wrong(name, f": {number:g} is out of range; give 0, or {_LEAST:g} to {_MOST:g}")
    return number


def refuse_no_costs(value: object, caller: str) -> None:
    """Raise a ScheduleError that names ``caller`` if a value is not ``Costs``."""
    if not isinstance(value, Costs):
        raise ScheduleError(
            f"{caller} takes costs, not {value!r}; penstock.Costs(forward=..., "
            "input_grad=..., weight_grad=...) makes them"
        )


def as_number(given: object) -> float:
    """A number of any type as a float; NaN for anything else, including bools and strings."""
    if isinstance(given, (bool, str, bytes)):
        return math.nan
    try:
        return float(given)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return math.nan
