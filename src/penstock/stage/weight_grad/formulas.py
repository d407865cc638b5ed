"""The formula of the weight gradient of each operation that is deferred to W.

A formula takes what the forward saved (a tensor, and further arguments), the weights, and the
gradient of the operation's result. It returns a new tensor per weight, equal to autograd's bit for
bit on the CPU in float32. Formulas run under no_grad.

Shapes: B batch or experts, M rows (all leading dimensions as one), K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A tensor computed from parameters alone, such as ``p.T`` or ``p * 0.5``.

    Its gradient enters the graph to the parameters at ``edge``; ``leaves`` are their ids.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    leaves: frozenset[int]


Weight: TypeAlias = Parameter | Expression
Weights: TypeAlias = tuple[Weight, ...]
WeightGrads: TypeAlias = tuple[Tensor, ...]
Formula: TypeAlias = Callable[[Any, Any, Weights, Tensor], WeightGrads]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _with_bias(w_grad: Tensor, weights: Weights, grad: Tensor) -> WeightGrads:
    """The gradients of a weight and, if there is one, of a bias that was broadcast."""
    if len(weights) == 1:
        return (w_grad,)
    shape = weights[1].shape
    return w_grad, grad.clone() if grad.shape == shape else grad.sum_to_size(shape)


def linear_grads(saved: Tensor, row_major: bool, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_MK @ w_NK.T + b_N``; ``row_major`` is how ``w`` lies in memory."""
    grad_MN, x_MK = _rows(grad), _rows(saved)
    w_grad = grad_MN.t().mm(x_MK) if row_major else x_MK.t().mm(grad_MN).t()
    return (w_grad,) if len(weights) == 1 else (w_grad, grad_MN.sum(0))


def matmul_grads(saved: Tensor, row_major: bool, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_MK @ w_KN``, or ``b + x_MK @ w_KN`` with ``b`` as the second weight."""
    grad_MN, x_MK = _rows(grad), _rows(saved)
    w_grad = x_MK.t().mm(grad_MN) if row_major else grad_MN.t().mm(x_MK).t()
    return _with_bias(w_grad, weights, grad_MN)


def left_matmul_grads(
    saved: Tensor, row_major: bool, weights: Weights, grad: Tensor
) -> WeightGrads:
    """``w_MK @ x_KN``."""
    return (grad.mm(saved.t()) if row_major else saved.mm(grad.t()).t(),)


def batched_matmul_grads(saved: Tensor, _: Any, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_BMK @ w_BKN``, or ``b + x_BMK @ w_BKN`` with ``b`` as the second weight."""
    return _with_bias(saved.transpose(1, 2).bmm(grad), weights, grad)


def conv_grads(
    saved: Tensor, options: tuple[Any, ...], weights: Weights, grad: Tensor
) -> WeightGrads:
    """A convolution; ``options`` are the other arguments of ``aten.convolution_backward``."""
    _, *grads = torch.ops.aten.convolution_backward.default(grad, saved, *options)
    return tuple(grads[: len(weights)])


def embedding_grads(
    saved: Tensor, options: tuple[int, bool], weights: Weights, grad: Tensor
) -> WeightGrads:
    """Rows looked up by ``saved``; ``options`` are the padding index and scale by frequency."""
    num_rows = weights[0].shape[0]
    return (torch.ops.aten.embedding_dense_backward.default(grad, saved, num_rows, *options),)


def proxy_grads(saved: None, _: Any, weights: Weights, grad: Tensor) -> WeightGrads:
    """An operation without a formula: autograd has computed the gradient in I."""
    return (grad,)
