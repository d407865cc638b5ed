"""The schedules as classes with the names and signatures of torch.distributed.pipelining.

PipelineSchedule
├── PipelineScheduleSingle          takes a stage       GPipe, 1F1B, forward only
└── PipelineScheduleMulti           takes a list        ScheduleProgram
    └── PipelineScheduleRuntime     reads CSV files     Interleaved1F1B, ZBV, ...
"""

from __future__ import annotations

import os
from typing import Any, Literal, cast

from penstock.cause import publishing_errors
from penstock.compat.actions import PipelineOrder, order_of
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError
from penstock.runtime.config import LossFn
from penstock.runtime.overlap import PairFunction
from penstock.runtime.pipeline_schedule import PipelineSchedule, group_of
from penstock.schedule.action import Overlap
from penstock.schedule.passes import Lookahead
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.registry import family
from penstock.schedule.text import load_csv, save_csv
from penstock.schedule.wording import number_of

__all__ = [
    "PipelineScheduleMulti", "PipelineScheduleRuntime", "PipelineScheduleSingle", "Schedule1F1B",
    "ScheduleChimera", "ScheduleDualPipe", "ScheduleDualPipeV", "ScheduleForwardOnly",
    "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS", "ScheduleProgram", "ScheduleZBVZeroBubble", "get_schedule_class",
]  # fmt: skip

