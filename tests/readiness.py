"""The readiness rules as actions: the reference that programs are compared with."""

from __future__ import annotations

from penstock.schedule.action import Action, action
from penstock.schedule.placement import Placement
from penstock.schedule.rules import IN_SEQUENCE, next_chunk, required

__all__ = ["prerequisites"]


def prerequisites(
    act: Action, placement: Placement, *, transfers: bool = False, num_splits: int = 1
) -> tuple[Action, ...]:
    """The actions that must be complete before ``act`` may start, from ``required``, each once.

    An INPUT_GRAD or WEIGHT_GRAD among them is also fulfilled by the FULL_BACKWARD of the same stage
    and microbatch (see ``COVERS``).

    """
    needed = required(act.op, act.stage, placement, transfers=transfers)
    found = [action(stage, op, act.microbatch) for op, stage in needed]
    if num_splits > 1 and act.op in IN_SEQUENCE and act.microbatch is not None:
        op, offset = IN_SEQUENCE[act.op]
        other = next_chunk(act.microbatch, offset, num_splits)
        if other is not None:
            found.append(action(act.stage, op, other))
    return tuple(found)
