"""Measure a model as ``Pipeline`` is given it: where its stages will live, and with its loss.

What a target looks like nobody has said, so one stands in for it: the first of these with which
the loss function gives a scalar, and no warning.

    loss_fn(output)                                      where it needs none
    loss_fn(output, class 0 for each row or token)       int64[batch, ...]
    loss_fn(output, class 0 for each place)              int64[batch, ...], of a picture
    loss_fn(output, zeros like the output)
    loss_fn(output, None)

A loss over a large vocabulary takes as long as a layer or two, whichever classes are right. Where
nothing can stand in, the loss is left out, and the log says so.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock._torch_compat import children
from penstock.compat.stage import PipelineStage
from penstock.partition.balance.costs import Profile
from penstock.partition.balance.profile import profile
from penstock.partition.balance.rehearsal import same
from penstock.partition.balance.subject import Chained
from penstock.partition.spec import Example
from penstock.stage.pytree import map_tensors, tensors_of

__all__ = ["measure_model"]

logger = logging.getLogger(__name__)


def measure_model(
    model: nn.Module | Sequence[nn.Module] | Sequence[PipelineStage],
    example: Example,
    *,
    device: torch.device,
    loss_fn: Callable[..., Any] | None = None,
) -> Profile:
    """The costs of a model's blocks on the device where its stages will live.

    Args:
        model: the model, or a list of layers or stages; a copy is measured if it lives elsewhere.
        example: one microbatch, on any device.
        device: where to measure.
        loss_fn: from output, or output and target, to a scalar, or ``(scalar, metrics)``: counted
            with the last block. If None, the model's own, where it has one.

    Raises:
        PartitionError: it can't be measured.
    """
    loss = None if loss_fn is None else StandIn(loss_fn)
    if isinstance(model, nn.Module):
        whole = model
    else:
        whole = Chained([e.submod if isinstance(e, PipelineStage) else e for e in model])
    places = {each.device.type for each in (*whole.parameters(), *whole.buffers())}
    if places <= {device.type} or "meta" in places:
        return profile(model, example, loss_fn=loss)
    there = copy.deepcopy(whole).to(device)
    subject = there if whole is model else [stage for _, stage in children(there)]
    moved = map_tensors(lambda tensor: tensor.to(device), example)
    return profile(subject, moved, loss_fn=loss)


# --- a loss without a target -------------------------------------------------------------------

Targets: TypeAlias = Callable[[Tensor], tuple[Any, ...]]
"""From an output to what stands behind it in the call of a loss function."""


def no_target(output: Tensor) -> tuple[Any, ...]:
    """The function needs none."""
    return ()


def class_per_row(output: Tensor) -> tuple[Any, ...]:
    """Scores along the last dimension: class 0 for each row, or each token."""
    return (torch.zeros(output.shape[:-1], dtype=torch.int64, device=output.device),)


def class_per_place(output: Tensor) -> tuple[Any, ...]:
    """Scores along the second dimension: class 0 for each place."""
    shape = (*output.shape[:1], *output.shape[2:])
    return (torch.zeros(shape, dtype=torch.int64, device=output.device),)


def like_output(output: Tensor) -> tuple[Any, ...]:
    """Values to come near to."""
    return (torch.zeros_like(output),)


def nothing(output: Tensor) -> tuple[Any, ...]:
    """A target that is not looked at."""
    return (None,)


STAND_INS: tuple[Targets, ...] = (no_target, class_per_row, class_per_place, like_output, nothing)


class StandIn:
    """The loss from the output alone, with a stand-in for the target.

    Args:
        loss_fn: the loss function. One that is a module is copied: its buffers stay as they are.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self._call: Callable[[Any], Tensor] | None = None

    def __call__(self, output: Any) -> Tensor:
        """The loss of an output; the sum of its tensors where nothing can stand in."""
        if self._call is None:
            self._call = self._first_that_works(output)
        return self._call(output)

    def _with(self, targets: Targets, output: Any) -> Tensor:
        return scalar(self._loss_fn(output, *targets(next(differentiable(output)))))

    def _first_that_works(self, output: Any) -> Callable[[Any], Tensor]:
        for targets in STAND_INS:
            try:
                # Whoever counts what is kept for the backward is to count the last call alone.
                with warnings.catch_warnings(), saved_tensors_hooks(same, same):
                    warnings.simplefilter("error")  # one tells of shapes that were made to fit
                    self._with(targets, output)
            except Exception as error:  # whatever a function of the user's raises on a wrong one
                logger.debug("%s: %s", targets.__name__, error)
            else:
                return partial(self._with, targets)
        logger.warning(
            "the loss function takes none of the targets that were tried, so the last stage is "
            "measured without it; to count it, measure with penstock.profile(model, example, "
            "loss_fn=lambda output: ...), and pass the plan as split="
        )
        return total


def total(output: Any) -> Tensor:
    """The sum of all tensors of an output."""
    return torch.stack([leaf.sum() for leaf in differentiable(output)]).sum()


def scalar(loss: Any) -> Tensor:
    """The loss out of ``(loss, metrics)``, which has to be one to train on."""
    found = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        raise TypeError(f"the loss function returned {type(loss).__name__}, expected a scalar")
    return found


def differentiable(output: Any) -> Iterator[Tensor]:
    """The tensors of an output that take gradients."""
    return (tensor for tensor in tensors_of(output) if tensor.requires_grad)
