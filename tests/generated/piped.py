"""A script run with a pipeline: over loopback, or over the ranks' processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, PipelineStage, pipeline
from penstock.training.checkpoint import load, save
from penstock.training.clip import clip_grad_norm_
from tests.generated.case import Case
from tests.generated.hooks import hook_module
from tests.generated.models import Batch, loss_of, make_batch, make_model
from tests.generated.moves import Evaluate, Found
from tests.generated.plans import Plan
from tests.generated.trainers import Common, autocast, tensor_of
from tests.partition.capturing import cuts_before

__all__ = ["Place", "Piped"]

CPU, TIMEOUT_S = torch.device("cpu"), 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands.

    Args:
        group: the pipeline's ranks.
        replicas: along which stages are replicated, if they are.
        replica: which of them this is.
    """

    group: dist.ProcessGroup
    replicas: DeviceMesh | None = None
    replica: int = 0


class Piped(Common):
    """A pipeline.

    Args:
        case: the script.
        place: where this process stands; None where one plays all ranks.
    """

    def __init__(self, case: Case, place: Place | None = None) -> None:
        super().__init__(case, case.plan, 0 if place is None else place.replica)
        self.place, self.group = place, None if place is None else place.group
        self.is_here = True
        if case.optimizer == "scaled":
            scaler: Any = torch.amp.GradScaler if place is None else ShardedGradScaler
            self.scaler = scaler("cpu", init_scale=2.0**8)
            # Only with a first use there is a scale on every rank.
            self.scaler.scale(torch.zeros(()))
        self._begin_with(make_model(case.recipe))

    def _begin_with(self, model: Any) -> None:
        for kind, unit in self.case.hooks:
            hook_module(model, kind, unit)
        self.pipe = self._pipeline(model)
        if self.place is not None and self.place.replicas is not None:
            for stage in self.pipe.stages:
                _replicate(stage, self.case.replicas, self.place.replicas)
        self.begin()

    def _pipeline(self, model: Any) -> Pipeline:
        case, recipe, plan = self.case, self.case.recipe, self.plan
        program = plan.program()
        more: dict[str, Any] = {}
        match recipe.way:
            case "pieces":
                model = nn.Sequential(*model)
                more["split"] = plan.split
            case "layers":
                more["split"] = plan.split
            case "by module":
                more["split"] = self._beginnings() or None
                more["example"] = self._example()
            case "captured":
                model = self._captured(model)
        own = "loss" in recipe.between
        if not own or self.scaler is not None or recipe.way == "captured":
            more["loss_fn"] = self._own_loss if own else self._loss
        return Pipeline(
            model,
            schedule=program,
            scale_grads=case.scale_grads,
            dynamic_shapes=case.dynamic_shapes,
            microbatch_rng=case.microbatch_rng,
            group=self.group,
            timeout_s=TIMEOUT_S,
            **more,
        )

    def _example(self) -> dict[str, Any]:
        batch = make_batch(self.case.recipe, 2, 0)
        return {"x": batch.args[0], **batch.kwargs}

    def _beginnings(self) -> list[str]:
        """The blocks with which stages after the first begin."""
        return [f"blocks.{begin}" for begin in accumulate(self.plan.split[:-1])]

    def _captured(self, model: Any) -> list[PipelineStage]:
        plan, group = self.plan, self.group
        place = plan.program().placement
        cut = pipeline(model, (), self._example(), cuts_before(*self._beginnings()))
        mine = range(place.num_stages) if group is None else place.stages_of(group.rank())
        return [
            PipelineStage(
                cut.get_stage_module(place.model_stage(i)), i, place.num_stages, CPU, group=group
            )
            for i in mine
        ]

    def _loss(self, output: Any, target: Tensor) -> Any:
        return self._scaled(loss_of(self.case.recipe)(output, target))

    def _own_loss(self, output: Any) -> Any:
        return self._scaled(output["loss"])

    def _scaled(self, loss: Tensor) -> Any:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        return (scaled, {"loss": loss.detach()}) if self.case.metrics else scaled

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages."""
        return self.pipe.named_parameters() if self.is_here else ()

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """The buffers of this process's stages."""
        return self.pipe.named_buffers() if self.is_here else ()

    def train(self, batch: Batch) -> Found:
        """A step of the pipeline."""
        if not self.is_here:
            return {}
        args, kwargs = self._given(batch, target=True)
        loss = self.pipe.step(*args, **kwargs)
        losses = self.pipe.losses
        torch.testing.assert_close(loss, torch.stack(losses).mean(), equal_nan=True)
        return {f"loss {i}": each for i, each in enumerate(losses)}

    def _given(self, batch: Batch, *, target: bool) -> tuple[Any, dict[str, Any]]:
        """What this rank passes."""
        # In two directions, both ends are first and last.
        stages, every = self.pipe.stages, self.case.all_inputs or self.plan.family.copies > 1
        first = every or any(stage.is_first for stage in stages)
        last = every or any(stage.is_last for stage in stages)
        kwargs = dict(batch.kwargs) if first or self.case.recipe.way == "captured" else {}
        if target and last and batch.target is not None:
            kwargs["target"] = batch.target
        return batch.args if first else (), kwargs

    def clip(self) -> Tensor:
        """Over all ranks."""
        if not self.is_here:
            return torch.tensor(0.0)
        return clip_grad_norm_(self.pipe.parameters(), 0.1, group=self.group)

    def evaluate(self, move: Evaluate) -> Found:
        """The pipeline's forwards alone."""
        if not self.is_here:
            return {}
        self.pipe.train(move.training)
        args, kwargs = self._given(self.batch(move, self.replica), target=move.target)
        if move.target and "loss" in self.case.recipe.between:
            kwargs["target_mbs"] = [None] * self.plan.microbatches
        with autocast(move.narrow):
            outputs = self.pipe.eval(*args, merge_outputs=False, **kwargs)
        self.pipe.train()
        found = {f"output {i}": tensor_of(output) for i, output in enumerate(outputs or ())}
        if move.target:
            found |= {f"loss {i}": loss for i, loss in enumerate(self.pipe.losses)}
        return found

    def resume(self, plan: Plan) -> None:
        """A checkpoint, and a new pipeline that has loaded it, on as many ranks as that takes."""
        folder, replicated = self._folder(), bool(self.case.replicas)
        if self.is_here:
            # Of a sharded parameter each replica has a part.
            save(folder, self.pipe, self.optimizer, group=None if replicated else self.group)
        self.plan = plan
        if self.place is not None and self.place.replicas is None:
            _barrier()
            group: Any = dist.new_group(list(range(plan.ranks)))
            self.is_here = dist.get_rank() < plan.ranks
            self.group = group if self.is_here else None
        if self.is_here:
            self._begin_with(make_model(self.case.recipe))
            self.zero_grad("none")
            load(folder, self.pipe, self.optimizer, group=None if replicated else self.group)
        _barrier()
        if self.place is None or dist.get_rank() == 0:
            shutil.rmtree(folder)

    def _folder(self) -> Path:
        """One for all processes."""
        name = [tempfile.mkdtemp()] if self.place is None or dist.get_rank() == 0 else [""]
        if self.place is not None:
            dist.broadcast_object_list(name)
        return Path(name[0])


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _replicate(stage: PipelineStage, kind: str, replicas: DeviceMesh) -> None:
    if not any(param.requires_grad for param in stage.submod.parameters()):
        return  # DDP refuses what has nothing to train
    match kind:
        case "ddp":
            stage.submod = DistributedDataParallel(stage.submod, process_group=replicas.get_group())
        case "fsdp":
            fully_shard(stage.submod, mesh=replicas)
        case _:
            replicate(stage.submod, device_mesh=replicas)
