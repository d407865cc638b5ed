"""The same operations under the names that captured graphs call them by: overloads of ATen.

A captured stage calls ``torch.ops.aten.linear.default`` where a module calls ``F.linear``. Most
overloads take the arguments of their functions, and so their handlers; the others are read here.
This module knows no formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.stage.weight_grad.convs import conv
from penstock.stage.weight_grad.generic import (
    Args,
    Func,
    Handler,
    Interception,
    Kwargs,
    intercept_any,
)
from penstock.stage.weight_grad.norms import embed, norm
from penstock.stage.weight_grad.ops import PASS, addmm, einsum, linear, matmul

__all__ = ["OVERLOADS"]

aten: Any = torch.ops.aten


def embedding(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``aten.embedding(table, numbers)``; no padding is -1."""
    names = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
    renamed = {"input" if n == "indices" else n: value for n, value in kwargs.items()}
    given = dict(zip(names, args, strict=False)) | renamed
    padding = given.pop("padding_idx", -1)
    return embed(
        mode,
        lambda: intercept_any(mode, func, args, kwargs),
        padding_idx=None if padding < 0 else padding,
        **given,
    )


def listed_einsum(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``aten.einsum(equation, [x, w])``, operands in a list."""
    if kwargs.get("path") is not None or len(args) != 2:
        return intercept_any(mode, func, args, kwargs)
    operands: list[Tensor] = args[1]
    return einsum(mode, torch.einsum, (args[0], *operands), {})


OVERLOADS: dict[Func, Handler] = {
    aten.sym_size.int: PASS,
    aten.linear.default: linear,
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), matmul),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), addmm),
    aten.einsum.default: listed_einsum,
    aten.embedding.default: embedding,
    **dict.fromkeys(
        (
            *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
            *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
            aten.conv_transpose1d.default,
            *(aten.conv_transpose2d.input, aten.conv_transpose3d.input),
        ),
        conv,
    ),
    **dict.fromkeys(
        (
            *(aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default),
            *(aten.batch_norm.default, aten.instance_norm.default),
        ),
        norm,
    ),
}
