"""PipelineTrainer: a ``transformers.Trainer`` that trains its model by a pipeline, under torchrun.

    Trainer        batch 0   batch 1   batch 2   batch 3   clip, optimizer.step()
                      │         │         │         │
    PipelineTrainer   └─ microbatches of one step ──┘  ─►  losses, gradients

The first call of ``training_step`` runs all batches of a step; each call returns its own batch's
loss. The loss, its normalization and its scale are Trainer's, whose ``training_step`` is called
twice per microbatch: with a stand-in for the model that raises the arguments of the call, and on
the last stage's rank with one that returns the output.

An evaluation for losses alone looks ahead for as many batches. Trainer splits its data and gathers
its results over the processes of its ``Accelerator``, which are replicas here (``accelerate.py``).
A replica's first rank loads its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from penstock.errors import StageError
from penstock.integrations.accelerate import (
    LookAhead,
    ModelCall,
    PipelinedModel,
    ReplicaAccelerator,
    StandIn,
)
from penstock.pipeline import Pipeline
from penstock.runtime.comm.process_group import collective_call, gather_objects
from penstock.training.checkpoint import load_optimizer_state, plain_optimizer_state

__all__ = ["PipelineTrainer"]

_REFUSED = (  # settings of TrainingArguments
    *("auto_find_batch_size", "bf16_full_eval", "deepspeed", "eval_use_gather_object", "fp16"),
    *("fp16_full_eval", "fsdp", "neftune_noise_alpha", "parallelism_config", "save_on_each_node"),
    *("torch_compile", "use_liger_kernel"),
)


class PipelineTrainer(Trainer):
    """A ``transformers.Trainer`` whose model is split into stages, one or more per process.

    ``gradient_accumulation_steps`` is the number of microbatches, ``per_device_train_batch_size``
    the rows of each. In training a rank updates its own stages' parameters of ``self.model``;
    saving, and the end of ``train``, bring all up to date. Checkpoints have Trainer's format.

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
    # The stages are moved to their devices, the whole model is not.
    place_model_on_device = property(lambda self: False, lambda self, value: None)

    def __init__(
        self,
        *args: Any,
        replicas: int = 1,
        pipeline: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._num_replicas, self._options = replicas, dict(pipeline or {})
        _refuse(kwargs.get("args", args[1] if len(args) > 1 else None))
        self._pipelined: PipelinedModel | None = None
        self._batches: list[Any] = []
        self._losses: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None  # without Accelerate's wrapper
        self._param_names: list[list[str]] = []  # of the whole model, by parameter group
        self._whole_states: list[dict[str, Any]] = []  # of the optimizer, for Trainer to save
        super().__init__(*args, **kwargs)
        if self.model_init is None:
            self._prepare_pipeline()

    # --- the pipeline ------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline over ``self.model``."""
        return self._prepare_pipeline().pipe

    def create_accelerator_and_postprocess(self) -> None:
        """Let Trainer take the replicas for its processes."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ReplicaAccelerator(self.accelerator, self._num_replicas)
        self.gather_function = self.accelerator.gather_for_metrics

    def _prepare_pipeline(self) -> PipelinedModel:
        """The pipeline of the current model, which ``model_init`` may have made anew."""
        if self._pipelined is None or self._pipelined.plain[0] is not self.model:
            mesh, replicas = self.accelerator.mesh, self.accelerator.replica_group
            pipe = Pipeline(
                self.model,
                loss_fn=self._microbatch_loss,
                n_microbatches=self.args.gradient_accumulation_steps,
                scale_grads=False,
                dynamic_shapes=True,
                device=self.args.device,
                group=None if mesh is None else mesh["stage"].get_group(),
                **{"microbatch_rng": True, **self._options},
            )
            names = ("bucket_cap_mb", "broadcast_buffers")
            given = {name: getattr(self.args, f"ddp_{name}") for name in names}
            options: Any = {name: value for name, value in given.items() if value is not None}
            for stage in pipe.stages if replicas is not None else ():
                if any(param.requires_grad for param in stage.submod.parameters()):
                    stage.submod = DistributedDataParallel(
                        stage.submod, process_group=replicas, **options
                    )
            self._pipelined = PipelinedModel(pipe, self.model, self.accelerator)
            self.accelerator.pipelined = self._pipelined
        self.model_wrapped = self._pipelined
        return self._pipelined

    # --- training ----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """The batches of one step, as the pipeline's first rank loads them."""
        self._batches = self.accelerator.from_rank(0, list(islice(epoch_iterator, num_batches)))
        self._losses = []
        return super().get_batch_samples(iter(self._batches), num_batches, device)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run all microbatches of a step in its first call; returns the loss of this one."""
        if not self._losses:
            batches, self._batches = self._batches, []
            if not batches or inputs is not batches[0]:
                raise StageError("training_step() takes the batches of get_batch_samples()")
            step, num = super().training_step, num_items_in_batch
            calls = [self._model_call(step, each, num) for each in batches]
            pipe, num_items = self._prepare_pipeline().train().pipe, {"num_items": num}
            with self.accelerator.autocast():
                pipe.step(kwarg_mbs=calls, target_mbs=batches, loss_kwargs=num_items)
            self._losses = [loss.to(self.args.device) for loss in pipe.losses]
        return self._losses.pop(0)

    def _model_call(self, step: Callable[..., Any], inputs: Any, *args: Any) -> dict[str, Any]:
        """The keyword arguments with which a step of Trainer's calls the model."""
        try:
            step(StandIn(), dict(inputs), *args)
        except ModelCall as call:
            return cast(dict[str, Any], call.args[0])
        raise StageError("compute_loss() does not call the model")

    def _microbatch_loss(self, output: Any, inputs: Any, *, num_items: Any = None) -> Any:
        """Trainer's loss for an output of the last stage; outside of autocast, as in Trainer."""
        with torch.autocast(self.args.device.type, enabled=False):
            stand_in = StandIn(self.accelerator.in_full_precision(output))
            if not self._prepare_pipeline().training:
                return super().prediction_step(stand_in, dict(inputs), True)[0]
            super().training_step(stand_in, dict(inputs), num_items)
        return self.accelerator.loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters; its state is saved and loaded as a whole."""
        pipelined = self._prepare_pipeline()
        name_of = {id(param): name for name, param in pipelined.named_parameters()}
        if self.optimizer is not None and self._optimizer is None:  # of the plain model
            known = {*map(id, self.model.parameters())}
            for group in self.optimizer.param_groups:
                if not known.issuperset(map(id, group["params"])):
                    raise ValueError("the optimizer has parameters that the model has not")
                group["params"] = [param for param in group["params"] if id(param) in name_of]
        wrapped = super().create_optimizer(pipelined)
        optimizer = getattr(wrapped, "optimizer", wrapped)
        if optimizer is not self._optimizer:
            self._optimizer, whole = optimizer, self._whole_states
            pipeline_group = self.accelerator.pipeline_group
            mine = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            with collective_call(pipeline_group, "create_optimizer()"):
                by_group = zip(*gather_objects(pipeline_group, mine), strict=True)
            order = pipelined.order.__getitem__
            self._param_names = [sorted({*chain(*parts)}, key=order) for parts in by_group]
            optimizer.register_state_dict_post_hook(lambda *_: whole.pop() if whole else None)
            optimizer.register_load_state_dict_pre_hook(self._load_whole_state)
        return wrapped

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the whole model's parameters with weight decay."""
        return super().get_decay_parameter_names(self.model)

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
        loader = LookAhead(dataloader, num, self._batches, self.accelerator)
        return super().evaluation_loop(cast(DataLoader[Any], loader), *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Evaluate a batch as one microbatch; every rank gets its loss, and its outputs."""
        pipelined = self._prepare_pipeline().eval()
        if not prediction_loss_only:
            inputs = self.accelerator.from_rank(0, inputs)
            return super().prediction_step(pipelined, inputs, False, ignore_keys)
        if not self._losses:
            batches = self.accelerator.from_rank(0, self._batches[:] or [inputs])
            self._batches.clear()
            step = super().prediction_step
            calls = [self._model_call(step, each, True) for each in batches]
            with self.accelerator.autocast():
                pipelined.pipe.eval(kwarg_mbs=calls, target_mbs=batches, return_outputs=False)
            self._losses = [loss.to(self.args.device) for loss in pipelined.pipe.losses]
        return (self._losses.pop(0) if self._losses else None), None, None

    # --- saving and loading ------------------------------------------------------------------

    def sync_model(self) -> None:
        """Bring ``self.model`` up to date on every rank; a collective call."""
        pipelined, group = self._pipelined, self.accelerator.pipeline_group
        if pipelined is None or pipelined.plain[0] is not self.model or group is None:
            return
        local = pipelined.pipe.state_dict()
        with collective_call(group, "sync_model()"), torch.no_grad():
            by_rank = gather_objects(group, list(local))
            ranks = reversed(range(group.size()))
            owners = {name: rank for rank in ranks for name in by_rank[rank]}
            for name, value in self.model.state_dict(keep_vars=True).items():
                is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
                if name not in owners or (is_frozen and pipelined.is_synced):
                    continue
                is_own = owners[name] == group.rank()
                sent = local[name].cpu() if is_own else torch.empty_like(value, device="cpu")
                dist.broadcast(sent.detach(), group=group, group_src=owners[name])
                if not is_own:
                    value.copy_(sent)
        pipelined.is_synced = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as ``Trainer.save_model`` does; a collective call."""
        self.sync_model()
        if _internal_call and not self.args.save_only_model and self._optimizer is not None:
            pipe, group = self.pipeline, self.accelerator.pipeline_group
            state = plain_optimizer_state(pipe, self._optimizer, self._param_names, group=group)
            self._whole_states[:] = [state] if state and self.args.should_save else []
        super().save_model(output_dir, _internal_call)

    def _load_whole_state(self, optimizer: torch.optim.Optimizer, state: Any) -> Any:
        """Load this rank's part of a whole state; None, for no change, if that is all of it."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes == [len(group["params"]) for group in optimizer.param_groups]:
            return None
        load_optimizer_state(self.pipeline, optimizer, state, chain(*self._param_names))
        return optimizer.state_dict()


def _refuse(args: Any) -> None:
    """Raise a ValueError for settings that are not supported."""
    found = [name for name in _REFUSED if getattr(args, name, None)]
    if args is not None and args.train_sampling_strategy == "batch_rebalance":
        found.append("train_sampling_strategy='batch_rebalance'")
    if args is not None and args.accelerator_config.dispatch_batches:
        found.append("dispatch_batches")
    if found:
        raise ValueError(
            f"PipelineTrainer does not support {', '.join(found)}; leave it out: replicas= is for "
            "data parallelism, bf16= for mixed precision, pipeline={'wrap_fn': ...} for compilation"
        )
