"""Normalizations with affine weights, and embeddings: their forwards with weights detached.

Where a call is out of the ordinary (autocast, sparse gradients, a renormed table, a layout that
torch would copy first) the general way takes it. This module knows no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
from penstock.stage.torch_private import autocast_enabled, inside_transform

__all__ = ["embedding", "group_norm", "layer_norm", "rms_norm"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
aten = torch.ops.aten


def arguments(names: tuple[str, ...], args: Args, kwargs: Kwargs) -> list[Any]:
    """The values of ``names`` in order, None where not given."""
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def ordinary(ledger: Ledger, x: object) -> bool:
    """Whether a norm of ``x`` can be put off."""
    return (
        type(x) is Tensor
        and ledger.weight(x) is None
        and not x.is_nested
        and not autocast_enabled()
        and torch.is_grad_enabled()
        and not inside_transform()
    )


def affine(
    ledger: Ledger, values: tuple[Tensor | None, Tensor | None]
) -> tuple[tuple[Weight, ...], list[Tensor | None], tuple[bool, bool]] | None:
    """Weight and bias as weights, detached, and which of them there are; None if unsuitable."""
    refs = [None if value is None else ledger.weight(value) for value in values]
    for value, ref in zip(values, refs, strict=True):
        if value is not None and ref is None and value.requires_grad:
            return None
    weights = tuple(ref for ref in refs if ref is not None)
    if not weights or values[0] is None:
        return None
    detached = [None if value is None else value.detach() for value in values]
    return weights, detached, (refs[0] is not None, refs[1] is not None)


def layer_norm(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.layer_norm(x, normalized_shape, weight, bias, eps)``."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, weight, bias, eps = arguments(names, args, kwargs)
    ledger = mode.ledger
    parts = affine(ledger, (weight, bias)) if ordinary(ledger, x) else None
    if parts is None:
        return intercept_any(mode, func, args, kwargs)
    weights, (w, b), wanted = parts
    shape = tuple(shape)
    y, mean, rstd = torch.native_layer_norm(x, shape, w, b, 1e-5 if eps is None else eps)
    extra = (shape, mean.detach(), rstd.detach(), w, b, wanted)
    return ledger.tap(y, layer_norm_grads, weights, x, extra)


def group_norm(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.group_norm(x, num_groups, weight, bias, eps)``."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    x, groups, weight, bias, eps = arguments(names, args, kwargs)
    ledger = mode.ledger
    parts = affine(ledger, (weight, bias)) if ordinary(ledger, x) else None
    if (
        parts is None
        or not x.is_contiguous()
        or x.dim() < 2
        or x.shape[1] % groups
        or not x.numel()
    ):
        return intercept_any(mode, func, args, kwargs)
    weights, (w, b), wanted = parts
    batch, channels = x.shape[:2]
    sizes = (batch, channels, x.numel() // (batch * channels))
    eps = 1e-5 if eps is None else eps
    y, mean, rstd = torch.native_group_norm(x, w, b, *sizes, groups, eps)
    extra = (mean.detach(), rstd.detach(), w, sizes, groups, wanted)
    return ledger.tap(y, group_norm_grads, weights, x, extra)


def rms_norm(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.rms_norm(x, normalized_shape, weight, eps)``."""
    x, shape, weight, eps = arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    ledger = mode.ledger
    parts = affine(ledger, (weight, None)) if ordinary(ledger, x) else None
    if parts is None:
        return intercept_any(mode, func, args, kwargs)
    weights, (w, _), _ = parts
    shape = list(shape)
    if x.is_cuda and x.dtype is weight.dtype:
        y, rstd = aten._fused_rms_norm.default(x, shape, w, eps)
        return ledger.tap(y, fused_rms_norm_grads, weights, x, (shape, rstd.detach(), w))
    if x.device.type == "cpu" and x.dtype is weight.dtype and x.dtype in WIDE:
        scaled = func(x, tuple(shape), None, eps)
        return ledger.tap(scaled * w, mul_grads, weights, scaled)
    return intercept_any(mode, func, args, kwargs)


WIDE = (torch.float32, torch.float64)  # narrower ones are widened until after the weight


def embedding(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.embedding(indices, weight, padding_idx, ...)`` with dense gradients."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    values = arguments((*names, "sparse"), args, kwargs)
    indices, table, padding, max_norm, _, scale, sparse = values
    ledger = mode.ledger
    weight = ledger.weight(table)
    if (
        weight is None
        or max_norm is not None
        or sparse
        or type(indices) is not Tensor
        or not torch.is_grad_enabled()
        or inside_transform()
    ):
        return intercept_any(mode, func, args, kwargs)
    count = table.shape[0]
    if padding is not None and not -count <= padding < count:
        return intercept_any(mode, func, args, kwargs)
    padding = -1 if padding is None else padding % count
    scale = bool(scale)
    y = torch.embedding(table.detach(), indices, padding, scale, False)
    return ledger.tap(y, embedding_grads, (weight,), indices, (padding, scale))
