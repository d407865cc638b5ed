"""A script run with the model in one piece: what a pipeline is compared with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock import draw_step_seed, microbatch_rng, split_args_kwargs_into_chunks
from tests.compare import plain_step
from tests.generated.case import Case
from tests.generated.habits import LR
from tests.generated.models import Batch, loss_of, make_model
from tests.generated.moves import Evaluate, Found, Step
from tests.generated.plans import Plan
from tests.generated.trainers import Common, autocast, tensor_of, times, told_of

__all__ = ["Plain"]


class Plain(Common):
    """The model in one piece, in one process.

    Args:
        case: the script.
        replicas: how many models there are, whose gradients are averaged.
        replica: which of them is compared.
    """

    def __init__(self, case: Case, replicas: int = 1, replica: int = 0) -> None:
        super().__init__(case, case.plan, replica)
        if case.habits.scaled:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        self.models = [self._model() for _ in range(replicas)]
        self._steps_itself: dict[str, torch.optim.SGD] = {}
        self._shares_next = True
        self.begin()

    @property
    def model(self) -> Any:
        """The one that is compared."""
        return self.models[self.replica]

    def _model(self) -> Any:
        model = make_model(self.case.recipe)
        self.hook(model)
        return model

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters of the model."""
        named: Iterator[tuple[str, nn.Parameter]] = self.model.named_parameters()
        return named

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """The buffers of the model."""
        named: Iterator[tuple[str, Tensor]] = self.model.named_buffers()
        return named

    def step(self, move: Step) -> Found:
        """Train on a batch, the replicas in turn; they go on with the mean of their gradients."""
        self._seed = move.seed
        self._next = iter([self.batch(move, i) for i in range(len(self.models))])
        found = super().step(move)
        for name, param in self.model.named_parameters():
            if len(self.models) > 1 and name in self._steps_itself:
                self._steps_itself[name].step()
                param.grad = None
        if self._steps_itself:
            self.share_grads()
        self._share_parameters()
        return found

    def step_in_backward(self, name: str, param: nn.Parameter) -> None:
        """Of replicas, a step with the mean of their gradients."""
        if len(self.models) == 1:
            super().step_in_backward(name, param)
        elif param.requires_grad:
            self._steps_itself[name] = torch.optim.SGD([param], lr=LR)

    def _share_parameters(self) -> None:
        for model in self.models:
            for name, param in model.named_parameters():
                if model is not self.model:
                    param.data = self.model.get_parameter(name).data.clone()

    def train(self, batch: Batch) -> Found:
        """The plain loop."""
        if len(self.models) == 1:
            return self._loop(self.model, batch)
        self._share_buffers()
        self._shares_next = True
        found = []
        for replica, (model, each) in enumerate(zip(self.models, self._next, strict=True)):
            torch.manual_seed(self._seed + replica)
            found.append(self._loop(model, each))
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            grads = [p.grad for p in params if p.grad is not None]
            if grads:
                mean = torch.stack([g.to_dense() for g in grads]).mean(0)
                for param in params:
                    param.grad = mean.clone()
        return found[self.replica]

    def _share_buffers(self) -> None:
        """As DDP does before a forward, but for those after one without gradients."""
        if self.case.replicas == "ddp" and self._shares_next:
            for model in self.models[1:]:
                for mine, first in zip(model.buffers(), self.models[0].buffers(), strict=True):
                    mine.data = first.clone()

    def zero_grad(self, how: str, *, by_model: bool = True) -> None:
        """Forget the gradients of all replicas."""
        super().zero_grad(how, by_model=by_model)
        self.share_grads()

    def forget(self, *, set_to_none: bool) -> None:
        """As torch does."""
        self.model.zero_grad(set_to_none=set_to_none)

    def share_grads(self) -> None:
        """Give all replicas the gradients of the one that is compared."""
        for model in self.models:
            for name, param in model.named_parameters():
                grad = self.model.get_parameter(name).grad
                param.grad = grad if model is self.model or grad is None else grad.clone()

    def _loop(self, model: Any, batch: Batch) -> Found:
        seed = draw_step_seed() if self.case.microbatch_rng else 0
        numbers = itertools.count()

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.case.microbatch_rng:
                return model(*args, **kwargs)
            with microbatch_rng(seed, next(numbers)):
                return model(*args, **kwargs)

        result = plain_step(
            call,
            self.loss_fn,
            *batch.args,
            target=batch.target,
            n_microbatches=self.now.microbatches,
            scale_grads=self.case.scale_grads,
            **batch.kwargs,
        )
        return {f"loss {i}": loss for i, loss in enumerate(result.losses)}

    def loss_fn(self, output: Any, *target: Any) -> Tensor:
        """The loss, scaled where there is a scaler."""
        self.bomb.tick("loss")
        loss: Tensor = loss_of(self.case.recipe)(output, *target)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def clip_by_norm(self, largest: float, kind: float) -> Tensor:
        """As torch does."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest, kind)
        self.share_grads()
        return norm

    def evaluate(self, move: Evaluate) -> Found:
        """The models without gradients, microbatch by microbatch."""
        self.turn(move)
        self._share_buffers()
        self._shares_next = False
        found = [self._evaluate(model, i, move) for i, model in enumerate(self.models)]
        return found[self.replica]

    def _evaluate(self, model: Any, replica: int, move: Evaluate) -> Found:
        batch = self.batch(move, replica)
        model.train(move.training)
        trained = copy.deepcopy(model.state_dict())
        if move.averaged:
            model.load_state_dict(trained | self.average)
        num = self.now.microbatches
        named = (
            {**batch.kwargs, "target": batch.target} if batch.target is not None else batch.kwargs
        )
        found = {}
        with torch.no_grad(), autocast(move.narrow):
            parts = zip(*split_args_kwargs_into_chunks(batch.args, named, num), strict=True)
            for i, (args, kwargs) in enumerate(parts):
                target = [kwargs.pop("target")] if "target" in kwargs else []
                output = model(*args, **kwargs)
                found[f"output {i}"] = tensor_of(output)
                if move.target:
                    found[f"loss {i}"] = self.loss_fn(output, *target)
        model.train()
        if move.averaged:
            model.load_state_dict(trained)
        return found

    def reload(self, factor: float) -> Found:
        """As torch does."""
        told = told_of(self.model.state_dict())
        for model in self.models:
            model.load_state_dict(times(model.state_dict(), factor))
        return told

    def resume(self, plan: Plan) -> None:
        """A new model and optimizer, with the state of those before."""
        # The buffers of the first replica.
        model, optimizer = self.models[0].state_dict(), self.optimizer.state_dict()
        rates = self.rates
        self.plan, self._shares_next = plan, True
        self.models = [self._model() for _ in self.models]
        for each in self.models:
            each.load_state_dict(model)
        self.begin()
        self.optimizer.load_state_dict(optimizer)
        if rates is not None:
            self.rates.load_state_dict(rates.state_dict())
        self.begin_average()
