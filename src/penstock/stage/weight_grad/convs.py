"""Convolutions and transposed convolutions of one to three dimensions, weights detached.

This module reads the many forms of their arguments and knows no formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock._torch_compat import autocast_enabled, deferrable_now
from penstock.stage.weight_grad.generic import Args, Func, Interception, Kwargs, intercept_any
from penstock.stage.weight_grad.rules import ConvConfig, conv_grads

__all__ = ["CONVS", "conv"]

# function → (spatial dimensions, transposed)
CONVS: dict[Func, tuple[int, bool]] = {
    torch.conv1d: (1, False),
    torch.conv2d: (2, False),
    torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True),
    torch.conv_transpose2d: (2, True),
    torch.conv_transpose3d: (3, True),
    # As captured graphs call them; strings as padding have overloads of their own.
    torch.ops.aten.conv1d.default: (1, False),
    torch.ops.aten.conv1d.padding: (1, False),
    torch.ops.aten.conv2d.default: (2, False),
    torch.ops.aten.conv2d.padding: (2, False),
    torch.ops.aten.conv3d.default: (3, False),
    torch.ops.aten.conv3d.padding: (3, False),
    torch.ops.aten.conv_transpose1d.default: (1, True),
    torch.ops.aten.conv_transpose2d.input: (2, True),
    torch.ops.aten.conv_transpose3d.input: (3, True),
}
FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
DEFAULTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


def spread(value: int | list[int] | tuple[int, ...], dims: int) -> list[int]:
    """One number per spatial dimension."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * dims if len(sizes) == 1 else sizes


def padding_sizes(named: str, weight: Tensor, dilation: list[int]) -> list[int] | None:
    """What ``"valid"`` or ``"same"`` comes to; None where it differs between the two sides."""
    if named == "valid":
        return [0] * len(dilation)
    totals = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    if named != "same" or any(total % 2 for total in totals):
        return None
    return [total // 2 for total in totals]


def conv(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.conv2d(x, w, b, ...)`` and its kin."""
    ledger = mode.ledger
    dims, transposed = CONVS[func]
    given = dict(zip(TRANSPOSED if transposed else FORWARD, args, strict=False)) | kwargs
    x, w, b = given["input"], given["weight"], given.get("bias")
    w_ref, b_ref = ledger.weight(w), None if b is None else ledger.weight(b)
    if (
        w_ref is None
        or (b is not None and b_ref is None and b.requires_grad)
        or type(x) is not Tensor
        or ledger.weight(x) is not None
        or x.is_complex()
        or autocast_enabled()
        or not deferrable_now()
    ):
        return intercept_any(mode, func, args, kwargs)
    options = DEFAULTS | {k: v for k, v in given.items() if k in DEFAULTS}
    dilation = spread(options["dilation"], dims)
    padding = options["padding"]
    sizes = (
        padding_sizes(padding, w, dilation) if isinstance(padding, str) else spread(padding, dims)
    )
    if sizes is None:
        return intercept_any(mode, func, args, kwargs)
    detached = w.detach()
    config = ConvConfig(
        weight=detached,
        bias_shape=None if b is None else list(b.shape),
        stride=spread(options["stride"], dims),
        padding=sizes,
        dilation=dilation,
        transposed=transposed,
        output_padding=spread(options["output_padding"], dims),
        groups=options["groups"],
        wanted=(True, b_ref is not None),
        batched=x.dim() == dims + 2,
    )
    rest = {k: v for k, v in given.items() if k not in ("input", "weight", "bias")}
    y = func(x, detached, None if b is None else b.detach(), **rest)
    weights = (w_ref,) if b_ref is None else (w_ref, b_ref)
    return ledger.tap(y, conv_grads, weights, x, config)
