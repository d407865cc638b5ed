"""W: from the records of one microbatch to the gradients of its parameters.

    records ──formulas──► sums per weight ──► AccumulateGrad, and the hooks on it

A parameter gets its gradient once, with its last contribution, in batches of about a megabyte: the
gradients of a large stage never exist all at once beside ``.grad``. Weights computed from
parameters go last, with these parameters, in one backward pass.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Parameter

from penstock._torch_compat import run_backward, version_of
from penstock.errors import StageError
from penstock.stage.weight_grad.formulas import Expression, Formula, Weight

__all__ = ["CannotDeferError", "Record", "accumulate", "refuse"]

# (formula, weights, saved tensor, its version, further arguments, gradients of the result). A plain
# tuple: one is made per operation and microbatch, on the hot path.
Record: TypeAlias = tuple[Formula, tuple[Weight, ...], Tensor | None, int, Any, Any]

# A larger batch does not fit what the allocator keeps at hand: with 32 MiB, a W of width 512 takes
# a sixth longer than with 1 MiB.
_BATCH_NUMBERS = 1 << 18


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

    Raises:
        StageError: a tensor that a weight gradient needs was changed in place since the forward.
    """
    weights = [weight for record in records for weight in record[1]]
    uses = Counter(map(id, weights))
    through_graph: set[int] = set()
    for weight in weights:
        if type(weight) is Expression:
            through_graph |= {id(weight), *weight.leaves}
    summed = through_graph | {key for key, count in uses.items() if count > 1}
    del weights
    sums: dict[int, Tensor] = {}
    parameters: list[Any] = []
    totals: list[Tensor] = []
    roots: list[tuple[Weight, Tensor]] = []
    num_numbers = 0
    while records:
        used, parts = _contribution(records.pop())
        if summed.isdisjoint(map(id, used)):
            if parts:
                parameters += used
                totals += parts
                num_numbers += parts[0].numel()  # a bias is never larger
            used = ()
        for index, weight in enumerate(used):
            key = id(weight)
            uses[key] -= 1
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
    """The sum of two contributions to ``weight``, in its dtype, as autograd adds them."""
    return total.to(weight.dtype) + part.to(weight.dtype)


def _hand_over(parameters: list[Any], totals: list[Tensor]) -> None:
    """Accumulate into parameters, and empty both lists."""
    if any(p.grad is None or not p.requires_grad for p in parameters):
        live = [i for i, p in enumerate(parameters) if p.requires_grad]  # others: frozen since F
        parameters[:] = [parameters[i] for i in live]
        totals[:] = [totals[i] for i in live]
        if live:
            with torch.enable_grad():
                root = _FirstGrads.apply(totals, *parameters)  # type: ignore[no-untyped-call]
            torch.autograd.backward((root,), (root.detach(),))
    elif parameters:
        backward = run_backward if parameters[0].is_cpu else torch.autograd.backward
        backward(parameters, totals)
    parameters.clear()
    totals.clear()


class _FirstGrads(torch.autograd.Function):
    """A node whose inputs are parameters and whose backward returns their gradients.

    A first gradient that nothing else references becomes ``.grad`` itself. Gradients given to
    ``torch.autograd.backward`` are referenced by the caller, and it would copy them.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, totals: list[Tensor], *parameters: Parameter) -> Tensor:
        ctx.totals = totals  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return parameters[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        totals = tuple(ctx.totals)
        ctx.totals.clear()
        return (None, *totals)
