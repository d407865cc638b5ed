"""How a model is called with one example microbatch, and the loss in what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from penstock.stage.pytree import as_args

__all__ = ["Example", "as_call", "own_loss"]

Example: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | Tensor


def as_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword arguments; what is no tuple, is the one argument.

    Example:
        >>> as_call({"x": 1}), as_call((1, 2)), as_call(1)
        (((), {'x': 1}), ((1, 2), {}), ((1,), {}))
    """
    return ((), dict(example)) if isinstance(example, Mapping) else (as_args(example), {})


def own_loss(output: Any, target: object = None) -> Any:
    """The loss that a model has computed itself: a loss function for such models.

    Args:
        output: what the model returns, with an attribute or a key ``loss``.
        target: not looked at.

    Returns:
        The loss; None where there is none, as in an evaluation without labels.

    Example:
        >>> own_loss({"loss": 2.0})
        2.0
    """
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