Format = Literal["compute_only", "compute_comms"]


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule with one stage per rank; its arguments are those of ``PipelineSchedule``."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__([stage], n_microbatches, loss_fn, *specs, scale_grads, **options)


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule with several stages per rank; its arguments are those of ``PipelineSchedule``."""

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **options: Any,
    ) -> None:
        # use_full_backward has no effect, as in torch: the program decides.
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        flags = (scale_grads, backward_requires_autograd)
        super().__init__(stages, n_microbatches, loss_fn, *specs, *flags, **options)

    def _validate_and_set_stage_mapping(self, actions: PipelineOrder) -> None:
        """Load the program of an order, checked; a collective call."""
        self.pipeline_order = actions
        self._load_order()

    def _load_csv(self, filename: str | os.PathLike[str], format: Format = "compute_only") -> None:
        """Load the program of a CSV file; a collective call with the same file on all ranks.

        Args:
            filename: the file, see ``penstock.load_csv``.
            format: whether the file holds computations only, or sends and receives as well.

        Raises:
            ScheduleError: the file is no program of these stages, ranks and microbatches.
        """
        with publishing_errors(self._group):
            _check_format(format)
            program = load_csv(filename)
            if program.has_transfers and format == "compute_only":
                raise ScheduleError(
                    f"{filename}: it spells out sends and receives; pass format='compute_comms'"
                )
            if (found := program.num_microbatches) != self.n_microbatches:
                raise ScheduleError(
                    f"{filename}: a program of {number_of(found, 'microbatch')}, but the schedule "
                    f"has n_microbatches={self.n_microbatches}"
                )
        self._load(program)

    def _dump_csv(self, filename: str | os.PathLike[str], format: Format = "compute_only") -> None:
        """Write the program to a CSV file (see ``penstock.save_csv``)."""
        _check_format(format)
        save_csv(self.engine.requested if format == "compute_only" else self.program, filename)


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule of several stages per rank; runs the program that ``_load_csv`` reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # as in torch, without names
        super().__init__(*args, **kwargs)

    @property
    def pipeline_order_with_comms(self) -> PipelineOrder:
        """The executed steps of each rank, including sends and receives; may be set, too."""
        return order_of(self.program)

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: PipelineOrder) -> None:
        self.pipeline_order = order

    def _prepare_schedule_with_comms(
        self, actions: PipelineOrder, format: Format = "compute_only"
    ) -> None:
        """Load the program of an order; what it lacks (transfers, reductions, gathers) is added."""
        _check_format(format)
        self._validate_and_set_stage_mapping(actions)

    def _dump_csv(self, filename: str | os.PathLike[str], format: Format = "compute_comms") -> None:
        """Write the program to a CSV file, by default the executed one."""
        super()._dump_csv(filename, format)

    def register_custom_function(
        self, computation_type: object, custom_function: PairFunction
    ) -> None:
        """Let a function run the overlapped pairs of a forward and a backward (DualPipeV's).

        Called alike on all ranks. The inputs of both parts have arrived before the function is
        called. In any thread both parts run under the step's autocast, and on CUDA on its stream,
        since memory that one of them frees may serve the other. A trace shows the pair as its
        first part.

        Args:
            computation_type: ``OVERLAP_F_B``.
            custom_function: ``function(pair, forward, backward)`` calls each of the last two
                once, in any thread, and returns when both are done; ``pair.parts`` has their
                actions.

        Raises:
            ScheduleError: another kind of action.
        """
        if computation_type not in (Overlap, "OVERLAP_F_B"):
            raise ScheduleError(
                f"{computation_type} can't be given a custom function, only OVERLAP_F_B can; for "
                "forwards use stage.register_forward_context, for backwards dw_builder= of the "
                "stage, for gathers and reductions wrap its module"
            )
        self._pair_function = custom_function
        if self._engine is not None and self._order is None:
            self._load(self._engine.requested)


def _check_format(format: str) -> None:
    if format not in ("compute_only", "compute_comms"):
        raise ScheduleError(f"format={format!r}: expected 'compute_only' or 'compute_comms'")


# --- schedules by name ---------------------------------------------------------------------------


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
        max_active_stages: int = 3,
        unshard_lookahead: Lookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **options: Any,
    ) -> None:
        options |= {"max_active_stages": max_active_stages, "unshard_lookahead": unshard_lookahead}
        options |= {"output_merge_spec": output_merge_spec, "scale_grads": scale_grads}
        options["backward_requires_autograd"] = backward_requires_autograd
        super().__init__(stages, n_microbatches, loss_fn, **options)


class ScheduleInterleaved1F1B(PipelineScheduleRuntime):
    """1F1B over several stages per rank, placed in a loop."""

    schedule_name = "interleaved-1f1b"
    __init__ = PipelineSchedule.__init__  # the signature in torch, without use_full_backward


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

    Rank r holds stages r and 2P - 1 - r, which is the model's stage P - 1 - r. Even microbatches
    enter on rank 0 and odd ones on the last rank; both ranks pass the whole batch and its target.
    Gradients of the two copies are summed within ``step``.
    """

    schedule_name = "dualpipe"


class ScheduleChimera(ScheduleInterleaved1F1B):
    """1F1B in two directions, each with its own copy of the weights: stages as ScheduleDualPipe."""

    schedule_name = "chimera"


class ScheduleProgram(PipelineScheduleMulti):
    """Any program; pass a CSV file as a path, so that its errors are raised on every rank."""

    def __init__(
        self,
        stages: list[PipelineStage],
        program: Program | os.PathLike[str],
        loss_fn: LossFn | None = None,
        **options: Any,
    ) -> None:
        with publishing_errors(group_of(stages)):
            if isinstance(program, os.PathLike):
                program = load_csv(program)
            refuse_no_program(program, "ScheduleProgram")
        super().__init__(
            stages, program.num_whole_microbatches, loss_fn, program=program, **options
        )


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The schedule class of this name; case and separators do not count.

    Raises:
        ScheduleError: no schedule has this name.

    Examples:
        >>> get_schedule_class("1f1b").__name__
        'Schedule1F1B'
    """
    # torch knows the kinds by name, too.
    for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
        if str(schedule_name).lower() == kind.__name__.lower():
            return kind
    name = family(schedule_name).name
    for cls in globals().values():
        if getattr(cls, "schedule_name", None) == name:
            return cast(type[PipelineSchedule], cls)
    raise ScheduleError(
        f"{schedule_name!r} has no class of its own; it runs as ScheduleProgram(stages, "
        f"penstock.build({name!r}, ...), loss_fn), or as Pipeline(model, schedule={name!r}, ...)"
    )
