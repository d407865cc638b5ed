"""What becomes of the model's output, where it leaves: it is kept, and its loss begins a backward.

    output ──► kept in the batch, detached, where it is asked for
       └─ loss_fn(output, target) ──► losses, metrics      ──► the backward's root and its seed

This module knows neither stages nor messages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.errors import StageError
from penstock.runtime.batch import Batch
from penstock.runtime.loss import scalar_loss
from penstock.runtime.role import Role
from penstock.stage.dtensor import full_tensor, is_dtensor
from penstock.stage.pytree import map_tensors
from penstock.stage.slots import Slot

__all__ = ["Ending"]


class Ending:
    """Takes the outputs of a stage after which no other one comes.

    Args:
        role: whether there is a loss, and what it is divided by.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._needs_target = role.needs_target
        self._seeds: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, slot: Slot, output: Any, batch: Batch) -> None:
        """Note a microbatch's output and loss in ``batch``, and where its backward begins.

        Raises:
            StageError: the loss is no scalar tensor, or leads to no parameter.
        """
        mb = slot.microbatch
        if batch.keep_outputs:
            batch.outputs[mb] = map_tensors(Tensor.detach, output)
        if self._role.loss_fn is None:
            return
        if batch.targets is None and self._needs_target:
            return  # an evaluation of outputs alone
        target = None if batch.targets is None else batch.targets[mb]
        against = () if target is None and not self._needs_target else (target,)
        result = self._role.loss_fn(output, *against, **batch.loss_kwargs)
        if result is None and not self._role.train:
            return
        if isinstance(result, tuple) and len(result) == 2:
            result, batch.metrics[mb] = result
        loss = scalar_loss(result)
        batch.losses[mb] = full_tensor(loss.detach())
        if not self._role.train:
            return
        if not loss.requires_grad:
            raise StageError(
                "the loss does not depend on any parameter that requires grad, or the loss "
                "function detached it"
            )
        slot.roots = (get_gradient_edge(loss),)
        slot.grad_arrival = (self._seed(loss),)

    def _seed(self, loss: Tensor) -> Tensor:
        """The gradient that the backward starts from: scaling the loss, not the gradients."""
        if is_dtensor(loss):  # as its gradient is: over the same mesh
            return torch.ones_like(loss) / self._role.loss_divisor
        key = (loss.dtype, loss.device)
        if key not in self._seeds:
            one = torch.ones((), dtype=loss.dtype, device=loss.device)
            # Divided in the loss's own dtype, as (loss / n).backward() would.
            self._seeds[key] = one / self._role.loss_divisor
        return self._seeds[key]
