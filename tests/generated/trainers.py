"""What a script is run with: what the plain model and a pipeline have in common, and the former."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock import draw_step_seed, microbatch_rng, split_args_kwargs_into_chunks
from penstock.testing.compare import PlainResult, Snapshot, plain_step
from tests.generated.case import Case
from tests.generated.hooks import hook_module, hook_parameter
from tests.generated.models import Batch, loss_of, make_batch, make_model
from tests.generated.moves import Evaluate, Found, Step
from tests.generated.plans import Plan

__all__ = ["LR", "Common", "Plain"]

LR = 0.01


class Common:
    """A model that is trained, and its optimizer.

    Args:
        case: the script.
        plan: how the model is laid on ranks; the plain model takes its microbatches from it.
        replica: which one this is.
    """

    def __init__(self, case: Case, plan: Plan, replica: int = 0) -> None:
        self.case, self.plan, self.replica = case, plan, replica
        self.frozen = case.recipe.frozen
        self.scaler: Any = None
        self.calls: Counter[str] = Counter()

    # --- of each ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters here."""
        raise NotImplementedError

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """The buffers here."""
        raise NotImplementedError

    def train(self, batch: Batch) -> Found:
        """Forwards and backwards, and the losses."""
        raise NotImplementedError

    def clip(self) -> Tensor:
        """Clip the gradients; their norm before."""
        raise NotImplementedError

    # --- of both ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """With a new model: its hooks, what is frozen, its optimizer."""
        self.calls.clear()
        self.freeze(self.frozen)
        named = dict(self.named_parameters())
        for kind, unit in self.case.hooks:
            if "gradient" in kind:
                for name in self._of_unit(named, unit):
                    clamps = self.case.tolerance is None
                    hook_parameter(named[name], kind, name, self.calls, clamps=clamps)
        # Where a shared parameter is sharded, each of its places has one of its name.
        params = [param for _, param in self.named_parameters()]
        self.optimizer = self.make_optimizer(params)
        if self.case.optimizer == "in backward":
            for param in params:
                self._step_in_backward(param)

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The script's optimizer; a rank may have no parameters."""
        if self.case.optimizer == "adamw" and "sparse words" not in self.case.recipe.units:
            # Of a gradient that is rounding alone, nothing is to be made.
            return torch.optim.AdamW([{"params": params}], lr=LR, eps=1e-4)
        momentum = 0.0 if "sparse words" in self.case.recipe.units else 0.9
        return torch.optim.SGD([{"params": params}], lr=LR, momentum=momentum)

    def _step_in_backward(self, param: nn.Parameter) -> None:
        """A step as soon as the last microbatch has added its gradient."""
        optimizer, times = torch.optim.SGD([param], lr=LR), itertools.count(1)

        def hook(param: Tensor) -> None:
            if next(times) % self.plan.microbatches == 0:
                optimizer.step()
                param.grad = None

        if param.requires_grad:
            param.register_post_accumulate_grad_hook(hook)

    def freeze(self, units: tuple[int, ...]) -> None:
        """Freeze these layers, and train all others."""
        self.frozen = units
        named = list(self.named_parameters())
        frozen = {name for unit in units for name in self._of_unit(dict(named), unit)}
        for name, param in named:
            param.requires_grad_(name not in frozen)

    def _of_unit(self, named: Iterable[str], unit: int) -> list[str]:
        begin = f"{unit}." if self.case.recipe.way in ("layers", "pieces") else f"blocks.{unit}."
        return [name for name in named if name.startswith(begin)]

    def step(self, move: Step) -> Found:
        """Train on a batch, and what it came to."""
        batch = self.batch(move, self.replica)
        torch.manual_seed(move.seed + self.replica)
        with autocast(move.narrow):
            found = dict(self.train(batch))
        if move.clip and self.scaler is None:
            has_any = any(param.grad is not None for _, param in self.named_parameters())
            norm = self.clip()
            # A rank without gradients has no dtype of theirs.
            found |= {"norm": norm} if has_any else {}
        if move.update:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                found["scale"] = torch.tensor(self.scaler.get_scale())
            else:
                self.optimizer.step()
            self.zero_grad(move.zero)
        return found

    def batch(self, move: Step | Evaluate, replica: int) -> Batch:
        """What the move is given."""
        recipe, seed = self.case.recipe, move.seed + 1000 * replica
        batch = make_batch(recipe, move.rows, seed, length=move.length)
        if isinstance(move, Step) and move.overflow:
            target = batch.kwargs["labels"] if batch.target is None else batch.target
            target[0] = torch.inf
        return batch

    def zero_grad(self, how: str) -> None:
        """Forget the gradients."""
        for _, param in self.named_parameters():
            if how == "none" or param.grad is None:
                param.grad = None
            elif how == "zeros":
                param.grad = torch.zeros_like(param.grad)

    def state(self) -> Snapshot:
        """Gradients; buffers, parameters and how often hooks were called."""
        named = list(self.named_parameters())
        return Snapshot(
            grads={name: None if p.grad is None else whole(p.grad) for name, p in named},
            buffers={
                **{name: whole(buffer) for name, buffer in self.named_buffers()},
                **{f"(the parameter {name})": whole(param) for name, param in named},
                **{
                    f"(calls of hooks on {name})": torch.tensor(self.calls[name])
                    for name, _ in named
                    if name in self.calls
                },
            },
        )


