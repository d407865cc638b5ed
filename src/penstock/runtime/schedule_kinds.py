"""The two kinds of schedule that torch knows: one stage per rank, or a list of them.

    PipelineSchedule
    ├── PipelineScheduleSingle          takes a stage       GPipe, 1F1B, forward only
    └── PipelineScheduleMulti           takes a list        ScheduleProgram
        └── PipelineScheduleRuntime     reads CSV files     Interleaved1F1B, ZBV, ...

Code that asks which kind a class is (``issubclass(cls, PipelineScheduleMulti)``) knows by it what
to pass. The program of a kind itself, rather than of a schedule of it, is loaded after it is made.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, Literal

from penstock.compat.announcing import announced
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError
from penstock.partition.ties import Tie
from penstock.runtime.blocks import BlockFunction
from penstock.runtime.pipeline_schedule import DEFAULT_TIMEOUT_S, PipelineSchedule
from penstock.runtime.role import LossFn
from penstock.schedule.action import Overlap, Step
from penstock.schedule.messages import number_of
from penstock.schedule.program import Program
from penstock.schedule.text import load_csv, save_csv

__all__ = ["PipelineScheduleMulti", "PipelineScheduleRuntime", "PipelineScheduleSingle"]

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
        *,
        dynamic_shapes: bool = False,
        microbatch_rng: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared: Sequence[Tie] = (),
    ) -> None:
        self._stage = stage
        super().__init__(
            [stage],
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            dynamic_shapes=dynamic_shapes,
            microbatch_rng=microbatch_rng,
            timeout_s=timeout_s,
            shared=shared,
        )


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule with several stages per rank; its arguments are those of ``PipelineSchedule``.

    Attributes:
        rank: this process's rank in the pipeline's group.
        pp_group_size: how many ranks that has.
        num_stages: how many stages there are in all.
        n_local_stages: how many of them this rank holds.
    """

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
        # use_full_backward is torch's, and does nothing there either: the program says it.
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            **options,
        )
        self.rank, self.pp_group_size = stages[0].group_rank, stages[0].group_size
        self.num_stages, self.n_local_stages = stages[0].num_stages, len(stages)

    def _load_csv(self, filename: str | os.PathLike[str], format: Format = "compute_only") -> None:
        """Run the program of a CSV file from now on; every rank calls it, with the same file.

        Args:
            filename: the file, see ``penstock.load_csv``.
            format: whether the file holds computations only, or sends and receives as well.

        Raises:
            ScheduleError: the file is no program of these stages, ranks and microbatches; the
                same on every rank.
        """
        with announced(self._group):
            refuse_other_format(format)
            program = load_csv(filename)
            if program.has_transfers and format == "compute_only":
                raise ScheduleError(
                    f"{filename}: it spells out sends and receives; pass format='compute_comms'"
                )
            if program.num_microbatches != self.n_microbatches:
                raise ScheduleError(
                    f"{filename}: a program of "
                    f"{number_of(program.num_microbatches, 'microbatch')}, but the schedule has "
                    f"n_microbatches={self.n_microbatches}"
                )
        before = self._engine
        self._play(program)
        if before is not None:
            before.close()

    def _dump_csv(self, filename: str | os.PathLike[str], format: Format = "compute_only") -> None:
        """Write the program to a CSV file.

        Args:
            filename: the file, see ``penstock.save_csv``.
            format: whether to write computations only, or sends and receives as well.
        """
        refuse_other_format(format)
        save_csv(self.engine.asked if format == "compute_only" else self.program, filename)


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule of several stages per rank that plays whatever program it is given.

    Made by itself it has none until ``_load_csv`` reads one.

    Example:
        >>> schedule = PipelineScheduleRuntime([stage], 4, loss_fn)          # doctest: +SKIP
        >>> schedule._load_csv("mine.csv")                                   # doctest: +SKIP
    """

    _block_function: BlockFunction | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # When a receive is posted changes no result, and every one is posted as late as it may be.
        kwargs.pop("defer_pp_recv", None)
        super().__init__(*args, **kwargs)

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[Step]]:
        """By rank the steps that run, sends and receives among them."""
        return dict(enumerate(map(list, self.program.ranks)))

    def _dump_csv(self, filename: str | os.PathLike[str], format: Format = "compute_comms") -> None:
        """Write the program to a CSV file, by default as it runs."""
        super()._dump_csv(filename, format)

    def register_custom_function(
        self, computation_type: object, custom_function: BlockFunction
    ) -> None:
        """Let a function play the blocks of a forward and a backward (DualPipeV's, for instance).

        It may run the two side by side in threads of its own, so that layers that communicate can
        take turns. What the parts need has come when it is called; what they give is sent when it
        has returned. A trace shows the block as its first part.

        Args:
            computation_type: ``OVERLAP_F_B``; other actions have no such functions.
            custom_function: ``function(block, forward, backward)`` calls each of the last two
                once, in whichever thread, and returns when both are done. ``block.parts`` are
                their actions; the order of the callables is that of these.

        Raises:
            ScheduleError: it is for another kind of action, or takes other arguments.

        Example:
            >>> def side_by_side(block, forward, backward):                  # doctest: +SKIP
            ...     thread = threading.Thread(target=backward)
            ...     thread.start()
            ...     forward()
            ...     thread.join()
            >>> schedule.register_custom_function(OVERLAP_F_B, side_by_side)  # doctest: +SKIP
        """
        if computation_type not in (Overlap, "OVERLAP_F_B"):
            raise ScheduleError(
                f"{computation_type} can't be given a function of one's own, only OVERLAP_F_B, "
                "a block of a forward and a backward; what a stage's forward and backward do is "
                "its module's affair, and another order is a program of one's own "
                "(penstock.schedule, or a CSV file)"
            )
        if not _takes(custom_function, 3):
            raise ScheduleError(
                f"{custom_function!r} does not take (block, forward, backward), of which it calls "
                "the last two; torch's own takes (action, ctx), the inside of torch's runtime"
            )
        self._block_function = custom_function
        if self._engine is not None:
            self._engine.play_blocks_by(custom_function)

    def _play(self, program: Program) -> None:
        super()._play(program)
        if self._block_function is not None:
            self.engine.play_blocks_by(self._block_function)


def _takes(function: object, num: int) -> bool:
    """Whether ``function`` can be called with so many positional arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(num))
    except TypeError:
        return False
    except ValueError:  # functions written in C have no signature
        return True
    return True


def refuse_other_format(format: str) -> None:
    """Refuse what is none of the two forms that a CSV file has."""
    if format not in ("compute_only", "compute_comms"):
        raise ScheduleError(f"format={format!r}: expected 'compute_only' or 'compute_comms'")
