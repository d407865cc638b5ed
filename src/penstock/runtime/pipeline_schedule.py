"""A program played over one rank's stages: what ``step()`` and ``eval()`` of every schedule do.

The named schedules (``schedules.py``) and ``Pipeline`` are this class with one program or another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.compat.announcing import announced, default_group
from penstock.compat.stage import PipelineStage
from penstock.compat.torch_names import OF_SCHEDULE, no_attribute
from penstock.errors import ScheduleError, StageError
from penstock.partition.ties import Tie
from penstock.runtime.batching import Batching, Passed, Specs
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.c10d import C10dTransport
from penstock.runtime.comm.loopback import loopback
from penstock.runtime.engine import Engine, Options
from penstock.runtime.given import (
    check_loss,
    check_losses,
    check_stages,
    check_timeout,
    group_of,
)
from penstock.runtime.in_turn import InTurn
from penstock.runtime.role import LossFn
from penstock.runtime.sequence_chunks import SequenceChunks
from penstock.schedule.action import Step
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family
from penstock.trace import Trace

__all__ = ["DEFAULT_TIMEOUT_S", "PipelineSchedule"]

DEFAULT_TIMEOUT_S = 600.0

# Schedules made so far per group, not counting those that could not be: every rank makes them in
# the same order, so the count names them alike everywhere, also where one had to try again.
_num_made: Counter[str] = Counter()


class PipelineSchedule:
    """Plays a program over one rank's stages. The schedules below say which program.

    Args:
        program: the program; or, made by a subclass, None.
        stages: this rank's stages.
        n_microbatches: microbatches per step.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of a microbatch: a scalar
            tensor, or ``(scalar, metrics)``; ``loss_fn(output)``, of one argument, needs no
            target. Without one, steps run forward only.
        args_chunk_spec, kwargs_chunk_spec: how arguments are split, by place and by name (see
            ``split_args_kwargs_into_chunks``); along dimension 0 if None.
        output_merge_spec: how outputs are merged (see ``merge_chunks``); dimension 0 if None.
        scale_grads: whether each microbatch's loss is divided by ``n_microbatches``, so that
            gradients are those of the mean loss over the batch.
        dynamic_shapes: whether shapes may change between the microbatches of a step.
        microbatch_rng: whether stages draw random numbers (dropout) as the plain loop does in which
            ``penstock.microbatch_rng`` stands around each forward: whatever the schedule, the cut
            and the number of ranks. If not, each rank draws in the order in which it runs.
        overlap: whether the forward and the backward of a block (DualPipe's, DualPipeV's) run side
            by side on two streams, where the device has streams. If not, they run in turn, as on
            the CPU. Hooks must not write what other stages read.
        sequence_dim: along which dimension of inputs, targets and outputs sequences run, where
            the program splits them (``Program.num_splits``); tensors with fewer dimensions go to
            every piece as they are.
        backward_requires_autograd: False lets steps be called under ``no_grad``; gradients are
            computed all the same.
        timeout_s: how long a rank waits for another before it gives up; any number above 0.
        shared: the parameters that several stages have in common, which ranks in processes of
            their own can't see: for each a mapping from stage to name there, such as
            ``{0: "embed.weight", 3: "head.weight"}``; the name of a module stands for all of its
            parameters. The same on every rank. Stages of a captured model know it by themselves.
            Each place then gets the whole gradient, and the
            first stage's value before the first step.
        transports: the ranks that this process plays, if not just its own of the stages' group.

    Attributes:
        has_loss: whether there is a loss function, without which steps train nothing.
        losses: the last step's losses, shape (microbatches,), on every rank; None without a loss.
        metrics: per microbatch, what the loss function returned beside the loss, where it ran.

    Raises:
        ScheduleError: stages, ranks and microbatches do not fit the program.
        PartitionError: ``shared`` names a stage, module or parameter that does not exist, or
            stages have a layer with running statistics in common.
    """

    schedule_name: ClassVar[str | None] = None

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        *,
        program: Program | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        dynamic_shapes: bool = False,
        microbatch_rng: bool = False,
        overlap: bool = False,
        sequence_dim: int = 1,
        backward_requires_autograd: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared: Sequence[Tie] = (),
        transports: Sequence[Transport] | None = None,
    ) -> None:
        self._stages = stages
        self.n_microbatches = n_microbatches
        self.scale_grads = scale_grads
        self._specs = Specs(
            args=args_chunk_spec, kwargs=kwargs_chunk_spec, output=output_merge_spec
        )
        self.has_loss = loss_fn is not None
        self.losses: Tensor | None = None
        self.metrics: list[Any] = []
        self._options = Options(
            loss_fn=loss_fn,
            scale_grads=scale_grads,
            dynamic_shapes=dynamic_shapes,
            microbatch_rng=microbatch_rng,
            overlap=overlap,
        )
        self._sequence_dim = sequence_dim
        self._backward_requires_autograd = backward_requires_autograd
        self._timeout_s = timeout_s
        self._shared = shared
        self._transports = transports
        self._group = group_of(stages)
        self._engine: Engine | None = None
        # The other ranks may be waiting for this one in their first step.
        with announced(self._group):
            check_stages(stages)
            check_timeout(timeout_s)
            check_loss(loss_fn)
            program = program or self._build()
            if program is not None:
                self._play(program)

    def _play(self, program: Program) -> None:
        """From now on, run ``program``; every rank calls."""
        stages, group = self._stages, self._group
        with announced(group):
            transports = self._transports or _transports(stages[0], group, self._timeout_s)
            by_index = {s.stage_index: s for s in stages}
            ties = self._shared or stages[0].ties
            engine = Engine(program, by_index, transports, self._options, ties)
            pieces = SequenceChunks(program.num_splits, self._sequence_dim)
            pieces.prepare(stages, program)
        self._engine = engine
        if group is not None:
            _num_made[group.group_name] += 1
        self._trains = self.has_loss and engine.has_backward
        self._batching = Batching(
            engine,
            self.n_microbatches,
            self._specs,
            pieces,
            averages=self.has_loss and self.scale_grads,
        )
        for stage in stages:
            stage.chunks = self.n_microbatches
            stage.has_backward = self._trains
            stage.ties = ties  # for other schedules over the same stages
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _build(self) -> Program | None:
        """The program of the schedule that this class is named for, if it is."""
        if self.schedule_name is None:
            return None
        num_ranks = 1 if self._group is None else self._group.size()
        num_stages, copies = self._stages[0].num_stages, family(self.schedule_name).copies
        if num_stages % (copies * num_ranks):
            times = f"{copies} times " if copies > 1 else ""
            raise ScheduleError(
                f"{num_stages} stages on {num_ranks} ranks: the number of stages must be a "
                f"multiple of {times}the number of ranks for {self.schedule_name}"
            )
        return build(
            self.schedule_name,
            ranks=num_ranks,
            microbatches=self.n_microbatches,
            virtual=num_stages // (copies * num_ranks),
        )

    @classmethod
    def stage_ids(
        cls, rank: int | None = None, *, num_ranks: int | None = None, virtual: int | None = None
    ) -> tuple[int, ...]:
        """The stages that a rank is to hold: what to make ``PipelineStage``s of.

        Args:
            rank: the rank; this process's if None.
            num_ranks: of how many ranks; as many as there are processes if None.
            virtual: stages per rank (in each direction), as usual in the schedule if None.

        Raises:
            ScheduleError: the schedule does not work with so many ranks or stages per rank, or
                is a program, whose ``placement`` says it.

        Example:
            >>> from penstock import ScheduleDualPipe, ScheduleInterleaved1F1B
            >>> ScheduleInterleaved1F1B.stage_ids(1, num_ranks=4)
            (1, 5)
            >>> ScheduleDualPipe.stage_ids(1, num_ranks=4)
            (1, 6)
        """
        if cls.schedule_name is None:
            raise ScheduleError(
                f"{cls.__name__} plays any program; ask its program.placement.stages_of(rank)"
            )
        group = default_group()
        if rank is None:
            rank = group.rank() if group is not None else 0
        if num_ranks is None:
            num_ranks = group.size() if group is not None else 1
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"rank {rank} of {num_ranks} ranks does not exist; there are 0 to {num_ranks - 1}"
            )
        # Where stages lie does not depend on how many microbatches there are.
        _, microbatches = family(cls.schedule_name).nearest(num_ranks, num_ranks)
        program = build(
            cls.schedule_name, ranks=num_ranks, microbatches=microbatches, virtual=virtual
        )
        return program.placement.stages_of(rank)

    @property
    def engine(self) -> Engine:
        """What runs the steps.

        Raises:
            ScheduleError: no program has been loaded yet.
        """
        if self._engine is None:
            raise ScheduleError(
                f"this {type(self).__name__} has no program: the class is a kind of schedule; take "
                "one of that kind, or let PipelineScheduleMulti._load_csv(path) read a program"
            )
        return self._engine

    @property
    def program(self) -> Program:
        """The program that runs, sends and receives included."""
        return self.engine.program

    @property
    def pipeline_order(self) -> dict[int, list[Step]]:
        """By rank its computations in order, as torch has it; idle time is left out."""
        return dict(enumerate(map(list, self.engine.asked.ranks)))

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """By stage the rank that holds it, as torch has it."""
        return dict(enumerate(self.engine.asked.placement.stage_ranks))

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        merge_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one training step: gradients are added to the parameters' ``.grad``.

        A batch is split by rows, as evenly as they go: 5 rows in 4 microbatches are 2, 1, 1, 1.
        With ``scale_grads`` each microbatch counts alike, so that gradients are those of the mean
        of the microbatches' means, as in torch and in the plain loop over microbatches. Where rows
        divide, that is the batch's mean; where they don't, rows of shorter microbatches count
        more, and the log says so once: pass batches that divide (``drop_last=True``).

        Tensors are found in any container, also of classes registered with torch's pytree; an
        object of another class goes whole to every microbatch, and the log says so once where it
        holds a tensor with as many rows as the batch.

        Args:
            args: the model's inputs, a whole batch (needed on the rank of the first stage; in a
                schedule of two directions, on those of both ends).
            target: what the loss is computed against (needed on the rank of the last stage;
                likewise).
            losses: a list that is filled with the microbatches' losses, on every rank.
            return_outputs: whether to return the last stage's outputs.
            merge_outputs: whether these are merged, or a list with each microbatch's.
            loss_kwargs: keyword arguments of the loss function.
            arg_mbs, kwarg_mbs, target_mbs: ready microbatches, instead of a batch to split.
            kwargs: keyword arguments of every stage on this rank, a whole batch.

        Returns:
            On the rank of the last stage (likewise) the outputs, if asked for; else None.

        Raises:
            PenstockError: this rank failed, or another one did; see its type.
            ValueError: the step is done, and the outputs can't be merged; the next one may follow.
        """
        passed = Passed(
            args=args,
            kwargs=kwargs,
            target=target,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            loss_kwargs=loss_kwargs,
            return_outputs=return_outputs,
        )
        return self._run(passed, losses, merge_outputs, train=True)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        merge_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards alone, without a graph. Arguments and result are those of ``step``.

        Losses are computed where a target is given; for these alone, where outputs can't be
        merged or are not wanted, pass ``return_outputs=False``.
        """
        passed = Passed(
            args=args,
            kwargs=kwargs,
            target=target,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            loss_kwargs=loss_kwargs,
            return_outputs=return_outputs,
        )
        return self._run(passed, losses, merge_outputs, train=False)

    def _run(
        self, passed: Passed, losses: list[Tensor] | None, merges: bool, *, train: bool
    ) -> Any:
        engine = self.engine
        with (
            InTurn(engine, self._group),
            engine.guard(),
            nullcontext() if train else torch.no_grad(),
        ):
            trains = train and self._trains
            if trains and self._backward_requires_autograd and not torch.is_grad_enabled():
                raise StageError("step() computes gradients, but runs under no_grad; use eval()")
            check_losses(losses)
            batch = self._batching.split(passed)
            computed = engine.run(batch, train=trains)
        self.losses = self._batching.join_losses(computed)
        self.metrics = batch.metrics if self.engine.has_last else []
        if losses is not None:
            losses[:] = () if self.losses is None else self.losses.unbind()
        return self._batching.join_outputs(batch, merges=merges)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise no_attribute(self, name, OF_SCHEDULE)

    def trace(self) -> Trace:
        """What ran when in the last step, on all ranks. Every rank calls it."""
        engine = self.engine
        with InTurn(engine, self._group):
            return engine.trace()


def _transports(
    stage: PipelineStage, group: dist.ProcessGroup | None, timeout_s: float
) -> list[Transport]:
    if group is None or group.size() == 1:
        return list(loopback(1))
    return [C10dTransport(group, stage.device, _num_made[group.group_name], timeout_s)]
