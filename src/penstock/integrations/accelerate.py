"""A pipeline as Accelerate sees it: replicas as its processes, and a wrapped model.

             stage 0   stage 1         a row is a pipeline, and one process to Accelerate
replica 0    rank 0    rank 1          a column holds the same stages, and is gathered over
replica 1    rank 2    rank 3
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, recursively_apply, send_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import StageError
from penstock.pipeline import Pipeline
from penstock.runtime.comm.c10d import control_group
from penstock.runtime.comm.process_group import collective_call
from penstock.training.clip import clip_grad_norm_

__all__ = ["LookAhead", "ModelCall", "PipelinedModel", "ReplicaAccelerator", "StandIn"]


class ModelCall(Exception):
    """Its argument: the keyword arguments of a call of the model."""


class StandIn(nn.Module):
    """In the model's place: returns an output, once; without one, raises the call."""

    def __init__(self, *outputs: Any) -> None:
        super().__init__()
        self._outputs, self._raises_call = list(outputs), not outputs

    def forward(self, **kwargs: Any) -> Any:
        if self._raises_call:
            raise ModelCall(kwargs)
        if not self._outputs:
            raise StageError("compute_loss() calls the model twice; a pipeline runs it once")
        return self._outputs.pop()


class PipelinedModel(nn.Module):
    """The pipeline as the wrapped model of Trainer: this rank's parameters, and evaluation."""

    def __init__(self, pipe: Pipeline, plain: nn.Module, accelerator: ReplicaAccelerator) -> None:
        super().__init__()
        self.pipe, self.accelerator = pipe, accelerator
        self.plain = (plain,)  # in a tuple, since it is no submodule
        self.order = {name: i for i, (name, _) in enumerate(plain.named_parameters())}
        self.is_synced = False

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, in the plain model's order and under its names."""
        yield from sorted(self.pipe.named_parameters(), key=lambda named: self.order[named[0]])

    def train(self, mode: bool = True) -> PipelinedModel:
        self.training = mode
        self.pipe.train(mode)
        return self

    def forward(self, **inputs: Any) -> Any:
        """The output of the last stage, on every rank; without a graph."""
        with self.accelerator.autocast():
            outputs = self.pipe.eval(kwarg_mbs=[inputs], merge_outputs=False)
        output = self.accelerator.in_full_precision(outputs[0]) if outputs else None
        placement = self.pipe.program.placement
        output = self.accelerator.from_rank(placement.rank_of(placement.exits[0]), output)
        return send_to_device(output, self.accelerator.device)


class LookAhead:
    """A data loader that puts its next batches, ``num`` at most, into a list before the first."""

    def __init__(self, loader: Any, num: int, batches: list[Any], accelerator: Any) -> None:
        self.loader, self.num, self.batches, self.accelerator = loader, num, batches, accelerator

    def __iter__(self) -> Iterator[Any]:
        found: list[Any] = []
        for batch in self.loader:
            found.append(batch)
            is_end = self.accelerator.gradient_state.end_of_dataloader
            if len(found) == self.num or is_end:
                yield from self._yielded(found)
                found = []
        if found:  # a loader that Accelerate has not prepared tells no end
            yield from self._yielded(found)

    def _yielded(self, found: list[Any]) -> Iterator[Any]:
        self.batches[:] = found
        for number, each in enumerate(found, 1):
            self.accelerator.is_ahead = number < len(found)
            yield each

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class ReplicaAccelerator(Accelerator):
    """An ``Accelerator`` whose processes are replicas, each of them a pipeline.

    ``pipeline_group`` is the group of this pipeline, for CPU tensors, and ``replica_group`` that of
    the processes with the same stages; None where there is one process. ``loss`` is what
    ``backward`` was given.
    """

    pipeline_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None  # replicas by stages
    pipelined: PipelinedModel | None = None
    is_ahead = False  # the data loader has ended, but its batches have not
    loss: Tensor

    def __init__(self, accelerator: Accelerator, num_replicas: int) -> None:
        self.__dict__.update(vars(accelerator))  # Trainer has made it
        world = accelerator.num_processes
        if num_replicas < 1 or world % num_replicas:
            raise ValueError(f"replicas={num_replicas} does not divide {world} processes")
        self.num_stage_ranks = world // num_replicas
        if world > 1:
            sizes, names = (num_replicas, self.num_stage_ranks), ("replica", "stage")
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
            self.pipeline_group = control_group(self.mesh["stage"].get_group())
            self.replica_group = self.mesh["replica"].get_group() if num_replicas > 1 else None

    @property
    def num_processes(self) -> int:
        return 1 if self.mesh is None else self.mesh.size(0)

    @property
    def process_index(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(0)

    def prepare_data_loader(self, data_loader: Any, *_: Any, **options: Any) -> Any:
        """Batches stay on the CPU, to be sent to the pipeline's other ranks."""
        return super().prepare_data_loader(data_loader, **{**options, "device_placement": False})

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return self.pipelined or model

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if isinstance(model, PipelinedModel | StandIn) and self.pipelined is not None:
            return self.pipelined.plain[0]
        return cast(nn.Module, super().unwrap_model(model, *args, **options))

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Keep the loss for the pipeline, which runs the backward."""
        self.loss = loss

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the norm over the stages of all ranks."""
        return clip_grad_norm_(parameters, max_norm, norm_type, group=self.pipeline_group)

    def in_full_precision(self, output: Any) -> Any:
        """A model's output as Accelerate returns it: in float32 under mixed precision."""
        return output if self.mixed_precision == "no" else convert_to_fp32(output)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return self.gather(input_data) if self.is_ahead else super().gather_for_metrics(input_data)

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all replicas."""
        return tensor if self.replica_group is None else recursively_apply(self._gather_one, tensor)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        with collective_call(self.replica_group, "gather()"):
            dist.all_gather(parts, tensor, self.replica_group)
        return torch.cat(parts)

    def from_rank(self, rank: int, value: Any) -> Any:
        """The value of a rank of this pipeline, its tensors on the CPU."""
        if self.pipeline_group is None:
            return value
        made = [send_to_device(value, "cpu") if self.pipeline_group.rank() == rank else None]
        with collective_call(self.pipeline_group, "from_rank()"):
            dist.broadcast_object_list(made, group=self.pipeline_group, group_src=rank)
        return made[0]
