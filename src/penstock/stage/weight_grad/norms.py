"""Embeddings, whose weight gradient is put off, and norms, whose affine one is not.

The gradient of a norm's weight and bias falls out of the pass that computes the input's: put off,
it would read the same tensors again, and hold them until W, to save I a small sum. So a proxy
takes it in I, and W delivers it. This module knows no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock._torch_compat import deferrable_now
from penstock.stage.weight_grad.generic import (
    Args,
    Func,
    Interception,
    Kwargs,
    intercept_any,
    run,
    substitute,
)
from penstock.stage.weight_grad.rules import embedding_grads

__all__ = ["NORMS", "embedding", "norm"]

NORMS: tuple[Func, ...] = (
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.batch_norm,
    F.instance_norm,
)


def norm(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.layer_norm`` and its kin: with proxies, and without a look inside."""
    ledger = mode.ledger
    if type(args[0]) is not Tensor or ledger.derived(args[0]) is not None:
        return intercept_any(mode, func, args, kwargs)
    if not deferrable_now():
        return run(func, args, kwargs)
    return substitute(mode, func, args, kwargs)


def embedding(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.embedding`` with dense gradients of a table that is not renormed."""
    return embed(mode, lambda: intercept_any(mode, func, args, kwargs), *args, **kwargs)


def embed(
    mode: Interception,
    generally: Callable[[], Any],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` by its own signature, or ``generally``, the call left to the general way."""
    w_ref = mode.ledger.weight(weight)
    count = weight.shape[0]
    if (
        w_ref is None
        or max_norm is not None
        or sparse
        or type(input) is not Tensor
        or not deferrable_now()
        or (padding_idx is not None and not -count <= padding_idx < count)
    ):
        return generally()
    padding = -1 if padding_idx is None else padding_idx % count
    y = torch.embedding(weight.detach(), input, padding, scale_grad_by_freq, False)
    return mode.ledger.tap(y, embedding_grads, (w_ref,), input, (padding, scale_grad_by_freq))
