"""How a microbatch's loss comes about: from output and target, or from the output alone.

loss_fn(output, target)      the common way
loss_fn(output)              a model that computes its loss itself: lambda output: output.loss
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.errors import StageError

__all__ = ["needs_target", "scalar_loss"]


def needs_target(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function can't do without a target.

    Example:
        >>> needs_target(lambda output: output.loss)
        False
    """
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # functions written in C have none
        return True
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) > 1


def scalar_loss(loss: Any) -> Tensor:
    """The loss as a tensor without dimensions.

    Raises:
        StageError: it is no scalar tensor, or a complex one, which has no gradient to descend.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise StageError(
            f"the loss function returned {shown}, expected a scalar tensor, "
            "or (scalar tensor, metrics)"
        )
    if loss.is_complex():
        raise StageError(
            f"the loss function returned a complex number ({loss.dtype}), expected a real one; "
            "take its .real or .abs()"
        )
    return loss.reshape(()) if loss.dim() else loss
