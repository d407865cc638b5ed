"""A model to be run without leaving a trace in it.

It runs on parameters of our own that share the model's memory, so that neither gradients nor hooks
of the model's are touched, and on copies of its buffers. This module measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.errors import PartitionError
from penstock.partition.spec import Example, as_call, own_loss
from penstock.stage.pytree import as_args, flatten

__all__ = ["Chained", "Subject"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model to be run without leaving a trace in it.

    Args:
        model: the model.
        args: the example's positional arguments.
        kwargs: its keyword arguments.
        state: parameters of our own in the model's memory, and copies of its buffers.
        loss_fn: from the output to the loss; None where that is up to the output.
        device: where the model lives.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: dict[str, Tensor]
    loss_fn: Callable[[Any], Tensor] | None
    device: torch.device

    @classmethod
    def of(
        cls, model: nn.Module, example: Example, loss_fn: Callable[[Any], Tensor] | None
    ) -> Subject:
        """The subject that a model and an example make."""
        args, kwargs = as_call(example)
        state = _state_of(model)
        device = next(iter(state.values()), torch.empty(0)).device
        if device.type == "meta":
            raise PartitionError(
                "the model is on the meta device, where nothing can be measured; materialise it, "
                "or measure a smaller one of its kind"
            )
        return cls(
            model=model, args=args, kwargs=kwargs, state=state, loss_fn=loss_fn, device=device
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the model runs on, each once."""
        params = (each for each in self.state.values() if isinstance(each, nn.Parameter))
        return list({id(param): param for param in params}.values())

    def on_own_state(self, run: Callable[[], T]) -> T:
        """What ``run`` returns, which runs the model on our state: forward, and backward too, in
        which checkpointing runs parts of it again."""
        state = {f"model.{name}": value for name, value in self.state.items()}
        found: T = functional_call(_Running(self.model), state, (run,), tie_weights=False)
        return found

    @contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """What modules note on themselves within is forgotten after it.

        It may hold our state: recurrent layers have their weights in a list, too.
        """
        kept = [(vars(module), dict(vars(module))) for module in self.model.modules()]
        try:
            yield
        finally:
            for now, before in kept:
                now.clear()
                now.update(before)

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run the model, within ``on_own_state``; return what the backward starts from, and with
        which gradients."""
        output = self.model(*self.args, **self.kwargs)
        roots = self._roots(output)
        if not roots:
            raise PartitionError(
                f"the output of the {type(self.model).__name__} takes no gradient, so there is no "
                "backward to measure; unfreeze parameters, or pass loss_fn"
            )
        return roots, [torch.ones_like(root) for root in roots]

    def _roots(self, output: Any) -> list[Tensor]:
        loss = (self.loss_fn or own_loss)(output)
        has_loss = self.loss_fn is not None or isinstance(loss, Tensor)
        leaves = [loss] if has_loss else flatten(output)[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def stamp(self) -> float:
        """The time, when all that was asked of the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class _Running(nn.Module):
    """A model, and what is done with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """What stands for each tensor of ``model``, under one name for each place that it is in.

    A layer that is used several times is one place, and must have one name: ``functional_call``
    puts back what it found under the first of three names last, which is ours.
    """
    ours: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():  # each module once
        prefix = f"{path}." if path else ""
        for name, param in module._parameters.items():
            if param is not None:
                twin = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                state[prefix + name] = ours.setdefault(id(param), twin)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                state[prefix + name] = ours.setdefault(id(buffer), buffer.detach().clone())
    return state


class Chained(nn.Module):
    """Stages one after the other, each called with what the one before returned.

    Args:
        stages: the stages; one may stand in several places.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for i, stage in enumerate(stages):
            self.add_module(str(i), stage)
        self._stages = tuple(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; keyword arguments go to the first."""
        output = self._stages[0](*args, **kwargs)
        for stage in self._stages[1:]:
            output = stage(*as_args(output))
        return output
