"""Pipeline: a model, its split and a schedule in one object.

``python train.py`` runs all ranks in one process. ``torchrun --nproc-per-node N train.py`` runs the
same script with one rank per process.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock._torch_compat import COMPILE_PROBES
from penstock.cause import publishing_errors
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError, StageError, folds_tracebacks
from penstock.partition.plan import abbreviate, runs_of_names
from penstock.runtime.comm.process_group import chosen_device, process_group
from penstock.runtime.config import PipelineSpec, RunConfig
from penstock.runtime.schedules import ScheduleProgram
from penstock.runtime.step import is_placed, moved
from penstock.schedule.program import Program, sizes_text
from penstock.stage.wrappers import plain_name
from penstock.trace import Trace
from penstock.training.model_state import ModelState

if TYPE_CHECKING:
    from penstock.assembly import ModelOrStages
    from penstock.auto import Forecast
    from penstock.partition.spec import Example, Split

__all__ = ["Pipeline"]

_log = logging.getLogger(__name__)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class Pipeline(ModelState):
    """A model split into stages, and a schedule that trains the stages.

    Names of parameters and buffers are those of the unsplit model.

    Args:
        model: a module or a list of layers, cut by ``split``; a list of modules, each one a stage,
            if there is no ``split``; or a list of ``PipelineStage``, either of all ranks or only of
            this process.
        loss_fn: ``loss_fn(output, target)`` returns the mean loss of a microbatch: a scalar
            tensor, or ``(scalar, metrics)``. A function of one argument needs no target. If None,
            the ``loss`` of the model's output for ``example`` is used, if present.
        schedule: the name of a schedule (see ``penstock.schedules()``); a ``Program``, or the path
            of its CSV file; or ``"auto"``, the fastest program that ``penstock.search`` finds for
            stages that are profiled with ``example``, and balanced.
        memory_limit: for ``"auto"``, the limit on a rank's activation memory, in bytes.
        n_microbatches: microbatches per step; if None, the program's number, else 8.
        ranks: the number of ranks in this process; under torchrun, its world size.
        virtual: stages per rank; the schedule's own default if None.
        split: per stage the number of its layers, or their names; for a model other than
            ``nn.Sequential`` also the names of the first modules of all stages but the first; a
            ``Plan`` or its file; or ``"auto"``, balanced by profiling. If None, each stage has
            about the same number of layers.
        method: ``"module"`` cuts by module, ``"export"`` by torch.export; None tries by module
            first, and warns if it falls back to export.
        example: one microbatch, a tuple of positional or a dict of keyword arguments. Needed by
            ``"auto"`` and export. With an example, an unsplittable model raises at once.
        init_fn: initializes a module of a model on the meta device, of which each rank
            materializes its own stages. If None, the modules' ``reset_parameters`` and the model's
            ``_init_weights``. Every rank calls it for all modules, and draws the numbers of one
            process.
        wrap_fn: ``wrap_fn(stage_module, stage_index)`` wraps a stage (``fully_shard``,
            ``torch.compile``) before it is materialized or moved to its device. Returns the wrapped
            module, or None for a module changed in place.
        device: the stages' device. By default the CPU, or this process's GPU under torchrun.
        group: the process group; the default group if None.
        options: ``args_chunk_spec``, ``kwargs_chunk_spec``, ``output_merge_spec``,
            ``scale_grads``, ``dynamic_shapes``, ``microbatch_rng``, ``sequence_dim``,
            ``max_active_stages``, ``unshard_lookahead``, ``timeout_s`` and ``shared``, which is
            needed only for a list of ``PipelineStage`` (see ``penstock.runtime.config.RunConfig``).

    Raises:
        PartitionError: the model can't be split as requested.
        ScheduleError: ranks, stages and microbatches do not fit the schedule.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = Pipeline(model, loss_fn=nn.functional.mse_loss, n_microbatches=2, ranks=2)
        >>> loss = pipe.step(torch.ones(4, 4), target=torch.zeros(4, 2))
        >>> pipe.eval(torch.ones(4, 4)).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        model: ModelOrStages,
        *,
        loss_fn: Callable[..., Any] | None = None,
        schedule: str | Program | os.PathLike[str] = "1f1b",
        memory_limit: float | None = None,
        n_microbatches: int | None = None,
        ranks: int | None = None,
        virtual: int | None = None,
        split: Split | os.PathLike[str] | None = None,
        method: Literal["module", "export"] | None = None,
        example: Example | None = None,
        init_fn: Callable[[nn.Module], Any] | None = None,
        wrap_fn: Callable[[nn.Module, int], nn.Module | None] | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        from penstock.assembly import assemble  # imports all of partition

        self.device = chosen_device(device)
        in_job = group is not None or "WORLD_SIZE" in os.environ
        group = process_group(group, self.device, ranks)
        if group is None and in_job and ranks is None and split in (None, "auto"):
            ranks = 1 if isinstance(model, nn.Module) else None  # a job's pipeline of one process
        # The other ranks may be waiting for this rank in their first step.
        with publishing_errors(group):
            config = RunConfig(n_microbatches or 1, loss_fn, **options)  # may raise, before the cut
            made = assemble(
                PipelineSpec(
                    model=model,
                    loss_fn=loss_fn,
                    schedule=schedule,
                    memory_limit=memory_limit,
                    n_microbatches=n_microbatches,
                    ranks=ranks,
                    virtual=virtual,
                    split=split,
                    method=method,
                    example=example,
                    init_fn=init_fn,
                    wrap_fn=wrap_fn,
                    device=self.device,
                    group=group,
                    shared=config.shared,
                )
            )
        self.num_ranks = made.program.num_ranks
        self.rank = group.rank() if group is not None else 0
        self.stages: tuple[PipelineStage, ...] = made.stages
        self._stage_names = made.names
        self._takes_model_call, self._forecast = made.takes_model_call, made.forecast
        options |= {"shared": made.ties, "is_single_process": group is None}
        self._schedule = ScheduleProgram(list(made.stages), made.program, made.loss_fn, **options)
        names = None if made.layout is None else frozenset(made.layout)
        super().__init__(made.stages, made.program.placement, made.ties, group, names)
        self._schedule.engine.layout = made.layout
        if made.shared_buffers is not None:
            self._schedule.engine.shared_buffers = made.shared_buffers
        self._has_remarked_on_mode = False
        if self.program.num_microbatches == 1 < self.num_ranks and self.rank == 0:
            _log.warning(
                "n_microbatches=1: %d ranks take turns, one computes while the others wait; pass "
                "n_microbatches=%d or more, and batches of as many rows",
                self.num_ranks,
                self.num_ranks,
            )

    # --- running -----------------------------------------------------------------------------

    @folds_tracebacks
    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run one training step; accumulates gradients into the parameters' ``.grad``.

        Each microbatch has the same weight in the mean loss, even if their numbers of rows differ.
        A batch with fewer rows than microbatches runs one microbatch per row, on all ranks.

        Args:
            args: the model's inputs. Optional on ranks without the first stage. A batch entirely
                on the CPU is moved to the stages' device.
            target: the target of the loss. Optional on ranks without the last stage, and for a
                model that computes its own loss.
            kwargs: keyword arguments of the model and of ``PipelineSchedule.step``.

        Returns:
            The mean of the losses of the microbatches with rows: a scalar, the same on every rank.

        Raises:
            ScheduleError: the program has no backward.
            StageError: there is no loss to train on.
            PenstockError: this rank or another one failed; see the subclasses. If nothing had run,
                on any rank (missing inputs, a batch that can't be split), the next step may follow.
        """
        if not self.program.has_backward:
            raise ScheduleError(
                f"step() trains, but {self.program.name} has no backward; call eval()"
            )
        if not self._schedule.has_loss:
            with publishing_errors(self._group):  # the other ranks may have one
                raise StageError(
                    "step() trains, but there is no loss: pass loss_fn= to Pipeline; a model that "
                    "computes its loss itself takes labels for the example="
                )
        kwargs.setdefault("return_outputs", False)
        if target is None and self._takes_model_call:
            # The model may compute its own loss from labels among its arguments.
            ready = kwargs.get("kwarg_mbs") or kwargs.get("arg_mbs")
            num = self._schedule.n_microbatches if ready is None else len(ready)
            kwargs.setdefault("target_mbs", [None] * num)
        args, kwargs = self._moved(args, kwargs | {"target": target})
        self._schedule.step(*args, **kwargs)
        losses = self._schedule.losses
        assert losses is not None, "a program with a backward has losses"
        loss = losses.mean()
        loss.backward = _NoBackward()  # type: ignore[method-assign]
        return loss

    @folds_tracebacks
    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run the forward without a graph, also under ``torch.inference_mode``. Arguments are
        those of ``step``. Modules run in their own mode: ``pipe.train(False)`` before switches
        dropout and the tracking of running statistics off, ``pipe.train()`` after on again.

        Returns:
            The model's output for the whole batch on the rank of the last stage; None on other
            ranks. With a target, ``losses`` then has the microbatches' losses on every rank.

        Raises:
            ValueError: the outputs can't be merged; ``losses`` is set nevertheless.
        """
        if not self._has_remarked_on_mode:
            self._remark_on_mode()
        args, kwargs = self._moved(args, kwargs | {"target": target})
        return self._schedule.eval(*args, **kwargs)

    def _remark_on_mode(self) -> None:
        """Log, once, that an evaluation meets dropout or running statistics in training mode."""
        for stage in self.stages:
            for name, module in stage.submod.named_modules() if stage.submod.training else ():
                is_dropping = isinstance(module, _DROPOUTS) and module.p > 0
                if module.training and (
                    is_dropping or getattr(module, "running_mean", None) is not None
                ):
                    self._has_remarked_on_mode = True
                    _log.warning(
                        "eval() runs %s (%s) in training mode; call pipe.train(False) before, and "
                        "pipe.train() after",
                        plain_name(stage.submod, name),
                        type(module).__name__,
                    )
                    return

    def _moved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the arguments of a call to the stages' device if this process uses them."""
        splitter, device = self._schedule.splitter, self.device
        given = {name: value for name, value in kwargs.items() if name != "losses"}
        batch = {name: value for name, value in given.items() if name != "loss_kwargs"}
        if device.type == "cpu" or is_placed((args, batch)):
            return args, kwargs
        if not splitter.has_last:
            del given["target"]
        args = moved(args, device) if splitter.has_first else args
        return args, kwargs | moved(given, device)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a bare forward, of which no rank has the whole graph."""
        raise TypeError(
            "a Pipeline is not called like a module: pipe.step(inputs, target=labels) runs forward "
            "and backward, pipe.eval(inputs) the forward alone"
        )

    if not TYPE_CHECKING:  # where any name would do

        def __getattr__(self, name: str) -> Any:
            if name in COMPILE_PROBES:
                raise TypeError(
                    "torch.compile takes no Pipeline, which is no module; compile its stages: "
                    "for stage in pipe.stages: penstock.compile_stage(stage.submod)"
                )
            return object.__getattribute__(self, name)  # raises AttributeError

    # --- looking -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The schedule and its sizes, and a line for each stage: its rank and its modules."""
        program, placement = self.program, self.program.placement
        lines = [f"Pipeline of {program.name}: {sizes_text(program)}"]
        for rank in range(program.num_ranks):
            for stage in placement.stages_of(rank):
                line = f"  rank {rank}, stage {stage}"
                if self._stage_names:
                    names = runs_of_names(self._stage_names[placement.model_stage(stage)])
                    line += f": {abbreviate(names, most=8)}"
                lines.append(line)
        return "\n".join(lines)

    @property
    def program(self) -> Program:
        """The executed program, including sends and receives."""
        return self._schedule.program

    @property
    def is_distributed(self) -> bool:
        """True if other ranks run in other processes."""
        return self._group is not None

    @property
    def losses(self) -> list[Tensor]:
        """The last step's or eval's losses by microbatch, on every rank."""
        losses = self._schedule.losses
        return [] if losses is None else list(losses.unbind())

    @property
    def metrics(self) -> list[Any]:
        """The loss function's metrics by microbatch, on the rank that computed them."""
        return self._schedule.metrics

    @property
    def forecast(self) -> Forecast | None:
        """The predicted time and memory of a step; None without an ``"auto"``."""
        return self._forecast

    @folds_tracebacks
    def trace(self) -> Trace:
        """The trace of the last step on all ranks. A collective call."""
        return self._schedule.trace()

    # --- the model's state -------------------------------------------------------------------

    def train(self, mode: bool = True) -> Pipeline:
        """Set the modules' training mode, as ``nn.Module.train`` does; ``eval`` runs the model and
        sets no mode: ``pipe.train(False)`` is a module's ``eval()``."""
        for stage in self.stages:
            stage.submod.train(mode)
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters.

        ``torch.nn.utils.clip_grad_norm_`` would clip them by the norm of this rank's part alone;
        ``penstock.training.clip.clip_grad_norm_`` clips by the norm over all ranks.

        Torch's optimizers accept a rank without parameters as
        ``[{"params": list(pipe.parameters())}]``.
        """
        return (param for _, param in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients to None or zero, as ``nn.Module.zero_grad`` does."""
        for stage in self.stages:
            stage.submod.zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copying and pickling, since stages are bound to their ranks and processes."""
        raise TypeError(
            "a Pipeline can't be copied or pickled; save pipe.state_dict() and load it into a new "
            "one, and for averages of weights copy pipe.parameters()"
        )


class _NoBackward:
    """In place of ``backward`` of a step's loss: refuses, and says why."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StageError(
            "step() has run the backward already, microbatch by microbatch: leave loss.backward() "
            "out, and call optimizer.step()"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A loss in a checkpoint must load with torch's weights_only=True, which knows this class.
        return OrderedDict, ()