class Plain(Common):
    """The model in one piece, in one process.

    Args:
        case: the script.
        replicas: how many models there are, whose gradients are averaged.
        replica: which of them is compared.
    """

    def __init__(self, case: Case, replicas: int = 1, replica: int = 0) -> None:
        super().__init__(case, case.plan, replica)
        if case.optimizer == "scaled":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        self.models = [self._model() for _ in range(replicas)]
        self._shares_next = True
        self.begin()

    @property
    def model(self) -> Any:
        """The one that is compared."""
        return self.models[self.replica]

    def _model(self) -> Any:
        model = make_model(self.case.recipe)
        for kind, unit in self.case.hooks:
            hook_module(model, kind, unit)
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
        for model in self.models:
            for name, param in model.named_parameters():
                if model is not self.model:
                    param.data = self.model.get_parameter(name).data.clone()
        return found

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

    def zero_grad(self, how: str) -> None:
        """Forget the gradients of all replicas."""
        super().zero_grad(how)
        self._share_grads()

    def _share_grads(self) -> None:
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
            n_microbatches=self.plan.microbatches,
            scale_grads=self.case.scale_grads,
            **batch.kwargs,
        )
        return found_of(result)

    def loss_fn(self, output: Any, *target: Any) -> Tensor:
        """The loss, scaled where there is a scaler."""
        loss: Tensor = loss_of(self.case.recipe)(output, *target)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def clip(self) -> Tensor:
        """As torch does."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self._share_grads()
        return norm

    def evaluate(self, move: Evaluate) -> Found:
        """The models without gradients, microbatch by microbatch."""
        self._share_buffers()
        self._shares_next = False
        found = [self._evaluate(model, i, move) for i, model in enumerate(self.models)]
        return found[self.replica]

    def _evaluate(self, model: Any, replica: int, move: Evaluate) -> Found:
        batch = self.batch(move, replica)
        model.train(move.training)
        num = self.plan.microbatches
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
        return found

    def resume(self, plan: Plan) -> None:
        """A new model and optimizer, with the state of those before."""
        # The buffers of the first replica.
        model, optimizer = self.models[0].state_dict(), self.optimizer.state_dict()
        self.plan, self._shares_next = plan, True
        self.models = [self._model() for _ in self.models]
        for each in self.models:
            each.load_state_dict(model)
        self.begin()
        self.optimizer.load_state_dict(optimizer)


def found_of(result: PlainResult) -> Found:
    """The losses, by microbatch."""
    return {f"loss {i}": loss for i, loss in enumerate(result.losses)}


def tensor_of(output: Any) -> Tensor:
    """What a model computes, beside its loss."""
    found: Tensor = output["output"] if isinstance(output, dict) else output
    return found


def whole(tensor: Any) -> Tensor:
    """A copy in full, of what may be spread or sparse."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().to_dense().clone()


def autocast(narrow: bool) -> AbstractContextManager[Any]:
    """Bfloat16, or nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow)
