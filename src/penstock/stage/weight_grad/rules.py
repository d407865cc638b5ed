"""The weight gradient rule of each operation that is deferred to W.

The arguments of a rule are the forward's saved values (``saved``, ``extra``), the weights and the
gradient of the operation's result. A rule returns a fresh tensor per weight, equal to autograd's
bit for bit on the CPU in float32. Rules run under no_grad.

Shapes: B batch or experts, M rows (all leading dimensions as one), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

__all__ = [
    "Expression",
    "GradRule",
    "Weight",
    "batched_matmul_grads",
    "conv_grads",
    "einsum_grads",
    "embedding_grads",
    "left_matmul_grads",
    "linear_grads",
    "matmul_grads",
    "proxy_grads",
]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A tensor computed from parameters alone, such as ``p.T`` or ``p * scale``.

    Args:
        edge: where its gradient enters the graph that leads to the parameters.
        shape: its sizes.
        dtype: its dtype.
        leaves: the ids of the parameters that it is computed from.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    leaves: frozenset[int]


Weight: TypeAlias = Parameter | Expression
Weights: TypeAlias = tuple[Weight, ...]
WeightGrads: TypeAlias = tuple[Tensor, ...]
GradRule: TypeAlias = Callable[[Any, Any, Weights, Tensor], WeightGrads]


def rows(tensor: Tensor) -> Tensor:
    """``tensor`` with all leading dimensions as one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def reduce_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """``grad`` summed to ``shape``, never ``grad`` itself."""
    return grad.clone() if grad.shape == shape else grad.sum_to_size(shape)


def linear_grads(saved: Tensor, row_major: bool, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_MK @ w_NK.T + b_N``; ``row_major`` is how ``w`` lies in memory."""
    grad_MN, x_MK = rows(grad), rows(saved)
    w_grad = grad_MN.t().mm(x_MK) if row_major else x_MK.t().mm(grad_MN).t()
    return (w_grad,) if len(weights) == 1 else (w_grad, grad_MN.sum(0))


def matmul_grads(saved: Tensor, row_major: bool, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_MK @ w_KN`` or ``b + x_MK @ w_KN``; of two weights the second is ``b``."""
    grad_MN, x_MK = rows(grad), rows(saved)
    w_grad = x_MK.t().mm(grad_MN) if row_major else grad_MN.t().mm(x_MK).t()
    return (w_grad,) if len(weights) == 1 else (w_grad, reduce_to(grad_MN, weights[1].shape))


def left_matmul_grads(
    saved: Tensor, row_major: bool, weights: Weights, grad: Tensor
) -> WeightGrads:
    """``w_MK @ x_KN``."""
    return (grad.mm(saved.t()) if row_major else saved.mm(grad.t()).t(),)


def batched_matmul_grads(saved: Tensor, _: None, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_BMK @ w_BKN`` or ``b + x_BMK @ w_BKN``; of two weights the second is ``b``."""
    w_grad = saved.transpose(1, 2).bmm(grad)
    return (w_grad,) if len(weights) == 1 else (w_grad, reduce_to(grad, weights[1].shape))


def einsum_grads(saved: Tensor, equation: str, weights: Weights, grad: Tensor) -> WeightGrads:
    """The weight's part of a two-operand einsum; ``equation`` maps (x, gradient) to it."""
    return (torch.einsum(equation, saved, grad),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """The arguments of a convolution, and the need of gradients for weight and bias.

    Args:
        weight: its weight, detached.
        bias_shape: the bias's shape, or None without bias.
        stride: per spatial dimension.
        padding: per spatial dimension.
        dilation: per spatial dimension.
        transposed: whether it is a transposed convolution.
        output_padding: per spatial dimension.
        groups: the number of groups.
        wanted: whether weight and bias want a gradient.
        batched: whether the input has a batch dimension.
    """

    weight: Tensor
    bias_shape: list[int] | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    wanted: tuple[bool, bool]
    batched: bool


def conv_grads(saved: Tensor, config: ConvConfig, weights: Weights, grad: Tensor) -> WeightGrads:
    """A convolution or transposed convolution of one to three dimensions."""
    if not config.batched:
        saved, grad = saved.unsqueeze(0), grad.unsqueeze(0)
    _, w_grad, b_grad = aten.convolution_backward.default(
        grad,
        saved,
        config.weight,
        config.bias_shape,
        config.stride,
        config.padding,
        config.dilation,
        config.transposed,
        config.output_padding,
        config.groups,
        [False, *config.wanted],
    )
    return tuple(g for g, wanted in zip((w_grad, b_grad), config.wanted, strict=True) if wanted)


def embedding_grads(
    saved: Tensor, extra: tuple[int, bool], weights: Weights, grad: Tensor
) -> WeightGrads:
    """Rows looked up by ``saved``; ``extra`` is padding index, scale by frequency."""
    rows_total = weights[0].shape[0]
    return (aten.embedding_dense_backward.default(grad, saved, rows_total, *extra),)


def proxy_grads(saved: Tensor, _: None, weights: Weights, grad: Tensor) -> WeightGrads:
    """An operation without a rule of its own: autograd has the gradient already."""
    return (grad,)
