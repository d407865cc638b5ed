"""Pipeline: the one-object front door, built from the parts below.

The same script runs both ways: ``python train.py`` runs all ranks in this process, and
``torchrun --nproc-per-node N train.py`` one rank in each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.cause import publishing_errors
from penstock.compat.stage import PipelineStage
from penstock.errors import ScheduleError, StageError
from penstock.runtime.comm.loopback import loopback
from penstock.runtime.comm.process_group import chosen_device, process_group
from penstock.runtime.config import PipelineSpec, RunOptions
from penstock.runtime.schedules import ScheduleProgram
from penstock.runtime.step import is_placed, moved
from penstock.schedule.program import Program
from penstock.trace import Trace
from penstock.training.model_state import ModelState

if TYPE_CHECKING:
    from penstock.assembly import ModelOrStages
    from penstock.partition.spec import Example, Split

__all__ = ["Pipeline"]


class Pipeline:
    """A model cut into stages, and a schedule that trains it.

    Args:
        model: any module, cut by ``split``; a list of layers, likewise; a list of modules without
            a split, each of which is a stage; or a list of ``PipelineStage``: those of all ranks,
            of which each process keeps its own, or its own alone.
        loss_fn: ``loss_fn(output, target)`` returns the mean loss of a microbatch: a scalar
            tensor, or ``(scalar, metrics)``; a function of one argument needs no target. If None,
            the model's own, where its output for ``example`` has a ``loss``.
        schedule: the name of a schedule (see ``penstock.schedules()``); a ``Program``, or the path
            of one in a CSV file; or ``"auto"``, the best that ``penstock.search`` finds for the
            stages as measured with ``example``.
        memory_limit: for ``"auto"``, the most bytes of activations that a rank may hold.
        n_microbatches: microbatches per step.
        ranks: the number of ranks in this process; under torchrun, its world size.
        virtual: stages per rank; the schedule's own default if None.
        split: per stage the number of its layers, or their names; for a model that is no
            ``nn.Sequential`` also the names of the modules with which stages after the first
            begin; a ``Plan`` or its file; or ``"auto"``, balanced by a measurement. Even counts
            if None.
        method: ``"module"`` cuts by module, ``"export"`` by torch.export; None tries by module
            first, and warns where it has to export.
        example: one microbatch, a tuple of positional or a dict of keyword arguments. With it,
            a model that can't be cut is refused at once; ``"auto"`` and export need it.
        init_fn: initializes a module, for a model on the meta device, of which each rank
            materializes its own stages; its own ``_init_weights`` or, module by module,
            ``reset_parameters`` if None.
        device: where stages live; the CPU, or under torchrun with GPUs this process's GPU.
        group: the process group; the default group if None.
        args_chunk_spec: per positional argument how it is split into microbatches: a
            ``TensorChunkSpec`` of its dimension, or None to pass it whole to every microbatch (a
            mask, a table). Along dimension 0 if there is no spec.
        kwargs_chunk_spec: likewise by name, for as many keyword arguments as need it.
        output_merge_spec: likewise how the outputs that ``eval`` returns are merged.
        scale_grads: divide each microbatch's loss by ``n_microbatches``.
        options: ``dynamic_shapes``, ``microbatch_rng``, ``overlap``, ``sequence_dim``,
            ``timeout_s`` and ``shared`` (see ``penstock.runtime.config.RunConfig``). Shared
            parameters are found by themselves unless ``model`` is a list of ``PipelineStage``.

    Raises:
        PartitionError: the model can't be cut so.
        ScheduleError: ranks, stages and microbatches do not fit the schedule.

    Example:
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
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Unpack[RunOptions],
    ) -> None:
        from penstock.assembly import assemble  # imports all of partition

        self.device = chosen_device(device)
        self._group = process_group(group, self.device, ranks)
        # The other ranks may be waiting for this one in their first step.
        with publishing_errors(self._group):
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
                    device=self.device,
                    group=self._group,
                    shared=options.pop("shared", ()),
                )
            )
        self.num_ranks = made.program.num_ranks
        self.rank = self._group.rank() if self._group is not None else 0
        self.stages: tuple[PipelineStage, ...] = made.stages
        self._takes_model_call = made.takes_model_call
        self._forecast, self._num_steps = made.forecast, 0
        self._schedule = ScheduleProgram(
            list(self.stages),
            made.program,
            made.loss_fn,
            transports=None if self._group is not None else list(loopback(self.num_ranks)),
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            shared=made.ties,
            **options,
        )
        self._state = ModelState(
            self.stages, made.program.placement, made.ties, self._group, made.state_names
        )
        if made.shared_buffers is not None:
            self._schedule.engine.shared_buffers = made.shared_buffers

    # --- running -----------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Train on one batch: gradients are added to the parameters' ``.grad``.

        Each microbatch counts alike in the mean, also where rows do not divide: see
        ``PipelineSchedule.step``.

        Args:
            args: the model's inputs; ranks that do not hold the first stage may pass none. A
                batch on the CPU is moved to the stages' device, unless part of it is on another.
            target: the target of the loss; likewise for the last stage. A model that computes its
                own loss needs none.
            kwargs: the model's keyword arguments, and those of ``PipelineSchedule.step``.

        Returns:
            The mean of the microbatches' losses: a scalar, the same on every rank.

        Raises:
            ScheduleError: the program has no backward.
            StageError: there is no loss to train on.
            PenstockError: this rank failed, or another one did; see its type.
        """
        self._check_trains()
        kwargs.setdefault("return_outputs", False)
        if target is None and self._takes_model_call:
            # The model may compute its loss itself, from labels among its arguments.
            kwargs.setdefault("target_mbs", [None] * self._schedule.n_microbatches)
        watch = self._forecast.watch if self._forecast is not None else _nothing
        args, target, kwargs = self._moved(args, target, kwargs)
        with watch(self._num_steps, self.device, alone=self._group is None):
            self._schedule.step(*args, target=target, **kwargs)
        self._num_steps += 1
        losses = self._schedule.losses
        assert losses is not None, "a program with a backward has losses"
        return losses.mean()

    def _check_trains(self) -> None:
        if not self._schedule.engine.has_backward:
            raise ScheduleError(
                f"step() trains, but {self.program.name} has no backward; call eval(), which "
                "returns outputs, and given a target leaves the losses in pipe.losses"
            )
        if not self._schedule.has_loss:
            raise StageError(
                "step() trains, but there is no loss: pass loss_fn= to Pipeline; a model that "
                "computes its loss itself returns it as `loss` for the example= (with labels in "
                "it, if it needs them); for outputs alone, call eval()"
            )

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run the model forward, without a graph. Arguments are those of ``step``.

        Returns:
            The model's output for the whole batch, where the last stage is; None elsewhere. With
            a target, ``losses`` holds the microbatches' losses afterwards, on every rank.

        Raises:
            ValueError: the outputs can't be merged; ``losses`` are there all the same. Pass
                ``merge_outputs=False`` or ``return_outputs=False``.
        """
        args, target, kwargs = self._moved(args, target, kwargs)
        return self._schedule.eval(*args, target=target, **kwargs)

    def _moved(
        self, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any, dict[str, Any]]:
        """The arguments of ``step`` on the stages' device, where this process needs them."""
        engine = self._schedule.engine
        if self.device.type == "cpu" or is_placed((args, target, kwargs)):
            return args, target, kwargs
        kept = {"losses": kwargs["losses"]} if "losses" in kwargs else {}
        return (
            moved(args, self.device) if engine.has_first else args,
            moved(target, self.device) if engine.has_last else target,
            moved(kwargs, self.device) | kept,
        )

    # --- looking -----------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The program that runs, sends and receives included."""
        return self._schedule.program

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks live in other processes."""
        return self._group is not None

    @property
    def losses(self) -> list[Tensor]:
        """The microbatches' losses of the last step or eval, on every rank."""
        losses = self._schedule.losses
        return [] if losses is None else list(losses.unbind())

    @property
    def metrics(self) -> list[Any]:
        """Per microbatch, the metrics of the loss function, on the rank where it ran."""
        return self._schedule.metrics

    def trace(self) -> Trace:
        """The trace of the last step, on all ranks. Every rank calls it."""
        return self._schedule.trace()

    # --- the model's state -------------------------------------------------------------------

    def train(self, mode: bool = True) -> Pipeline:
        """Set the modules' training mode (``eval`` runs the model; it does not switch it)."""
        for stage in self.stages:
            stage.submod.train(mode)
        return self

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, under the plain model's names; shared ones once.

        A parameter that is tied to one of an earlier stage goes by the name that it has there, as
        in the plain model, also where that stage lies on another rank.
        """
        return self._state.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters.

        There may be none, which torch's optimizers refuse; they take
        ``[{"params": list(pipe.parameters())}]`` on every rank.
        """
        return (param for _, param in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers, under the plain model's names."""
        return self._state.named_buffers()

    def state_dict(
        self, *, full: bool = False, keep: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        """This process's parameters and buffers, under the plain model's names.

        Args:
            full: gather those of all ranks, on the CPU; every rank calls it then.
            keep: selects names, such as those of adapters alone.

        Raises:
            PartitionError: stages cut by hand have a name in common.
        """
        return self._state.state_dict(full=full, keep=keep)

    def parameter_stages(self) -> dict[str, int]:
        """The stage of the model that holds each of this process's parameters, by name."""
        return self._state.parameter_stages()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this process's part of a plain model's state.

        Of a tied parameter any of its names will do. What stages hold sharded may be whole in the
        state, as ``state_dict(full=True)`` gives it.

        Raises:
            PartitionError: a name of this process's is missing, or one is none of the model's:
                nothing is loaded then; or stages cut by hand have a name in common.
        """
        self._state.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero, as ``nn.Module.zero_grad`` does."""
        for param in self.parameters():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)

    if not TYPE_CHECKING:  # to which every attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            """Point to the modules for an attribute of ``nn.Module``."""
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(nn.Module, name):
                told += "; this process's modules, which have it, are pipe.stages[i].submod"
            raise AttributeError(told, name=name, obj=self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: stages are bound to their ranks and their processes."""
        raise TypeError(
            "a Pipeline can't be copied or pickled; save pipe.state_dict() and load it into a new "
            "one, and for averages of weights copy pipe.parameters()"
        )


def _nothing(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()
