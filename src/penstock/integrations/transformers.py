"""PipelineTrainer: a ``transformers.Trainer`` that trains its model by a pipeline, under torchrun.

    Trainer        batch 0   batch 1   batch 2   batch 3   clip, optimizer.step()
                      │         │         │         │
    PipelineTrainer   └─ microbatches of one step ──┘  ─►  losses, gradients

The first call of ``training_step`` runs all batches of a step; each call returns its own batch's
loss. The loss, its normalization and its scale are Trainer's, whose ``training_step`` is called
twice per microbatch: with a stand-in for the model that raises the arguments of the call, and on
the last stage's rank with one that returns the output. An evaluation for losses alone looks ahead
for as many batches.

Trainer splits its data and gathers its results over the processes of its ``Accelerator``, which are
replicas here. Of the batches that a replica's ranks load, those of its first rank are used.

                 stage 0   stage 1         a row is a pipeline, and one process to Accelerate
    replica 0    rank 0    rank 1          a column holds the same stages, and is gathered over
    replica 1    rank 2    rank 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, recursively_apply, send_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from penstock.errors import StageError
from penstock.pipeline import Pipeline
from penstock.runtime.comm.c10d import control_group
from penstock.runtime.comm.process_group import collective_call, from_rank
from penstock.training.clip import clip_grad_norm_
from penstock.training.optimizer_state import WholeOptimizerState

__all__ = ["PipelineTrainer", "PrefetchingLoader"]

_REFUSED = (  # settings of TrainingArguments
    *("auto_find_batch_size", "bf16_full_eval", "deepspeed", "eval_use_gather_object", "fp16"),
    *("fp16_full_eval", "fsdp", "neftune_noise_alpha", "parallelism_config", "save_on_each_node"),
    *("predict_with_generate", "torch_compile", "use_liger_kernel"),
)


class PipelineTrainer(Trainer):
    """A ``transformers.Trainer`` whose model is split into stages, one or more per process.

    ``gradient_accumulation_steps`` is the number of microbatches, ``per_device_train_batch_size``
    the rows of each. In training a rank updates its own stages' parameters of ``self.model``;
    saving, and the end of ``train``, bring all up to date. Checkpoints have Trainer's format.
    ``trainer.pipeline`` is the ``penstock.Pipeline`` over ``trainer.model``.

    Args:
        args, kwargs: of ``transformers.Trainer``.
        replicas: the number of data-parallel replicas, which divides the number of processes.
            Neighbouring processes form a pipeline.
        pipeline: options of ``penstock.Pipeline``: ``schedule``, ``split``, ``virtual``, and
            ``ranks`` for a pipeline in one process.

    Raises:
        ValueError: a setting is not supported, or replicas do not divide the processes.
        PartitionError, ScheduleError: see ``penstock.Pipeline``.
    """

    model: nn.Module
    accelerator: ReplicaAccelerator
    pipelined: PipelinedModel
    pipeline: Pipeline
    # The stages are moved to their devices, the whole model is not.
    place_model_on_device = property(lambda self: False, lambda self, value: None)

    def __init__(
        self,
        *args: Any,
        replicas: int = 1,
        pipeline: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._num_replicas = replicas
        _refuse(kwargs.get("args", args[1] if len(args) > 1 else None))
        self._batches: list[Any] = []
        self._losses: list[Tensor] = []
        self._optimizer_state: WholeOptimizerState | None = None
        super().__init__(*args, **kwargs)
        if self.model_init is not None:
            raise ValueError("PipelineTrainer does not support model_init; pass the model")
        mesh, replica_group = self.accelerator.mesh, self.accelerator.replica_group
        self.pipeline = Pipeline(
            self.model,
            loss_fn=self._microbatch_loss,
            n_microbatches=self.args.gradient_accumulation_steps,
            scale_grads=False,
            dynamic_shapes=True,
            device=self.args.device,
            group=None if mesh is None else mesh["stage"].get_group(),
            **{"microbatch_rng": True, **(pipeline or {})},
        )
        for stage in self.pipeline.stages if replica_group is not None else ():
            if any(param.requires_grad for param in stage.submod.parameters()):
                options: Any = self.accelerator.ddp_handler.to_kwargs()
                stage.submod = DDP(stage.submod, process_group=replica_group, **options)
        self.model_wrapped = self.pipelined = PipelinedModel(self.pipeline, self.accelerator)

    # --- training ----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Let Trainer take the replicas for its processes."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ReplicaAccelerator(self.accelerator, self._num_replicas, self)
        self.gather_function = self.accelerator.gather_for_metrics

    def _run(self, run: Any, step: Any, batches: Any, *args: Any, **options: Any) -> None:
        """Run microbatches, with the arguments with which a step of Trainer's calls the model."""
        calls, is_training = [], self.pipelined.training
        for each in batches:
            try:
                step(PlaceholderModel(self.model).train(is_training), dict(each), *args)
            except ModelCall as found:
                calls.append(found.call)
            else:
                raise StageError("compute_loss() does not call the model")
        arg_mbs, kwarg_mbs = zip(*calls, strict=True)
        with self.accelerator.autocast():
            run(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=batches, **options)
        self._losses = [loss.to(self.args.device) for loss in self.pipeline.losses]

    def _microbatch_loss(self, output: Any, inputs: Any, *, num_items: Any = None) -> Any:
        """Trainer's loss for an output of the last stage; outside of autocast, as in Trainer."""
        with torch.autocast(self.args.device.type, enabled=False):
            placeholder = PlaceholderModel(self.model, self.accelerator.in_full_precision(output))
            placeholder.train(self.pipelined.training)
            if not placeholder.training:
                return super().prediction_step(placeholder, dict(inputs), True)[0]
            super().training_step(placeholder, dict(inputs), num_items)
        return self.accelerator.loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one step, as the pipeline's first rank loads them."""
        self._batches = self.accelerator.broadcast(list(islice(epoch_iterator, num_batches)))
        self._losses = []
        return super().get_batch_samples(iter(self._batches), num_batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run all microbatches of a step in its first call; returns the loss of this one."""
        if not self._losses:
            batches, self._batches = self._batches, []
            if not batches or inputs is not batches[0]:
                raise StageError("training_step() takes the batches of get_batch_samples()")
            step, num = self.pipelined.train().pipe.step, num_items_in_batch
            self._run(step, super().training_step, batches, num, loss_kwargs={"num_items": num})
        return self._losses.pop(0)

    def keep_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the optimizer with this rank's parameters; the state that it saves is whole."""
        if self._optimizer_state is None or self._optimizer_state.optimizer is not optimizer:
            own, group = self.pipelined.parameters(), self.accelerator.pipeline_group
            self._optimizer_state = WholeOptimizerState(self.model, optimizer, own, group)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The rows of a step: those of all replicas, not of all processes."""
        return int(super().get_total_train_batch_size(args) / self.accelerator.num_stage_ranks)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of a batch's operations, which Trainer sums over all processes."""
        return int(super().floating_point_ops(inputs) / self.accelerator.num_stage_ranks)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer.train`` does; ``self.model`` is then the trained model."""
        output = super().train(*args, **kwargs)
        self.sync_model()
        return output

    # --- evaluation --------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``Trainer.evaluation_loop`` does; losses alone, several batches at once."""
        num = 1 if self.args.batch_eval_metrics else self.args.gradient_accumulation_steps
        self._batches, self._losses = [], []
        loader = PrefetchingLoader(dataloader, num, self._batches, self.accelerator)
        return super().evaluation_loop(cast(DataLoader[Any], loader), *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Evaluate a batch as one microbatch; every rank gets its loss, and its outputs."""
        pipelined, step = self.pipelined.eval(), super().prediction_step
        if not prediction_loss_only:
            return step(pipelined, self.accelerator.broadcast(inputs), False, ignore_keys)
        if not self._losses:
            batches = self.accelerator.broadcast(self._batches[:] or [inputs])
            self._batches.clear()
            self._run(pipelined.pipe.eval, step, batches, True, return_outputs=False)
        return (self._losses.pop(0) if self._losses else None), None, None

    # --- saving and loading ------------------------------------------------------------------

    def sync_model(self) -> None:
        """Bring ``self.model`` up to date on every rank; a collective call."""
        every = self.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in every if not param.requires_grad}
        self.pipeline.sync_into(self.model, skip=frozen & self.pipelined.frozen)
        self.pipelined.frozen = frozen

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as ``Trainer.save_model`` does; a collective call."""
        self.sync_model()
        is_checkpoint = _internal_call and self.is_in_train  # not before a push to the hub
        if is_checkpoint and not self.args.save_only_model and self._optimizer_state is not None:
            self._optimizer_state.gather(keeps=self.args.should_save)
        super().save_model(output_dir, _internal_call)


def _refuse(args: Any) -> None:
    """Raise a ValueError for settings that are not supported."""
    found = [name for name in _REFUSED if getattr(args, name, None)]
    if args is not None and args.accelerator_config.dispatch_batches:
        found.append("dispatch_batches")
    if args is not None and args.train_sampling_strategy == "batch_rebalance":
        found.append("train_sampling_strategy='batch_rebalance'")
    if args is not None and args.n_gpu > 1:  # Trainer would scale losses as for DataParallel
        seen = f"one process sees {args.n_gpu} GPUs: run one for each"
        found.append(f"DataParallel ({seen}, or set CUDA_VISIBLE_DEVICES=0)")
    if found:
        raise ValueError(
            f"PipelineTrainer does not support {', '.join(found)}; leave it out: replicas= is for "
            "data parallelism, bf16= for mixed precision, pipeline={'wrap_fn': ...} for compilation"
        )


# --- in place of the model -----------------------------------------------------------------------


class ModelCall(StageError):
    """A call of the model, which ends Trainer's step; ``call`` is the arguments."""

    def __init__(self, *call: Any) -> None:
        super().__init__("compute_loss() calls the model twice; a pipeline runs it once")
        self.call = call


class PlaceholderModel(nn.Module):
    """In the model's place: returns an output, if it has one, once; else raises the call."""

    def __init__(self, model: nn.Module, *outputs: Any) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self.config = getattr(model, "config", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._outputs:
            raise ModelCall(args, kwargs)
        return self._outputs.pop()

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """Refuse: a rank of a pipeline has the parameters of its own stages alone."""
        raise StageError("compute_loss() reads parameters: add their penalty within the model")


class PipelinedModel(nn.Module):
    """The pipeline as Trainer's wrapped model: this process's stages, and evaluation."""

    def __init__(self, pipe: Pipeline, accelerator: ReplicaAccelerator) -> None:
        super().__init__()
        self.pipe, self.accelerator = pipe, accelerator
        self.stages = nn.ModuleList(stage.submod for stage in pipe.stages)
        self.frozen: set[str] = set()  # the parameters that were so when last synchronized

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the last stage, on every rank; without a graph."""
        with self.accelerator.autocast():
            outputs = self.pipe.eval(arg_mbs=[args], kwarg_mbs=[kwargs], merge_outputs=False)
        output = self.accelerator.in_full_precision(outputs[0]) if outputs else None
        placement = self.pipe.program.placement
        output = self.accelerator.broadcast(output, placement.rank_of(placement.exits[0]))
        return send_to_device(output, self.accelerator.device)


# --- replicas ------------------------------------------------------------------------------------


class PrefetchingLoader:
    """A data loader that reads up to ``num`` batches into a list, and then yields them."""

    def __init__(self, loader: Any, num: int, batches: list[Any], accelerator: Any) -> None:
        self.loader, self.num, self.batches, self.accelerator = loader, num, batches, accelerator

    def __iter__(self) -> Iterator[Any]:
        found: list[Any] = []
        # A loader that Accelerate has not prepared tells no end: None does.
        for batch in chain(self.loader, [None]):
            found += [] if batch is None else [batch]
            is_end = batch is None or self.accelerator.gradient_state.end_of_dataloader
            if len(found) == self.num or is_end:
                self.batches[:] = found
                for number, each in enumerate(found, 1):
                    self.accelerator.is_ahead = number < len(found)
                    yield each
                found = []

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
    is_ahead = False  # the data loader has ended, but its batches have not
    loss: Tensor

    def __init__(self, made: Accelerator, num_replicas: int, trainer: PipelineTrainer) -> None:
        self.__dict__.update(vars(made))  # by Trainer
        self.trainer = trainer
        world = made.num_processes
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
        return self.trainer.pipelined

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer is self.trainer.optimizer:
            self.trainer.keep_own(getattr(optimizer, "optimizer", optimizer))
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if isinstance(model, PipelinedModel | PlaceholderModel):
            return self.trainer.model
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

    def broadcast(self, value: Any, rank: int = 0) -> Any:
        """Broadcast a value from a rank of this pipeline; its tensors are then on the CPU."""
        make = partial(send_to_device, value, "cpu")
        return from_rank(self.pipeline_group, rank, "broadcast()", make)
