"""Pipeline: the one-object front door, built from the parts below.

The same script runs both ways: ``python train.py`` plays all ranks in this process, and
``torchrun --nproc-per-node N train.py`` one rank in each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PartitionError, ScheduleError
from penstock.partition.sequential import Split, cut, even_split, layers_of
from penstock.runtime.loopback import loopback
from penstock.runtime.pipeline_schedule import DEFAULT_TIMEOUT_S
from penstock.runtime.schedules import ScheduleProgram
from penstock.runtime.transport import Transport
from penstock.schedule.catalog import build, family
from penstock.schedule.program import Program
from penstock.stage.manual import PipelineStage
from penstock.trace import Trace

__all__ = ["Pipeline"]

Model = nn.Module | Sequence[nn.Module] | Sequence[PipelineStage]


class Pipeline:
    """A model cut into stages, and a schedule that trains it.

    Args:
        model: an ``nn.Sequential`` or a list of layers, cut by ``split``; a list of modules
            without a split, each of which is a stage; or a list of ``PipelineStage``.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of a microbatch: a scalar
            tensor, or ``(scalar, metrics)``.
        schedule: a schedule's name (see ``penstock.schedules()``), or a ``Program``.
        n_microbatches: microbatches per step.
        ranks: how many ranks to play in this process; under torchrun, its world size.
        virtual: stages per rank; the schedule's own default if None.
        split: per stage the number of its layers, or their names; even counts if None.
        device: where stages live; the CPU, or under torchrun with GPUs this process's GPU.
        group: the process group; the default group if None.
        scale_grads: whether each microbatch's loss is divided by ``n_microbatches``.
        dynamic_shapes: whether shapes may change between the microbatches of a step.
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
        n_microbatches: int | None = None,
        ranks: int | None = None,
        virtual: int | None = None,
        split: Split | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        scale_grads: bool = True,
        dynamic_shapes: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.device = torch.device(device) if device is not None else _default_device()
        self._group = _process_group(group, self.device, ranks)
        program = self._program(model, schedule, n_microbatches, ranks, virtual, split)
        self.num_ranks = program.num_ranks
        self.rank = self._group.rank() if self._group is not None else 0
        local = (
            range(program.num_stages)
            if self._group is None
            else program.placement.stages_of(self.rank)
        )
        stages = self._stages(model, split, program, list(local))
        self.stages: tuple[PipelineStage, ...] = tuple(stages)
        self._schedule = ScheduleProgram(
            stages,
            program,
            loss_fn,
            transports=self._transports(),
            scale_grads=scale_grads,
            dynamic_shapes=dynamic_shapes,
            timeout_s=timeout_s,
        )

    # --- building ----------------------------------------------------------------------------

    def _program(
        self,
        model: Model,
        schedule: str | Program,
        n_microbatches: int | None,
        ranks: int | None,
        virtual: int | None,
        split: Split | None,
    ) -> Program:
        world = self._group.size() if self._group is not None else None
        copies = (
            schedule.placement.copies if isinstance(schedule, Program) else family(schedule).copies
        )
        num_stages = _num_stages(model, split, copies)
        if isinstance(schedule, Program):
            if n_microbatches not in (None, schedule.num_microbatches):
                raise ScheduleError(
                    f"n_microbatches={n_microbatches}, but the program given as schedule has "
                    f"{schedule.num_microbatches}"
                )
            if world not in (None, schedule.num_ranks):
                raise ScheduleError(
                    f"the program given as schedule is for {schedule.num_ranks} ranks, but "
                    f"there are {world}"
                )
            _refuse_misfits(schedule, num_stages, ranks, virtual)
            return schedule
        known = ranks if world is None else world
        if virtual is None:
            if num_stages is not None and known and num_stages % known == 0:
                virtual = num_stages // known
            else:
                virtual = family(schedule).default_virtual
        num_ranks = _infer_ranks(num_stages, virtual) if known is None else known
        if num_stages is not None and num_stages != num_ranks * virtual:
            raise ScheduleError(
                f"{num_stages} stages, but {schedule} on {num_ranks} ranks with {virtual} per rank "
                f"needs {num_ranks * virtual}; change split, ranks or virtual"
            )
        return build(
            schedule,
            ranks=num_ranks,
            microbatches=8 if n_microbatches is None else n_microbatches,
            virtual=virtual,
        )

    def _stages(
        self, model: Model, split: Split | None, program: Program, local: list[int]
    ) -> list[PipelineStage]:
        if _is_stages(model):
            given: list[Any] = list(model)  # type: ignore[arg-type]
            return given
        placement = program.placement
        modules = _modules(model, split, placement.num_model_stages)
        if self._group is not None:
            _refuse_ties(modules, program)
        num = program.num_stages
        return [
            PipelineStage(
                modules[placement.model_stage(i)].to(self.device),
                i,
                num,
                self.device,
                group=self._group,
            )
            for i in local
        ]

    def _transports(self) -> list[Transport] | None:
        return None if self._group is not None else list(loopback(self.num_ranks))

    # --- running -----------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Train on one batch: gradients are added to the parameters' ``.grad``.

        Args:
            args: the model's inputs; ranks that do not hold the first stage may pass none.
            target: what the loss is computed against; likewise for the last stage.
            kwargs: keyword arguments of the stages, and those of ``PipelineSchedule.step``.

        Returns:
            The mean of the microbatches' losses: a scalar, the same on every rank; None without
            a loss function.

        Raises:
            PenstockError: this rank failed, or another one did; see its type.
        """
        kwargs.setdefault("return_outputs", False)
        self._schedule.step(*args, target=target, **kwargs)
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
        """This process's parameters, under the plain model's names; shared ones once."""
        seen: set[int] = set()
        for stage in self.stages:
            for name, param in stage.submod.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield name, param

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters."""
        return (param for _, param in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers, under the plain model's names."""
        for stage in self.stages:
            yield from stage.submod.named_buffers()

    def state_dict(self) -> dict[str, Any]:
        """This process's parameters and buffers, under the plain model's names.

        Raises:
            PartitionError: stages cut by hand have a name in common.
        """
        self._refuse_common_names()
        state: dict[str, Any] = {}
        for stage in self.stages:
            state.update(stage.submod.state_dict())
        return state

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

    def _refuse_common_names(self) -> None:
        counts = Counter(name for stage in self.stages for name in stage.submod.state_dict())
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


def _default_device() -> torch.device:
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def _process_group(
    group: dist.ProcessGroup | None, device: torch.device, ranks: int | None
) -> dist.ProcessGroup | None:
    """The group to run over; None to play all ranks in this process."""
    if not dist.is_available():
        return None
    if group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or group.size() == 1:
        return None
    if ranks not in (None, group.size()):
        raise ScheduleError(
            f"ranks={ranks}, but {group.size()} processes run: leave ranks out under torchrun"
        )
    return group


def _is_stages(model: Model) -> bool:
    if isinstance(model, nn.Module):
        return False
    if not model:
        raise PartitionError("the list of modules or stages is empty")
    return all(isinstance(m, PipelineStage) for m in model)


def _num_stages(model: Model, split: Split | None, copies: int) -> int | None:
    """Into how many stages the user cuts the model; None where that follows from the ranks."""
    if split is not None:
        return len(split)
    if isinstance(model, nn.Module):
        return None
    if _is_stages(model):
        first: Any = model[0]
        return int(first.num_stages) // copies
    return len(model)


def _refuse_misfits(
    program: Program, num_stages: int | None, ranks: int | None, virtual: int | None
) -> None:
    """What is asked for beside a program must be what the program says."""
    has_stages = program.placement.num_model_stages
    per_rank = has_stages / program.num_ranks
    for what, asked, has in (
        ("stages", num_stages, has_stages),
        ("ranks", ranks, program.num_ranks),
        ("stages per rank", virtual, int(per_rank) if per_rank.is_integer() else per_rank),
    ):
        if asked not in (None, has):
            raise ScheduleError(
                f"{asked} {what} are given, but the program given as schedule has {has}"
            )


def _infer_ranks(num_stages: int | None, virtual: int) -> int:
    if num_stages is None:
        raise ScheduleError("say on how many ranks to run: pass ranks=, or split= with the stages")
    if num_stages % virtual:
        raise ScheduleError(
            f"{num_stages} stages can't be laid on ranks {virtual} by {virtual}; "
            "pass a split whose length is a multiple of it"
        )
    return num_stages // virtual


def _modules(model: Model, split: Split | None, num_stages: int) -> list[nn.Module]:
    layers = layers_of(model)
    if split is None:
        split = even_split(len(layers), num_stages)
    return list(cut(layers, split))


def _refuse_ties(modules: Sequence[nn.Module], program: Program) -> None:
    """Each process would train its own copy of a parameter that several ranks hold."""
    holder: dict[int, tuple[int, str]] = {}
    for stage, module in enumerate(modules):
        rank = program.placement.rank_of(stage)
        for name, param in module.named_parameters():
            first_rank, first_name = holder.setdefault(id(param), (rank, name))
            if first_rank != rank:
                raise PartitionError(
                    f"{first_name} (rank {first_rank}) and {name} (rank {rank}) are one shared "
                    "parameter, and would be trained apart; put both on one rank (zbv holds the "
                    "first and the last stage together), or untie them"
                )
