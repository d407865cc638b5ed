"""Normalizations with affine weights, and embeddings: their forwards with weights detached.

Where a call is out of the ordinary (autocast, sparse gradients, a renormed table, a layout that
torch would copy first) the general way takes it. This module knows no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.stage.deferred_generic import Interception, intercept_any
from penstock.stage.deferred_ledger import Ledger
from penstock.stage.deferred_rules import (
    Weight,
    embedding_grads,
    fused_rms_norm_grads,
    group_norm_grads,
    layer_norm_grads,
    mul_grads,
)
from penstock.stage.torch_private import autocast_enabled, deferrable_now

__all__ = ["embedding", "group_norm", "layer_norm", "rms_norm"]

Generally: TypeAlias = Callable[[], Any]  # the call, left to the general way

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)  # narrower ones stay widened until after the weight


def by_signature(
    handler: Callable[..., Any],
) -> Callable[[Interception, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
    """The handler of an operation from one that takes the operation's own arguments."""

    def handle(
        mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def generally() -> Any:
            return intercept_any(mode, func, args, kwargs)

        return handler(mode.ledger, generally, *args, **kwargs)

    return handle


def ordinary(ledger: Ledger, x: object) -> bool:
    """Whether a norm of ``x`` can be put off."""
    return (
        type(x) is Tensor
        and not x.is_nested
        and not autocast_enabled()
        and deferrable_now()
        and not (ledger.expressions and ledger.weight(x) is not None)
    )


def unsuitable(value: Tensor | None, ref: Weight | None) -> bool:
    """Whether an affine parameter needs a gradient that is not ours to put off."""
    return value is not None and ref is None and value.requires_grad


@by_signature
def layer_norm(
    ledger: Ledger,
    generally: Generally,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """``F.layer_norm``."""
    w_ref = None if weight is None else ledger.weight(weight)
    b_ref = None if bias is None else ledger.weight(bias)
    if weight is None or w_ref is None or unsuitable(bias, b_ref) or not ordinary(ledger, input):
        return generally()
    w = weight.detach()
    b = None if bias is None else bias.detach()
    shape = tuple(normalized_shape)
    y, mean, rstd = torch.native_layer_norm(input, shape, w, b, eps)
    extra = (shape, mean.detach(), rstd.detach(), w, b, b_ref is not None)
    weights = (w_ref,) if b_ref is None else (w_ref, b_ref)
    return ledger.tap(y, layer_norm_grads, weights, input, extra)


@by_signature
def group_norm(
    ledger: Ledger,
    generally: Generally,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """``F.group_norm``."""
    w_ref = None if weight is None else ledger.weight(weight)
    b_ref = None if bias is None else ledger.weight(bias)
    if (
        weight is None
        or w_ref is None
        or unsuitable(bias, b_ref)
        or not ordinary(ledger, input)
        or not input.is_contiguous()
        or input.dim() < 2
        or input.shape[1] % num_groups  # an error, which torch words
        or not input.numel()
    ):
        return generally()
    w = weight.detach()
    b = None if bias is None else bias.detach()
    batch, channels = input.shape[:2]
    sizes = (batch, channels, input.numel() // (batch * channels))
    y, mean, rstd = torch.native_group_norm(input, w, b, *sizes, num_groups, eps)
    extra = (mean.detach(), rstd.detach(), w, sizes, num_groups, b_ref is not None)
    weights = (w_ref,) if b_ref is None else (w_ref, b_ref)
    return ledger.tap(y, group_norm_grads, weights, input, extra)


@by_signature
def rms_norm(
    ledger: Ledger,
    generally: Generally,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """``F.rms_norm``."""
    w_ref = None if weight is None else ledger.weight(weight)
    if weight is None or w_ref is None or not ordinary(ledger, input):
        return generally()
    shape = list(normalized_shape)
    w = weight.detach()
    if input.dtype is weight.dtype:
        if input.is_cuda:
            y, rstd = aten._fused_rms_norm.default(input, shape, w, eps)
            extra = (shape, rstd.detach(), w)
            return ledger.tap(y, fused_rms_norm_grads, (w_ref,), input, extra)
        if input.device.type == "cpu" and input.dtype in WIDE:
            scaled = F.rms_norm(input, shape, None, eps)
            return ledger.tap(scaled * w, mul_grads, (w_ref,), scaled)
    return generally()


@by_signature
def embedding(
    ledger: Ledger,
    generally: Generally,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` with dense gradients."""
    w_ref = ledger.weight(weight)
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
    return ledger.tap(y, embedding_grads, (w_ref,), input, (padding, scale_grad_by_freq))
