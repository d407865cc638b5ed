"""The loss of a microbatch on the last stage, and the root of its backward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.errors import StageError
from penstock.runtime.config import LossFn
from penstock.runtime.step import StepState
from penstock.stage.dtensor import full_tensor
from penstock.stage.pytree import map_tensors
from penstock.stage.stage import MicrobatchState

__all__ = ["LossHead", "needs_target", "scalar_loss"]


class LossHead:
    """Computes losses behind the last stage; ``divisor`` divides each loss in the backward."""

    def __init__(self, loss_fn: LossFn | None, divisor: int, *, train: bool) -> None:
        self.loss_fn, self._divisor, self._train = loss_fn, divisor, train
        self._needs_target = needs_target(loss_fn)

    def run(self, state: MicrobatchState, output: Any, target: Any, step: StepState) -> None:
        """Record a microbatch's output and loss in ``step``, and the root of its backward."""
        mb = state.microbatch
        if step.keep_outputs:
            step.outputs[mb] = map_tensors(Tensor.detach, output)
        if self.loss_fn is None or (step.targets is None and self._needs_target):
            return  # an evaluation without losses
        against = () if target is None and not self._needs_target else (target,)
        result = self.loss_fn(output, *against, **step.loss_kwargs)
        if result is None and not self._train:
            return
        if isinstance(result, tuple) and len(result) == 2:
            result, step.metrics[mb] = result
        loss = scalar_loss(result)
        step.keep_loss(mb, full_tensor(loss.detach()))
        if not self._train:
            return
        if not loss.requires_grad:
            raise StageError(
                "the loss does not depend on any parameter that requires grad, or the loss "
                "function detached it"
            )
        state.roots = (get_gradient_edge(loss),)
        # Scales the loss instead of the gradients, in the loss's dtype, as (loss / n).backward().
        state.received_grads = (torch.full_like(loss, 1 / self._divisor),)


def needs_target(loss_fn: LossFn | None) -> bool:
    """True if ``loss_fn`` requires a target.

    Examples:
        >>> needs_target(lambda output: output.loss)
        False
    """
    if loss_fn is None:
        return False
    try:
        # A module's own signature takes anything.
        parameters = inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values()
    except (TypeError, ValueError):  # functions written in C have no signature
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return takes_any or sum(p.default is p.empty for p in positional) > 1


def scalar_loss(loss: Any) -> Tensor:
    """The loss as a tensor without dimensions.

    Raises:
        StageError: the loss is not a scalar tensor, or is complex.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.reshape(()) if loss.dim() else loss
    shown, expected = repr(loss), "a scalar tensor, or (scalar tensor, metrics)"
    if loss is None:
        expected += "; a model computes its own loss from labels, as in example="
    if isinstance(loss, Tensor):
        shown = f"a tensor of shape {tuple(loss.shape)}"
        if loss.is_complex():
            shown, expected = f"a complex number ({loss.dtype})", "a real one; take its .real"
    raise StageError(f"the loss function returned {shown}, expected {expected}")
