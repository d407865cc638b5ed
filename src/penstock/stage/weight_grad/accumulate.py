"""W: from the records of one microbatch to the gradients of its parameters.

    records ──formulas──► sums per weight ──► AccumulateGrad, and the hooks on it

A formula takes what the forward saved (a tensor, and further arguments), the weights, and the
gradient of the operation's result. It returns a new tensor per weight, equal to autograd's bit for
bit on the CPU in float32. Formulas run under no_grad.

A parameter gets its gradient once, with its last contribution, in batches of about a megabyte: the
gradients of a large stage never exist all at once beside ``.grad``. Weights computed from
parameters go last, with these parameters, in one backward pass.

Shapes: B batch or experts, M rows (all leading dimensions as one), K inputs, N outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from penstock._torch_compat import run_backward, version_of
from penstock.errors import StageError

__all__ = ["CannotDeferError", "Expression", "Formula", "Record", "Weight", "accumulate", "refuse"]

# A larger batch does not fit what the allocator keeps at hand: with 32 MiB, a W of width 512 takes
# a sixth longer than with 1 MiB.
_BATCH_NUMBERS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A tensor computed from parameters alone, such as ``p.T``; ``leaves`` are their ids."""

    edge: GradientEdge  # where its gradient enters the graph to the parameters
    shape: torch.Size
    grad_dtype: torch.dtype
    leaves: frozenset[int]


Weight: TypeAlias = Parameter | Expression
Weights: TypeAlias = tuple[Weight, ...]
WeightGrads: TypeAlias = tuple[Tensor, ...]
Formula: TypeAlias = Callable[[Any, Any, Weights, Tensor], WeightGrads]
# (formula, weights, saved tensor, its version, further arguments, gradients of the result). A plain
# tuple: one is made per operation and microbatch, on the hot path.
Record: TypeAlias = tuple[Formula, tuple[Weight, ...], Tensor | None, int, Any, Any]


class CannotDeferError(StageError):
    """The module's forward is incompatible with the deferral of weight gradients."""


def refuse(what: str) -> NoReturn:
    """Refuse a call that needs the autograd graph from a stage's results to its parameters."""
    raise CannotDeferError(
        f"the module or its loss calls {what}, which needs the graph that leads to the "
        "parameters, and weight gradients deferred by operation have none; pass "
        "defers_weights=False to this PipelineStage, or set it (pipe.stages[i].defers_weights = "
        "False), or use a schedule with full backwards"
    )


def accumulate(records: list[Record]) -> None:
    """Compute all weight gradients and accumulate them into the parameters' ``.grad``.

    The records, in the order of the forward, are emptied from the end, so that the tensors of each
    are freed as they are used.
    """
    used = [weight for record in records for weight in record[1]]
    uses = Counter(map(id, used)) if len(set(map(id, used))) < len(used) else {}
    through_graph: set[int] = set()
    for weight in used:
        if type(weight) is Expression:
            through_graph |= {id(weight), *weight.leaves}
    summed = through_graph | {key for key, count in uses.items() if count > 1}
    del used
    sums: dict[int, Tensor] = {}
    parameters: list[Any] = []
    totals: list[Tensor] = []
    roots: list[tuple[Weight, Tensor]] = []
    num_numbers = 0
    while records:
        weights, parts = _contribution(records.pop())
        if not summed or summed.isdisjoint(map(id, weights)):  # as are nearly all
            if parts:
                parameters += weights
                totals += parts
                num_numbers += parts[0].numel()  # a bias is never larger
            weights = ()
        for index, weight in enumerate(weights):
            key = id(weight)
            uses[key] = uses.get(key, 1) - 1
            total = sums.pop(key, None)
            if parts:
                total = parts[index] if total is None else _added(total, parts[index], weight)
            if total is None:
                continue
            if uses[key]:
                sums[key] = total
            elif key in through_graph:
                roots.append((weight, total))
            else:
                parameters.append(weight)
                totals.append(total)
                num_numbers += total.numel()
            del total
        del parts
        if num_numbers > _BATCH_NUMBERS:
            _hand_over(parameters, totals)
            num_numbers = 0
    _hand_over(parameters, totals)
    # One backward pass from expressions to their parameters, and these themselves.
    pairs: list[tuple[Any, Tensor]] = [
        (weight.edge if isinstance(weight, Expression) else weight, total)
        for weight, total in roots
        if isinstance(weight, Expression) or weight.requires_grad
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [total for _, total in pairs])


