"""A script run with a pipeline: over loopback, or over the ranks' processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, PipelineStage, auto, pipeline, save_csv, schedule
from penstock.errors import PenstockError
from penstock.schedule.registry import remove
from penstock.training.checkpoint import load, save
from penstock.training.clip import clip_grad_norm_
from tests.generated.case import Case
from tests.generated.failing import Boom
from tests.generated.models import Batch, loss_of, make_batch, make_model
from tests.generated.moves import Evaluate, Fail, Found
from tests.generated.plans import Plan
from tests.generated.trainers import Common, autocast, tensor_of, times, told_of
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
        if case.habits.scaled:
            scaler: Any = torch.amp.GradScaler if place is None else ShardedGradScaler
            self.scaler = scaler("cpu", init_scale=2.0**8)
            # Only with a first use there is a scale on every rank.
            self.scaler.scale(torch.zeros(()))
        self._begin_with(make_model(case.recipe))

    def _begin_with(self, model: Any) -> None:
        self.hook(model)
        self.model = self._captured(model) if self.case.recipe.way == "captured" else model
        self._make_pipelines()
        self.begin()

    def _make_pipelines(self) -> None:
        """That of the plan, and the one beside it, over one model."""
        plan = self.plan
        self._first = self._pipeline(plan, self._stages() or self.model)
        if self.place is not None and self.place.replicas is not None:
            for stage in self._first.stages:
                _replicate(stage, self.case.replicas, self.place.replicas)
        self._beside = self._first
        if plan.beside is not None:
            shared = list(self._first.stages) if plan.beside.shares_stages else None
            self._beside = self._pipeline(plan.beside, shared or self.model)

    @property
    def pipe(self) -> Pipeline:
        """The one whose turn it is."""
        return self._first if self.now is self.plan else self._beside

    def _pipeline(self, plan: Plan, model: Any) -> Pipeline:
        case, recipe = self.case, self.case.recipe
        more: dict[str, Any] = {}
        if not _are_stages(model):
            match recipe.way:
                case "pieces":
                    model = nn.Sequential(*model)
                    more["split"] = plan.split
                case "layers":
                    more["split"] = plan.split
                case "by module":
                    if plan.given != "auto":  # which balances the stages itself
                        more["split"] = _beginnings(plan) or None
                    more["example"] = self._example()
        own = "loss" in recipe.between
        if not own or self.scaler is not None or _are_stages(model):
            more["loss_fn"] = self._own_loss if own else self._loss
        with self._scheduled(plan) as given:
            return Pipeline(
                model,
                scale_grads=case.scale_grads,
                dynamic_shapes=case.dynamic_shapes,
                microbatch_rng=case.microbatch_rng,
                group=self.group,
                timeout_s=TIMEOUT_S,
                **given | more,
            )

    @contextmanager
    def _scheduled(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """The schedule, in the form in which it is given, while a pipeline is made of it."""
        numbers: dict[str, Any] = {"ranks": plan.ranks, "n_microbatches": plan.microbatches}
        match plan.given:
            case "name":
                yield {"schedule": plan.schedule, "virtual": plan.virtual, **numbers}
            case "file":
                with tempfile.NamedTemporaryFile(suffix=".csv") as file:
                    save_csv(plan.program(), file.name)
                    yield {"schedule": Path(file.name)}
            case "function":
                of = {"virtual": plan.virtual, "arrangement": plan.family.arrangement}
                schedule("generated", **of)(lambda *, ranks, microbatches: plan.program())
                try:
                    yield {"schedule": "generated", **numbers}
                finally:
                    remove("generated")
            case "auto":
                numbers |= {"virtual": plan.virtual, "example": self._example()}
                with mock.patch.object(auto, "SEARCH_S", 0.3):
                    yield {"schedule": "auto", **numbers}
            case _:
                yield {"schedule": plan.program()}

    def _example(self) -> Any:
        batch = make_batch(self.case.recipe, 2, 0)
        if self.case.recipe.way == "layers":
            return batch.args
        return {"x": batch.args[0], **batch.kwargs}

    def _captured(self, model: Any) -> Any:
        return pipeline(model, (), self._example(), cuts_before(*_beginnings(self.plan)))

    def _stages(self) -> list[PipelineStage]:
        """Those of a captured model."""
        if self.case.recipe.way != "captured":
            return []
        place, group = self.plan.program().placement, self.group
        mine = range(place.num_stages) if group is None else place.stages_of(group.rank())
        return [
            PipelineStage(
                self.model.get_stage_module(place.model_stage(i)), i, place.num_stages, CPU,
                group=group,
            )
            for i in mine
        ]  # fmt: skip

    def _loss(self, output: Any, target: Tensor) -> Any:
        self.bomb.tick("loss")
        return self._scaled(loss_of(self.case.recipe)(output, target))

    def _own_loss(self, output: Any) -> Any:
        self.bomb.tick("loss")
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
        stages, every = self.pipe.stages, self.case.all_inputs or self.now.family.num_directions > 1
        first = every or any(stage.is_first for stage in stages)
        last = every or any(stage.is_last for stage in stages)
        kwargs = dict(batch.kwargs) if first or self.case.recipe.way == "captured" else {}
        if target and last and batch.target is not None:
            kwargs["target"] = batch.target
        return batch.args if first else (), kwargs

    def clip_by_norm(self, largest: float, kind: float) -> Tensor:
        """Over all ranks."""
        if not self.is_here:
            return torch.tensor(0.0)
        return clip_grad_norm_(self.pipe.parameters(), largest, kind, group=self.group)

    def forget(self, *, set_to_none: bool) -> None:
        """The pipeline's."""
        self.pipe.zero_grad(set_to_none=set_to_none)

    def evaluate(self, move: Evaluate) -> Found:
        """The pipeline's forwards alone."""
        if not self.is_here:
            return {}
        self.turn(move)
        self.pipe.train(move.training)
        trained = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        if move.averaged:
            self.pipe.load_state_dict(trained | self.average)
        args, kwargs = self._given(self.batch(move, self.replica), target=move.target)
        if move.target and "loss" in self.case.recipe.between:
            kwargs["target_mbs"] = [None] * self.now.microbatches
        with autocast(move.narrow):
            outputs = self.pipe.eval(*args, merge_outputs=False, **kwargs)
        self.pipe.train()
        if move.averaged:
            self.pipe.load_state_dict(trained)
        found = {f"output {i}": tensor_of(output) for i, output in enumerate(outputs or ())}
        if move.target:
            found |= {f"loss {i}": loss for i, loss in enumerate(self.pipe.losses)}
        return found

    def reload(self, factor: float) -> Found:
        """The state of all ranks."""
        if not self.is_here:
            return {}
        state = self.pipe.state_dict(full=True)
        told = told_of(state)
        self.pipe.load_state_dict(times(state, factor))
        return told

    def failed(self, move: Fail, batch: Batch) -> Found:
        """Told by the error; then pipelines are made anew over the model, and another group."""
        error: PenstockError | None = None
        try:
            self.train(batch)
        except PenstockError as raised:
            error = raised
        self._take_group(self.plan.ranks)
        if self.is_here:
            self._make_pipelines()
        return {} if error is None else self._told(error)

    def _told(self, error: PenstockError) -> Found:
        """The stage and the microbatch in which the user's code failed."""
        assert "Boom: in the" in str(error), repr(error)
        if self.group is None:
            assert isinstance(error.__cause__, Boom), repr(error.__cause__)
        stage = -1
        if error.stage is not None and self.now.given != "auto":
            stage = self.pipe.program.placement.model_stage(error.stage)
        found = {"failed in stage": torch.tensor(stage)}
        if self.now.sums_in_order and not self.now.kept:
            microbatch = -1 if error.microbatch is None else error.microbatch
            found["failed in microbatch"] = torch.tensor(microbatch)
        return found

    def _take_group(self, num_ranks: int) -> None:
        """Another one, of the first of the processes."""
        if self.place is not None and self.place.replicas is None:
            _barrier()
            group: Any = dist.new_group(list(range(num_ranks)))
            self.is_here = dist.get_rank() < num_ranks
            self.group = group if self.is_here else None

    def resume(self, plan: Plan) -> None:
        """A checkpoint, and a new pipeline that has loaded it, on as many ranks as that takes."""
        folder, replicated = self._folder(), bool(self.case.replicas)
        if self.is_here:
            # Of a sharded parameter each replica has a part.
            save(folder, self.pipe, self.optimizer, group=None if replicated else self.group)
            rates = None if self.rates is None else self.rates.state_dict()
            if self.place is None or dist.get_rank() == 0:
                torch.save(rates, folder / "rates.pt")
        self.plan = plan
        self._take_group(plan.ranks)
        if self.is_here:
            self._begin_with(make_model(self.case.recipe))
            self.zero_grad("none")
            load(folder, self.pipe, self.optimizer, group=None if replicated else self.group)
            if self.rates is not None:
                self.rates.load_state_dict(torch.load(folder / "rates.pt", weights_only=False))
        self.begin_average()
        _barrier()
        if self.place is None or dist.get_rank() == 0:
            shutil.rmtree(folder)

    def _folder(self) -> Path:
        """One for all processes."""
        name = [tempfile.mkdtemp()] if self.place is None or dist.get_rank() == 0 else [""]
        if self.place is not None:
            dist.broadcast_object_list(name)
        return Path(name[0])


def _are_stages(model: Any) -> bool:
    return isinstance(model, list) and isinstance(model[0], PipelineStage)


def _beginnings(plan: Plan) -> list[str]:
    """The blocks with which stages after the first begin."""
    return [f"blocks.{begin}" for begin in accumulate(plan.split[:-1])]


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
            replicate(stage.submod, mesh=replicas)
