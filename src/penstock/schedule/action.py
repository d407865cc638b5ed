"""Actions: an operation on a stage, usually for one microbatch; plain values without an order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import index
from typing import TypeAlias

__all__ = ["Op", "Action", "Overlap", "Step", "action"]


class Op(Enum):
    """The kind of an action; the value is torch's text for it."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"

    # Members are singletons; hashing by identity is several times faster than Enum's own.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An operation on one stage.

    Args:
        stage: index of the stage, from 0.
        op: the operation.
        microbatch: index of the microbatch, from 0; None for the operations on a whole stage
            (UNSHARD, RESHARD, REDUCE_GRAD).

    Examples:
        >>> str(Action(stage=2, op=Op.FORWARD, microbatch=3))
        '2F3'
    """

    stage: int
    op: Op
    microbatch: int | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself, in a tuple, so that all steps can be iterated alike."""
        return (self,)

    def __str__(self) -> str:
        """The text form, such as ``2F3`` or ``0UNSHARD``."""
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """An overlapped pair: a forward and a backward that a rank runs as one step.

    Args:
        parts: the actions of the pair, in the order used on a single stream.
    """

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        """The text form, such as ``(0F3;1B2)OVERLAP_F_B``."""
        return f"({';'.join(map(str, self.parts))})OVERLAP_F_B"


Step: TypeAlias = Action | Overlap


# One cache over all three would make a tuple per action, as large as the actions themselves.
@cache
def _made(stage: int, op: Op) -> dict[int | None, Action]:
    return {}


def action(stage: int, op: Op, microbatch: int | None = None) -> Action:
    """The action with these fields, cached and shared within the process."""
    made = _made(stage, op)
    found = made.get(microbatch)
    if found is None:
        number = None if microbatch is None else int(index(microbatch))  # a NumPy integer, too
        found = made[microbatch] = Action(stage=int(index(stage)), op=op, microbatch=number)
    return found
