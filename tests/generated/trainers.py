"""What the plain model and a pipeline have in common: what is done around their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.stage.dtensor import full_tensor
from tests.generated.case import Case
from tests.generated.failing import Bomb, Boom
from tests.generated.habits import CLIPS, LR
from tests.generated.hooks import hook_module, hook_parameter
from tests.generated.models import Batch, make_batch
from tests.generated.moves import Evaluate, Fail, Found, Step
from tests.generated.plans import Plan

__all__ = ["Common", "autocast", "tensor_of", "times", "told_of"]


class Common:
    """A model that is trained, and its optimizer.

    Args:
        case: the script.
        plan: how the model is laid on ranks; the plain model takes its microbatches from it.
        replica: which one this is.
    """

    def __init__(self, case: Case, plan: Plan, replica: int = 0) -> None:
        self.case, self.plan, self.replica = case, plan, replica
        self.now = plan  # or the one beside it, where a move is made with that
        self.frozen = case.recipe.frozen
        self.scaler: Any = None
        self.calls: Counter[str] = Counter()
        self.added: Counter[str] = Counter()
        self.bomb = Bomb()

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

    def clip_by_norm(self, largest: float, kind: float) -> Tensor:
        """Clip the gradients; their norm before."""
        raise NotImplementedError

    def forget(self, *, set_to_none: bool) -> None:
        """The model's own ``zero_grad``."""
        raise NotImplementedError

    # --- of both ---------------------------------------------------------------------------------

    def hook(self, model: Any) -> None:
        """What a script hangs on a new model's layers."""
        for kind, unit in self.case.hooks:
            hook_module(model, kind, unit)
        for unit in {m.unit for m in self.case.moves if isinstance(m, Fail) and m.place != "loss"}:
            self.bomb.plant(model, unit)

    def begin(self) -> None:
        """With a new model: its hooks, what is frozen, its optimizer."""
        self.calls.clear()
        self.now = self.plan
        self.freeze(self.frozen)
        named = dict(self.named_parameters())
        for kind, unit in self.case.hooks:
            if "gradient" in kind:
                for name in self._of_unit(named, unit):
                    clamps = self.case.tolerance is None
                    hook_parameter(named[name], kind, name, self.calls, clamps=clamps)
        # Where a shared parameter is sharded, each of its places has one of its name.
        every = list(self.named_parameters())
        sparse, habits = "sparse words" in self.case.recipe.units, self.case.habits
        self.optimizer = habits.make_optimizer(every, sparse=sparse)
        self.rates = habits.make_rates(self.optimizer)
        if habits.in_backward:
            for name, param in every:
                self.step_in_backward(name, param)
        self.begin_average()

    def begin_average(self) -> None:
        """With the parameters as they are."""
        averaged = self.case.habits.averaged
        named = self.named_parameters() if averaged else ()
        self.average = {name: param.detach().clone() for name, param in named}

    def step_in_backward(self, name: str, param: nn.Parameter) -> None:
        """A step as soon as the last microbatch has added its gradient."""
        optimizer = torch.optim.SGD([param], lr=LR)

        def hook(param: Tensor) -> None:
            self.added[name] += 1
            # A sharded gradient comes once, reduced.
            if self.case.replicas or self.added[name] == self.now.microbatches:
                optimizer.step()
                param.grad = None
                self.added[name] = 0

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

    def turn(self, move: Step | Evaluate | Fail) -> None:
        """Make the next move with the pipeline that it is for."""
        beside = self.plan.beside if move.beside else None
        self.now = self.plan if beside is None else beside

    def step(self, move: Step) -> Found:
        """Train on a batch, and what it came to."""
        self.turn(move)
        batch = self.batch(move, self.replica)
        torch.manual_seed(move.seed + self.replica)
        with autocast(move.narrow):
            found = dict(self.train(batch))
        if move.clip:
            found |= self._clip(move.clip)
        if move.update:
            self._update(found)
            self.zero_grad(move.zero, by_model=move.by_model)
        return found

    def _clip(self, how: str) -> Found:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        params = [param for _, param in self.named_parameters()]
        if how == "value":
            # Torch refuses a rank on which no parameter has a gradient.
            if with_grad := [param for param in params if param.grad is not None]:
                nn.utils.clip_grad_value_(with_grad, 0.01)
            self.share_grads()
            return {}
        norm = self.clip_by_norm(*CLIPS[how])
        # A rank without gradients has no dtype of theirs.
        return {"norm": norm} if any(param.grad is not None for param in params) else {}

    def share_grads(self) -> None:
        """Other replicas of the model have gradients like these."""

    def _update(self, found: dict[str, Tensor]) -> None:
        losses = [value for name, value in found.items() if name.startswith("loss")]
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            found["scale"] = torch.tensor(self.scaler.get_scale())
        else:
            self.optimizer.step()
        if self.rates is not None and losses:
            plateau = self.case.habits.rates == "plateau"
            self.rates.step(*([torch.stack(losses).mean()] if plateau else []))
            rates = [group["lr"] for group in self.optimizer.param_groups]
            found["learning rates"] = torch.tensor(rates)
        for name, param in self.named_parameters():
            if name in self.average:
                self.average[name].lerp_(param.detach(), 0.5)

    def batch(self, move: Step | Evaluate | Fail, replica: int) -> Batch:
        """What the move is given."""
        recipe, seed = self.case.recipe, move.seed + 1000 * replica
        batch = make_batch(recipe, move.rows, seed, length=move.length)
        if isinstance(move, Step) and move.overflow:
            target = batch.kwargs["labels"] if batch.target is None else batch.target
            target[0] = torch.inf
        return batch

    def zero_grad(self, how: str, *, by_model: bool = True) -> None:
        """Forget the gradients."""
        if how and by_model:
            self.forget(set_to_none=how == "none")
        elif how:
            self.optimizer.zero_grad(set_to_none=how == "none")

    def fail(self, move: Fail) -> Found:
        """Begin a step that fails, and where it did."""
        self.turn(move)
        batch = self.batch(move, self.replica)
        torch.manual_seed(move.seed)
        with self.bomb.armed(move):
            found = self.failed(move, batch)
        self.zero_grad("none")
        self.calls.clear()
        return found

    def failed(self, move: Fail, batch: Batch) -> Found:
        """Where the step failed; empty if it did not."""
        try:
            self.train(batch)
        except Boom:
            return self.place_of(move)
        return {}

    def place_of(self, move: Fail) -> Found:
        """The stage and the microbatch in which a move fails."""
        ends = [sum(self.now.split[: i + 1]) for i in range(len(self.now.split))]
        last = len(ends) - 1
        stage = last if move.place == "loss" else sum(end <= move.unit for end in ends)
        if self.now.given == "auto":  # which cuts where it likes
            stage = -1
        return {
            "failed in stage": torch.tensor(stage),
            "failed in microbatch": torch.tensor(move.microbatch),
        }

    def state(self) -> dict[str, Tensor | None]:
        """Gradients; buffers, parameters, their averages, and how often hooks were called."""
        named = list(self.named_parameters())
        return {
            **{f"gradient of {n}": None if p.grad is None else whole(p.grad) for n, p in named},
            **{f"buffer {name}": whole(buffer) for name, buffer in self.named_buffers()},
            **{f"parameter {name}": whole(param) for name, param in named},
            **{f"average of {name}": whole(value) for name, value in self.average.items()},
            **{
                f"calls of hooks on {name}": torch.tensor(self.calls[name])
                for name, _ in named
                if name in self.calls
            },
        }


def tensor_of(output: Any) -> Tensor:
    """What a model computes, beside its loss."""
    found: Tensor = output["output"] if isinstance(output, dict) else output
    return found


def whole(tensor: Tensor) -> Tensor:
    """A copy in full, of what may be spread or sparse."""
    return full_tensor(tensor).detach().to_dense().clone()


def times(state: dict[str, Any], factor: float) -> dict[str, Any]:
    """A state whose numbers are so many times as large, but for those that count."""
    return {
        name: value * factor if value.is_floating_point() else value
        for name, value in state.items()
    }


def told_of(state: dict[str, Any]) -> Found:
    """A state, to be compared."""
    named = {f"the state's {name}": whole(value) for name, value in state.items()}
    return {"number of the state's tensors": torch.tensor(len(state)), **named}


def autocast(narrow: bool) -> AbstractContextManager[Any]:
    """Bfloat16, or nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow)
