"""Lifetimes of a rank's activations, and storage slots that activations share in turn.

steps   0F0 0F1 0B0 0F2 0B1 0B2        slots of (stage, microbatch)
        ├───────┤                      (0, 0) → 0
            ├───────────┤              (0, 1) → 1
                    ├───────┤          (0, 2) → 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, Literal

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.check import check
from penstock.schedule.program import Program
from penstock.schedule.rules import WEIGHT_GRADS

__all__ = ["PipelineActivationLiveness", "analyze_pipeline_activation_liveness"]

Granularity = Literal["microbatch", "stage_microbatch"]


@dataclass(frozen=True, slots=True)
class PipelineActivationLiveness:
    """The slots and lifetimes of activations by (stage, microbatch).

    Args:
        pp_rank: the rank.
        granularity: whether each stage's activation of a microbatch has its own slot, or all of
            ``stage_indices`` share one.
        stage_indices: the stages.
        num_microbatches: the program's number of microbatches.
        slot_by_stage_and_microbatch: the slot of each activation, from 0.
        num_slots: the number of slots.
        lifetimes: the first and the last step of each activation.
    """

    pp_rank: int
    granularity: Granularity
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[tuple[int, int], int]
    num_slots: int
    lifetimes: Mapping[tuple[int, int], tuple[int, int]]
    __hash__ = None  # type: ignore[assignment]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """The slot of an activation; a ScheduleError for one that was not analyzed."""
        self.get_activation_lifetime(stage_index, microbatch_index)
        return self.slot_by_stage_and_microbatch[stage_index, microbatch_index]

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> tuple[int, int]:
        """The first and the last step with an activation, as indices of the rank's steps."""
        try:
            return self.lifetimes[stage_index, microbatch_index]
        except KeyError:
            raise ScheduleError(
                f"stage {stage_index}, microbatch {microbatch_index} is not among the stages "
                f"{[*self.stage_indices]} on rank {self.pp_rank}"
            ) from None


def analyze_pipeline_activation_liveness(
    schedule: Any, *, pp_rank: int, stage_indices: Sequence[int], granularity: Granularity
) -> PipelineActivationLiveness:
    """Assign a slot to each activation, shared by activations whose lifetimes do not meet.

    An activation lives from its forward to its full backward, or to its weight gradient if the
    backward is split, both steps included; also if it is recomputed or offloaded in between.

    Args:
        schedule: a schedule, whose executed program counts (``schedule.program``), or a program.
        pp_rank: the rank, any of the program's.
        stage_indices: stages on this rank.
        granularity: ``"stage_microbatch"`` or ``"microbatch"``, whose lifetimes reach from the
            first to the last step with one of the stages' activations.

    Raises:
        ScheduleError: the program is invalid or has no backward, or the rank does not hold these
            stages.

    Examples:
        >>> import penstock
        >>> found = analyze_pipeline_activation_liveness(
        ...     penstock.build("1f1b", ranks=2, microbatches=8), pp_rank=0, stage_indices=[0],
        ...     granularity="stage_microbatch",
        ... )
        >>> found.num_slots, found.slot_for(0, 5), found.get_activation_lifetime(0, 0)
        (2, 1, (0, 2))
    """
    program: Program = check(getattr(schedule, "program", schedule))
    stages, here = tuple(stage_indices), set[int]()
    if pp_rank in range(program.num_ranks):
        here.update(program.placement.stages_of(pp_rank))
    if not stages or len({*stages}) < len(stages) or not here.issuperset(stages):
        raise ScheduleError(
            f"stage_indices={[*stages]}: expected distinct stages of rank {pp_rank}, which has "
            f"{sorted(here)}"
        )
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ScheduleError(f"granularity={granularity!r}: 'microbatch' or 'stage_microbatch'")
    if not program.has_backward:
        raise ScheduleError(f"program {program.name!r} has no backward, which ends a lifetime")
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for place, step in enumerate(program.ranks[pp_rank]):
        for act in step.parts:
            if act.stage in stages and act.microbatch is not None:
                key = act.stage, act.microbatch
                if act.op is Op.FORWARD:
                    spans[key] = place, place
                elif act.op in WEIGHT_GRADS:
                    spans[key] = spans[key][0], place
    by_stage = granularity == "stage_microbatch"
    owners = {(stage, mb): (stage if by_stage else 0, mb) for stage, mb in sorted(spans)}
    merged: dict[tuple[int, int], tuple[int, int]] = {}
    for key, owner in owners.items():
        (first, last), (begun, ended) = spans[key], merged.get(owner, spans[key])
        merged[owner] = min(first, begun), max(last, ended)
    slots = _share_slots(merged)
    return PipelineActivationLiveness(
        pp_rank=pp_rank,
        granularity=granularity,
        stage_indices=stages,
        num_microbatches=program.num_microbatches,
        slot_by_stage_and_microbatch=MappingProxyType({k: slots[o] for k, o in owners.items()}),
        num_slots=1 + max(slots.values()),
        lifetimes=MappingProxyType({key: merged[owner] for key, owner in owners.items()}),
    )


def _share_slots(spans: Mapping[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The slot of each span: as few as possible, the lowest free one first."""
    slots: dict[tuple[int, int], int] = {}
    in_use: list[tuple[int, int]] = []  # the last step of each slot in use, and the slot
    free: list[int] = []
    for key, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        while in_use and in_use[0][0] < first:
            heappush(free, heappop(in_use)[1])
        slots[key] = heappop(free) if free else len(in_use)
        heappush(in_use, (last, slots[key]))
    return slots
