"""The schedules as classes: one rank's stages in, ``step()`` and ``eval()`` out.

Names and signatures are those of torch.distributed.pipelining, so that a user swaps the import.
All of them are one class with another program: a schedule is data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock.compat.announcing import announced
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError
from penstock.partition.ties import Tie
from penstock.runtime.given import group_of
from penstock.runtime.pipeline_schedule import DEFAULT_TIMEOUT_S, PipelineSchedule
from penstock.runtime.role import LossFn
from penstock.runtime.schedule_kinds import (
    PipelineScheduleMulti,
    PipelineScheduleRuntime,
    PipelineScheduleSingle,
)
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.registry import family
from penstock.schedule.text import load_csv

__all__ = [
    "PipelineSchedule",
    "Schedule1F1B",
    "ScheduleChimera",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleForwardOnly",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleProgram",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]


class ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards alone, in order. See ``penstock.schedule.families``."""

    schedule_name = "forward-only"


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    schedule_name = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward in the steady state."""

    schedule_name = "1f1b"


class ScheduleLoopedBFS(PipelineScheduleRuntime):
    """Breadth first: all microbatches through a stage, then the next stage."""

    schedule_name = "looped-bfs"

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        dynamic_shapes: bool = False,
        microbatch_rng: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared: Sequence[Tie] = (),
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            dynamic_shapes=dynamic_shapes,
            microbatch_rng=microbatch_rng,
            timeout_s=timeout_s,
            shared=shared,
        )


class ScheduleInterleaved1F1B(PipelineScheduleRuntime):
    """1F1B over several stages per rank, placed in a loop."""

    schedule_name = "interleaved-1f1b"

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        dynamic_shapes: bool = False,
        microbatch_rng: bool = False,
        overlap: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared: Sequence[Tie] = (),
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            dynamic_shapes=dynamic_shapes,
            microbatch_rng=microbatch_rng,
            overlap=overlap,
            timeout_s=timeout_s,
            shared=shared,
        )


class ScheduleInterleavedZeroBubble(ScheduleInterleaved1F1B):
    """Interleaved, with weight gradients in the bubbles."""

    schedule_name = "interleaved-zb"


class ScheduleZBVZeroBubble(ScheduleInterleaved1F1B):
    """Zero bubble on a V: rank r holds stages r and 2P - 1 - r."""

    schedule_name = "zbv"


class ScheduleDualPipeV(ScheduleInterleaved1F1B):
    """DualPipe's two directions folded into a V, forwards and backwards in pairs."""

    schedule_name = "dualpipev"


class ScheduleDualPipe(ScheduleInterleaved1F1B):
    """Two directions, each with its own copy of the weights, in pairs of forward and backward.

    Rank r holds two stages of 2P: stage r, and stage 2P - 1 - r, which is stage P - 1 - r of the
    model again. Even microbatches enter on rank 0 and odd ones on the last rank, so that both
    pass the whole batch and its target. Gradients of the two copies are summed within ``step``.

    Example:
        >>> mine = ScheduleDualPipe.stage_ids()                              # doctest: +SKIP
        >>> stages = [                                                       # doctest: +SKIP
        ...     PipelineStage(layers[i % P], i, 2 * P, device) for i in mine
        ... ]
        >>> ScheduleDualPipe(stages, n_microbatches, loss_fn)                # doctest: +SKIP
    """

    schedule_name = "dualpipe"


class ScheduleChimera(ScheduleInterleaved1F1B):
    """1F1B in two directions, each with its own copy of the weights: stages as ScheduleDualPipe."""

    schedule_name = "chimera"


class ScheduleProgram(PipelineScheduleMulti):
    """Any program; one from a CSV file best by its path.

    A mistake in the file is then told on every rank, also where only one rank's file has it.

    Example:
        >>> from pathlib import Path                                         # doctest: +SKIP
        >>> ScheduleProgram([stage], Path("mine.csv"), loss_fn)              # doctest: +SKIP
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        program: Program | os.PathLike[str],
        loss_fn: LossFn | None = None,
        **options: Any,
    ) -> None:
        with announced(group_of(stages)):
            if isinstance(program, os.PathLike):
                program = load_csv(program)
            refuse_no_program(program, "ScheduleProgram")
        super().__init__(
            stages, program.num_whole_microbatches, loss_fn, program=program, **options
        )


_CLASSES: tuple[type[PipelineSchedule], ...] = (
    ScheduleForwardOnly,
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
    ScheduleDualPipe,
    ScheduleChimera,
)


# Classes by names that are no schedule's: torch gives them out as well.
_KINDS = {cls.__name__.lower(): cls for cls in (PipelineScheduleSingle, PipelineScheduleMulti)}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The schedule class of this name; case and separators do not count.

    Raises:
        ScheduleError: there is none of that name.

    Example:
        >>> get_schedule_class("1f1b").__name__
        'Schedule1F1B'
    """
    if isinstance(schedule_name, str) and schedule_name.lower() in _KINDS:
        return _KINDS[schedule_name.lower()]
    name = family(schedule_name).name
    for cls in _CLASSES:
        if cls.schedule_name == name:
            return cls
    raise ScheduleError(
        f"{schedule_name!r} has no class of its own; any schedule runs as "
        f"ScheduleProgram(stages, penstock.build({name!r}, ranks=..., microbatches=...), loss_fn), "
        f"or as Pipeline(model, schedule={name!r}, ...)"
    )