def _contribution(record: Record) -> tuple[tuple[Weight, ...], tuple[Tensor, ...]]:
    """The weights of ``record`` and a gradient for each; none if no gradient came."""
    formula, weights, saved, version, extra, grads = record
    if saved is not None and version_of(saved) != version:
        raise StageError(
            f"a tensor of shape {tuple(saved.shape)}, needed for the gradient of the weight of "
            f"shape {', '.join(str(tuple(each.shape)) for each in weights)}, was modified in place "
            f"after the forward that used it: it is at version {version_of(saved)}, expected "
            f"version {version}; use the operation that is not in place, or keep the tensor "
            "unchanged until the weight gradient W is done"
        )
    parts: tuple[Tensor, ...] = ()
    for grad in grads:
        if grad is None:
            continue
        more = formula(saved, extra, weights, grad)
        if more[0].requires_grad:
            refuse("backward(create_graph=True)")
        parts = tuple(map(_added, parts, more, weights)) if parts else more
    return weights, parts


def _added(total: Tensor, part: Tensor, weight: Weight) -> Tensor:
    """The sum of two contributions to ``weight`` in its gradient's dtype, as autograd adds them."""
    dtype = weight.grad_dtype or torch.promote_types(total.dtype, part.dtype)
    return total.to(dtype) + part.to(dtype)


def _hand_over(parameters: list[Any], totals: list[Tensor]) -> None:
    """Accumulate into parameters, and empty both lists."""
    if any(param.grad is None or not param.requires_grad for param in parameters):
        live = [i for i, p in enumerate(parameters) if p.requires_grad]  # others: frozen since F
        parameters[:] = [parameters[i] for i in live]
        totals[:] = [totals[i] for i in live]
        if live:
            with torch.enable_grad():
                root = _FirstGrads.apply(totals, *parameters)  # type: ignore[no-untyped-call]
            torch.autograd.backward((root,), (root.detach(),))
    elif parameters:
        run_backward(parameters, totals)
    parameters.clear()
    totals.clear()


class _FirstGrads(torch.autograd.Function):
    """A node whose inputs are parameters and whose backward returns their gradients.

    A gradient that nothing else references becomes ``.grad`` itself. ``torch.autograd.backward``
    would copy gradients, which its caller references.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, totals: list[Tensor], *parameters: Parameter) -> Tensor:
        ctx.totals = totals  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return torch.empty((), device=parameters[0].device)  # no DTensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        totals = tuple(ctx.totals)
        ctx.totals.clear()
        return (None, *totals)


# --- formulas ------------------------------------------------------------------------------------


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _with_bias(w_grad: Tensor, weights: Weights, grad: Tensor) -> WeightGrads:
    """The gradients of a weight and, if there is one, of a bias that was broadcast."""
    if len(weights) == 1:
        return (w_grad,)
    shape = weights[1].shape
    return w_grad, grad.clone() if grad.shape == shape else grad.sum_to_size(shape)


def linear(saved: Tensor, row_major: bool, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_MK @ w_NK.T + b_N``; ``row_major`` is how ``w`` lies in memory."""
    grad_MN, x_MK = _rows(grad), _rows(saved)
    w_grad = grad_MN.t().mm(x_MK) if row_major else x_MK.t().mm(grad_MN).t()
    return (w_grad,) if len(weights) == 1 else (w_grad, grad_MN.sum(0))


def matmul(saved: Tensor, row_major: bool, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_MK @ w_KN``, or ``b + x_MK @ w_KN`` with ``b`` as the second weight."""
    grad_MN, x_MK = _rows(grad), _rows(saved)
    w_grad = x_MK.t().mm(grad_MN) if row_major else grad_MN.t().mm(x_MK).t()
    return _with_bias(w_grad, weights, grad_MN)


def batched_matmul(saved: Tensor, _: Any, weights: Weights, grad: Tensor) -> WeightGrads:
    """``x_BMK @ w_BKN``, or ``b + x_BMK @ w_BKN`` with ``b`` as the second weight."""
    return _with_bias(saved.transpose(1, 2).bmm(grad), weights, grad)


def conv(saved: Tensor, options: tuple[Any, ...], weights: Weights, grad: Tensor) -> WeightGrads:
    """A convolution; ``options`` are the other arguments of ``aten.convolution_backward``."""
    _, *grads = torch.ops.aten.convolution_backward.default(grad, saved, *options)
    return tuple(grads[: len(weights)])


def embedding(
    saved: Tensor, options: tuple[int, bool], weights: Weights, grad: Tensor
) -> WeightGrads:
    """Rows looked up by ``saved``; ``options`` are the padding index and scale by frequency."""
    num_rows = weights[0].shape[0]
    return (torch.ops.aten.embedding_dense_backward.default(grad, saved, num_rows, *options),)


def proxy_grads(saved: None, _: Any, weights: Weights, grad: Tensor) -> WeightGrads:
    """An operation without a formula: autograd has computed the gradient in I."""
    return (grad,)
