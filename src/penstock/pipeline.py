"""Pipeline: the one-object front door, built from the parts below.

The same script runs both ways: ``python train.py`` plays all ranks in this process, and
``torchrun --nproc-per-node N train.py`` one rank in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PartitionError, ScheduleError, StageError
from penstock.partition.cutting import (
    Example,
    ModelCut,
    SplitWish,
    balanced_plan,
    cut_model,
    own_loss,
    read_split,
    stages_asked_for,
)
from penstock.partition.materialize import materialize
from penstock.partition.plan import Plan
from penstock.partition.tied import Tie, find_ties, first_name
from penstock.runtime.group import (
    default_device,
    from_first_rank,
    gather_state,
    process_group,
)
from penstock.runtime.loopback import loopback
from penstock.runtime.pipeline_schedule import DEFAULT_TIMEOUT_S
from penstock.runtime.schedules import ScheduleProgram
from penstock.runtime.transport import Transport
from penstock.schedule.choice import choose_program, copies_of
from penstock.schedule.program import Program
from penstock.stage.manual import PipelineStage
from penstock.trace import Trace

if TYPE_CHECKING:
    from penstock.auto import Forecast

__all__ = ["Pipeline"]

Model = nn.Module | Sequence[nn.Module] | Sequence[PipelineStage]


class Pipeline:
    """A model cut into stages, and a schedule that trains it.

    Args:
        model: any module, cut by ``split``; a list of layers, likewise; a list of modules without
            a split, each of which is a stage; or a list of ``PipelineStage``.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of a microbatch: a scalar
            tensor, or ``(scalar, metrics)``; ``loss_fn(output)``, of one argument, needs no
            target. If None, the model's own, where the output for
            ``example`` has a ``loss``.
        schedule: a schedule's name (see ``penstock.schedules()``), or a ``Program``; or
            ``"auto"``, the best that ``penstock.search`` finds for the stages as measured with
            ``example``. What it predicts is logged beside what the first steps take.
        memory_limit: for ``"auto"``, the most bytes of activations that a rank may hold.
        n_microbatches: microbatches per step.
        ranks: how many ranks to play in this process; under torchrun, its world size.
        virtual: stages per rank; the schedule's own default if None.
        split: per stage the number of its layers, or their names; for a model that is no
            ``nn.Sequential`` also the names of the modules with which stages after the first
            begin; a ``Plan`` or its file; or ``"auto"``, balanced by a measurement. Even counts
            if None.
        example: one microbatch, a tuple of positional or a dict of keyword arguments. With it,
            what can't be cut is found at once; ``"auto"`` and capture need it.
        init_fn: what initializes a module, for a model on the meta device, of which each rank
            materializes its own stages; its own ``_init_weights`` or, module by module,
            ``reset_parameters`` if None.
        device: where stages live; the CPU, or under torchrun with GPUs this process's GPU.
        group: the process group; the default group if None.
        scale_grads: whether each microbatch's loss is divided by ``n_microbatches``.
        dynamic_shapes: whether shapes may change between the microbatches of a step.
        microbatch_rng: whether dropout draws the plain loop's masks (see ``PipelineSchedule``).
        sequence_dim: along which dimension sequences run, where the schedule splits them.
        shared: the parameters that several stages have in common, where ``model`` is a list of
            ``PipelineStage`` (see ``PipelineSchedule``); in other models they are found.
        timeout_s: how long a rank waits for another before it gives up.

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
        model: Model,
        *,
        loss_fn: Callable[..., Any] | None = None,
        schedule: str | Program = "1f1b",
        memory_limit: float | None = None,
        n_microbatches: int | None = None,
        ranks: int | None = None,
        virtual: int | None = None,
        split: SplitWish | None = None,
        example: Example | None = None,
        init_fn: Callable[[nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        scale_grads: bool = True,
        dynamic_shapes: bool = False,
        microbatch_rng: bool = False,
        sequence_dim: int = 1,
        shared: Sequence[Tie] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.device = torch.device(device) if device is not None else default_device()
        self._group = process_group(group, self.device, ranks)
        split = read_split(split)
        self._forecast: Forecast | None = None
        self._num_steps = 0
        if schedule == "auto":
            from penstock.auto import find_program  # with a search, which few need

            found = find_program(
                model,
                split=split,
                example=example,
                num_stages=_num_stages(model, split, copies=1),
                ranks=ranks,
                virtual=virtual,
                n_microbatches=n_microbatches,
                memory_limit=memory_limit,
                group=self._group,
                device=self.device,
            )
            schedule, split, self._forecast = found.program, found.split, found.forecast
        elif memory_limit is not None:
            raise ScheduleError(
                f"memory_limit={memory_limit:g} is for schedule='auto'; a schedule that is named "
                "holds what it holds"
            )
        program = choose_program(
            schedule,
            num_stages=_num_stages(model, split, copies_of(schedule)),
            n_microbatches=n_microbatches,
            ranks=ranks,
            virtual=virtual,
            world=None if self._group is None else self._group.size(),
        )
        self.num_ranks = program.num_ranks
        self.rank = self._group.rank() if self._group is not None else 0
        local = (
            range(program.num_stages)
            if self._group is None
            else program.placement.stages_of(self.rank)
        )
        self._ties: Sequence[Tie] = shared
        cut = self._cut_model(model, split, program, example)
        stages = self._stages(model, cut, program, list(local), init_fn)
        # Of the cut no more is kept: it holds the modules of other ranks' stages.
        self._whole_call = cut is not None and cut.whole_call
        if loss_fn is None and cut is not None and cut.has_loss:
            loss_fn = own_loss
        self.stages: tuple[PipelineStage, ...] = tuple(stages)
        self._schedule = ScheduleProgram(
            stages,
            program,
            loss_fn,
            transports=self._transports(),
            scale_grads=scale_grads,
            dynamic_shapes=dynamic_shapes,
            microbatch_rng=microbatch_rng,
            sequence_dim=sequence_dim,
            shared=self._ties,
            timeout_s=timeout_s,
        )

    # --- building ----------------------------------------------------------------------------

    def _cut_model(
        self, model: Model, split: SplitWish | None, program: Program, example: Example | None
    ) -> ModelCut | None:
        """The modules of the stages, where the user has not made these."""
        if _is_stages(model):
            return None
        whole: Any = model
        num = program.placement.num_model_stages
        if isinstance(split, str):  # on one rank: times come out differently on each
            plan = from_first_rank(
                self._group, lambda: balanced_plan(whole, num, example).to_json()
            )
            split = Plan.from_json(plan)
        cut = cut_model(whole, split, num, example=example, device=self.device)
        if program.num_splits == 1:
            return cut
        from penstock.partition.carrying import carrying  # for pieces of sequences alone

        return replace(cut, modules=carrying(cut.modules))

    def _stages(
        self,
        model: Model,
        cut: ModelCut | None,
        program: Program,
        local: list[int],
        init_fn: Callable[[nn.Module], Any] | None,
    ) -> list[PipelineStage]:
        if cut is None:
            given: list[Any] = list(model)  # type: ignore[arg-type]
            self._ties = self._ties or given[0].ties
            return given
        placement = program.placement
        modules = cut.modules
        self._ties = [*self._ties, *find_ties(modules)]
        mine = [modules[placement.model_stage(i)] for i in local]
        materialize(mine, self.device, init_fn or getattr(model, "_init_weights", None))
        num = program.num_stages
        return [
            PipelineStage(module, i, num, self.device, group=self._group)
            for i, module in zip(local, mine, strict=True)
        ]

    def _transports(self) -> list[Transport] | None:
        return None if self._group is not None else list(loopback(self.num_ranks))

    # --- running -----------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Train on one batch: gradients are added to the parameters' ``.grad``.

        Args:
            args: the model's inputs; ranks that do not hold the first stage may pass none.
            target: what the loss is computed against; likewise for the last stage. A model that
                computes its own loss needs none.
            kwargs: the model's keyword arguments, and those of ``PipelineSchedule.step``.

        Returns:
            The mean of the microbatches' losses: a scalar, the same on every rank; None where
            the program has no backward.

        Raises:
            StageError: there is no loss to train on.
            PenstockError: this rank failed, or another one did; see its type.
        """
        if not self._schedule.has_loss and self._schedule.engine.has_backward:
            raise StageError(
                "step() trains, but nothing says on what: pass loss_fn= to Pipeline; a model that "
                "computes its loss itself returns it as `loss` for the example= (with labels in "
                "it, if it needs them); for outputs alone, call eval()"
            )
        kwargs.setdefault("return_outputs", False)
        if target is None and self._whole_call:
            # The model may compute its loss itself, from labels among its arguments.
            kwargs.setdefault("target_mbs", [None] * self._schedule.n_microbatches)
        if self._forecast is None:
            self._schedule.step(*args, target=target, **kwargs)
        else:
            with self._forecast.watch(self._num_steps, self.device, alone=self._group is None):
                self._schedule.step(*args, target=target, **kwargs)
            self._num_steps += 1
        losses = self._schedule.losses
        return None if losses is None else losses.mean()

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run the model forward, without a graph. Arguments are those of ``step``.

        Returns:
            The model's output for the whole batch, where the last stage is; None elsewhere. With
            a target, ``losses`` holds the microbatches' losses afterwards, on every rank.
        """
        return self._schedule.eval(*args, target=target, **kwargs)

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
        """Per microbatch, what the loss function returned beside the loss, where it ran."""
        return self._schedule.metrics

    def trace(self) -> Trace:
        """What ran when in the last step, on all ranks. Every rank calls it."""
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
        model_stage = self.program.placement.model_stage
        seen: set[int] = set()
        for stage in self.stages:
            for name, param in stage.submod.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    place = model_stage(stage.stage_index)
                    yield first_name(self._ties, place, name), param

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters."""
        return (param for _, param in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers, under the plain model's names."""
        seen: set[int] = set()
        for stage in self._distinct_stages():
            for name, buffer in stage.submod.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield name, buffer

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """This process's parameters and buffers, under the plain model's names.

        Args:
            full: whether to gather those of all ranks, on the CPU; every rank calls it then.

        Raises:
            PartitionError: stages cut by hand have a name in common.
        """
        self._refuse_common_names()
        state: dict[str, Any] = {}
        for stage in self._distinct_stages():
            state.update(stage.submod.state_dict())
        return gather_state(self._group, state) if full and self._group is not None else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this process's part of a plain model's state.

        Raises:
            KeyError: a name of this process's is missing.
            PartitionError: stages cut by hand have a name in common.
        """
        self._refuse_common_names()
        for stage in self.stages:
            mine = {name: state_dict[name] for name in stage.submod.state_dict()}
            stage.submod.load_state_dict(mine)

    def _distinct_stages(self) -> list[PipelineStage]:
        """This process's stages, one for each of the model's: copies of a stage are equal."""
        model_stage = self.program.placement.model_stage
        distinct: dict[int, PipelineStage] = {}
        for stage in self.stages:
            distinct.setdefault(model_stage(stage.stage_index), stage)
        return list(distinct.values())

    def _refuse_common_names(self) -> None:
        stages = self._distinct_stages()
        counts = Counter(name for stage in stages for name in stage.submod.state_dict())
        common = sorted(name for name, count in counts.items() if count > 1)
        if common:
            raise PartitionError(
                f"several stages have the names {common[:4]}{', …' if common[4:] else ''}, so one "
                "state can't hold them all; save and load stage.submod of each stage, or name "
                "their layers apart"
            )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in self.parameters():
            param.grad = None


def _is_stages(model: Model) -> bool:
    if isinstance(model, nn.Module):
        return False
    if not model:
        raise PartitionError("the list of modules or stages is empty")
    return all(isinstance(m, PipelineStage) for m in model)


def _num_stages(model: Model, split: SplitWish | None, copies: int) -> int | None:
    """Into how many stages the user cuts the model; None where that follows from the ranks."""
    if split is not None:
        return stages_asked_for(model, split)
    if isinstance(model, nn.Module):
        return None
    if _is_stages(model):
        first: Any = model[0]
        return int(first.num_stages) // copies
    return len(model)
