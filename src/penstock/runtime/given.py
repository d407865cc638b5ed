"""What a user passes to a schedule, held against what it takes before anything is made of it.

This module knows neither programs nor transports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from penstock.compat.announcing import default_group
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError

__all__ = ["check_loss", "check_losses", "check_stages", "check_timeout", "group_of"]


def check_stages(stages: Sequence[PipelineStage]) -> None:
    """Nothing but stages, each once, in rising order, all of one model.

    Raises:
        ScheduleError: otherwise.
    """
    if isinstance(stages, PipelineStage):
        raise ScheduleError(
            "a PipelineStage was given alone, expected a list of this rank's stages"
        )
    if not stages:
        raise ScheduleError("a rank was given no stage; each rank of the group holds one at least")
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise ScheduleError(
                f"a {type(stage).__name__} was given as a stage, expected a PipelineStage "
                "(schedules with one stage per rank take it alone, the others in a list)"
            )
    indices = [s.stage_index for s in stages]
    counts = {s.num_stages for s in stages}
    if len(counts) > 1:
        raise ScheduleError(
            f"the stages disagree on num_stages: {sorted(counts)}; make each PipelineStage of a "
            "model with the number of all its stages"
        )
    doubled = sorted(i for i, count in Counter(indices).items() if count > 1)
    if doubled:
        raise ScheduleError(
            f"stage indices given twice on one rank: {doubled}; give each stage once, with an "
            "index of its own"
        )
    if indices != sorted(indices):
        raise ScheduleError(f"the stages are in the order {indices}; pass them in rising order")


def check_losses(losses: object) -> None:
    """A list that losses can be put into, or nothing.

    Raises:
        TypeError: otherwise.
    """
    if losses is not None and not isinstance(losses, list):
        raise TypeError(
            f"losses is a {type(losses).__name__}, expected a list, to be filled with the "
            "microbatches' losses"
        )


def check_timeout(timeout_s: object) -> None:
    """A time to wait: any number above 0, ``math.inf`` among them.

    Raises:
        ScheduleError: otherwise.
    """
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (is_number and timeout_s > 0):  # type: ignore[operator]
        raise ScheduleError(
            f"timeout_s={timeout_s!r}: expected a number of seconds above 0 (math.inf to wait "
            "without end)"
        )


def check_loss(loss_fn: object) -> None:
    """A loss function, or None.

    Raises:
        ScheduleError: otherwise.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise ScheduleError(
            f"loss_fn is {loss_fn!r}, expected something callable: loss_fn(output, target)"
        )


def group_of(stages: Sequence[PipelineStage]) -> dist.ProcessGroup | None:
    """The pipeline's group, whatever was passed for the stages."""
    first = next(iter(stages), None) if isinstance(stages, Sequence) else stages
    return first.group if isinstance(first, PipelineStage) else default_group()
