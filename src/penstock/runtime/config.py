"""Options of a schedule and of ``Pipeline``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ScheduleError
from penstock.partition.ties import Tie
from penstock.schedule.passes import Lookahead

if TYPE_CHECKING:
    from penstock.partition.cutting import CutMethod
    from penstock.partition.spec import Example, Split
    from penstock.schedule.program import Program

__all__ = ["LossFn", "PipelineSpec", "RunConfig"]

LossFn: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run options of a schedule; the first ones in the order of torch's schedules.

    Args:
        n_microbatches: microbatches per step.
        loss_fn: ``loss_fn(output, target)`` returns a microbatch's mean loss: a scalar tensor, or
            ``(scalar, metrics)``. A function of one argument needs no target. Without a loss
            function, steps run forward only.
        args_chunk_spec: per positional argument a ``TensorChunkSpec`` with the split dimension (0
            without a spec), or None to replicate the argument to every microbatch.
        kwargs_chunk_spec: likewise by name.
        output_merge_spec: specs by which outputs are merged (see ``merge_chunks``).
        scale_grads: divide each loss by the number of microbatches (or sequence chunks) that run,
            so that gradients are those of the mean loss over the batch.
        backward_requires_autograd: refuse training steps under ``no_grad``, instead of computing
            gradients there.
        dynamic_shapes: allow shapes to change between the microbatches of a step.
        microbatch_rng: draw random numbers (dropout) as the plain loop does with
            ``penstock.microbatch_rng`` around each forward, independent of the schedule, the split
            and the number of ranks. If False, each rank draws in its execution order.
        sequence_dim: the sequence dimension of inputs, targets and outputs, where the program
            splits sequences (``Program.num_splits``). Tensors with fewer dimensions are replicated
            to every chunk.
        max_active_stages: the most sharded stages (FSDP2) of a rank that are unsharded at a time;
            unless the program gathers by itself.
        unshard_lookahead: the number of stages whose gathers are issued ahead, also by rank;
            ``"full"`` is ``max_active_stages``, ``"auto"`` more on later ranks (see
            ``insert_sharding`` of ``penstock.schedule.passes``).
        timeout_s: the limit on a rank's wait for another rank, in seconds.
        shared: parameters that several stages share, the same on every rank. Each item maps stages
            to the parameter's name there, such as ``{0: "embed.weight", 3: "head.weight"}``, or to
            a module's, for all its parameters. Each copy receives the whole gradient, and before
            the first step the first stage's value. Not needed for models that Penstock splits.

    Raises:
        ScheduleError: ``loss_fn`` is not callable, or ``timeout_s`` is no number above 0.
    """

    n_microbatches: int
    loss_fn: LossFn | None = None
    args_chunk_spec: tuple[Any, ...] | None = None
    kwargs_chunk_spec: dict[str, Any] | None = None
    output_merge_spec: Any = None
    scale_grads: bool = True
    backward_requires_autograd: bool = True
    dynamic_shapes: bool = False
    microbatch_rng: bool = False
    sequence_dim: int = 1
    max_active_stages: int = 3
    unshard_lookahead: Lookahead = "full"
    timeout_s: float = 600.0
    shared: Sequence[Tie] = ()

    def __post_init__(self) -> None:
        limit: object = self.timeout_s
        if not isinstance(limit, int | float) or limit is True or not limit > 0:
            raise ScheduleError(
                f"timeout_s={limit!r}: expected a number of seconds above 0, or math.inf"
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ScheduleError(
                f"loss_fn is {self.loss_fn!r}, expected a callable: loss_fn(output, target)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The arguments of ``Pipeline`` that determine the program and the split."""

    model: Any
    loss_fn: LossFn | None
    schedule: str | Program | os.PathLike[str]
    memory_limit: float | None
    n_microbatches: int | None
    ranks: int | None
    virtual: int | None
    split: Split | os.PathLike[str] | None
    method: CutMethod | None
    example: Example | None
    init_fn: Callable[[nn.Module], Any] | None
    wrap_fn: Callable[[nn.Module, int], nn.Module | None] | None
    device: torch.device
    group: dist.ProcessGroup | None
    shared: Sequence[Tie]
