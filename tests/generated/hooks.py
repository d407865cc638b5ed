"""Hooks of all kinds, on the layers of a model and on their parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

__all__ = ["HOOKS", "hook_module", "hook_parameter"]

HOOKS = (
    "before forward",
    "after forward",
    "before backward",
    "after backward",
    "on the output",
    "on a gradient",
    "on an accumulated gradient",
)


def hook_module(model: Any, kind: str, unit: int) -> None:
    """Hook a layer of a model; those on gradients are its parameters'."""
    layers = model.blocks if hasattr(model, "blocks") else model
    layer: nn.Module = layers[unit]
    match kind:
        case "before forward":
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        case "after forward":
            layer.register_forward_hook(lambda _, __, output: output + 0.25)
        case "before backward":
            layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.5,))
        case "after backward":
            layer.register_full_backward_hook(_doubled)
        case "on the output":
            layer.register_forward_hook(_hook_output)


def _doubled(_: Any, grads: Any, __: Any) -> Any:
    return tuple(None if grad is None else grad * 2 for grad in grads)


def _hook_output(_: Any, __: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grad * 0.5)


def hook_parameter(
    param: nn.Parameter, kind: str, name: str, calls: Counter[str], *, clamps: bool
) -> None:
    """Hook a parameter's gradient, and count the calls of those on the accumulated one.

    Args:
        param: the parameter.
        kind: of the hook.
        name: the parameter's.
        calls: where they are counted.
        clamps: whether the hook also changes the accumulated gradient, so that the order of
            microbatches counts.
    """

    def accumulated(param: Tensor) -> None:
        calls[name] += 1
        assert param.grad is not None
        if clamps and not param.grad.is_sparse:
            param.grad.clamp_(-0.05, 0.05)

    if not param.requires_grad:
        return
    if kind == "on a gradient":
        param.register_hook(lambda grad: grad * 2)
    else:
        param.register_post_accumulate_grad_hook(accumulated)
