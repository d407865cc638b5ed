"""W: from the records of one microbatch to the gradients of its parameters.

    records ──rules──► sums per weight ──► AccumulateGrad, and the hooks on it

A weight is handed over once, with its last contribution, in batches of about a megabyte: the
gradients of a large stage never exist all at once beside ``.grad``. Weights computed from
parameters go last, with these parameters, in one backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Parameter

from penstock._torch_compat import run_backward, version_of
from penstock.errors import StageError
from penstock.stage.weight_grad.rules import Expression, GradRule, Weight

__all__ = ["CannotDeferError", "Record", "accumulate", "refuse"]

# (rule, weights, saved tensor, its version, further arguments, gradients of the result). A plain
# tuple: one is made per operation and microbatch, on the hot path.
Record: TypeAlias = tuple[GradRule, tuple[Weight, ...], Tensor | None, int, Any, Any]

# A larger batch does not fit what the allocator keeps at hand: with 32 MiB, a W of width 512 takes
# a sixth longer than with 1 MiB.
_BATCH_NUMBERS = 1 << 18


class CannotDeferError(StageError):
    """The module's forward is incompatible with the deferral of weight gradients."""


def refuse(what: str) -> NoReturn:
    """Refuse a call that needs the autograd graph from a stage's results to its parameters."""
    raise CannotDeferError(
        f"the module or its loss calls {what}, which needs the graph that leads to the "
        "parameters, and weight gradients put off by operation have none; pass "
        "defers_weights=False to this PipelineStage, or set it (pipe.stages[i].defers_weights = "
        "False), or use a schedule with full backwards"
    )


def accumulate(records: list[Record]) -> None:
    """Compute all weight gradients and accumulate them into the parameters' ``.grad``.

    Args:
        records: the records of one microbatch in the order of its forward; emptied from the end,
            so that each record's tensors are freed as they are used.

    Raises:
        StageError: a tensor that a weight gradient needs was changed in place since the forward.
    """
    weights = [weight for record in records for weight in record[1]]
    if len(set(map(id, weights))) == len(weights) and Expression not in map(type, weights):
        _accumulate_singly(records)
    else:
        _accumulate_sums(records, weights)


def _accumulate_singly(records: list[Record]) -> None:
    """The fast path: parameters that are used once and directly."""
    parameters: list[Any] = []
    totals: list[Tensor] = []
    held = 0
    while records:
        weights, parts = _contribution(records.pop())
        if not parts:
            continue
        parameters += weights
        totals += parts
        held += parts[0].numel()  # a bias is never larger
        del parts
        if held > _BATCH_NUMBERS:
            _hand_over(parameters, totals)
            held = 0
    _hand_over(parameters, totals)


def _accumulate_sums(records: list[Record], weights: list[Weight]) -> None:
    """The general case: parameters used several times, and expressions of parameters."""
    due = Counter(map(id, weights))
    through_graph: set[int] = set()
    for weight in weights:
        if type(weight) is Expression:
            through_graph |= {id(weight), *weight.leaves}
    sums: dict[int, Tensor] = {}
    parameters: list[Any] = []
    totals: list[Tensor] = []
    roots: list[Any] = []
    root_totals: list[Tensor] = []
    held = 0
    while records:
        used, parts = _contribution(records.pop())
        for weight, part in zip(used, parts, strict=False):  # parts may have no elements
            key = id(weight)
            sums[key] = _added(sums[key], part, weight) if key in sums else part
        del parts
        for weight in used:
            key = id(weight)
            due[key] -= 1
            if due[key] or key not in sums:
                continue
            if key in through_graph:
                roots.append(weight)
                root_totals.append(sums.pop(key))
            else:
                parameters.append(weight)
                totals.append(sums.pop(key))
                held += totals[-1].numel()
        if held > _BATCH_NUMBERS:
            _hand_over(parameters, totals)
            held = 0
    _hand_over(parameters, totals)
    _hand_through(roots, root_totals)


def _contribution(record: Record) -> tuple[tuple[Weight, ...], tuple[Tensor, ...]]:
    """The weights of ``record`` and a gradient for each; none if no gradient came."""
    rule, weights, saved, version, extra, grads = record
    if saved is not None and version_of(saved) != version:
        raise _changed(saved, version, weights)
    parts: tuple[Tensor, ...] = ()
    for grad in grads:
        if grad is None:
            continue
        more = rule(saved, extra, weights, grad)
        if more[0].requires_grad:
            refuse("backward(create_graph=True)")
        parts = tuple(map(_added, parts, more, weights)) if parts else more
    return weights, parts


def _added(total: Tensor, part: Tensor, weight: Weight) -> Tensor:
    """The sum of two contributions to ``weight``, in its dtype, as autograd adds them."""
    return total.to(weight.dtype) + part.to(weight.dtype)


def _changed(saved: Tensor, version: int, owners: Sequence[Weight]) -> StageError:
    shapes = ", ".join(str(tuple(owner.shape)) for owner in owners)
    return StageError(
        f"a tensor of shape {tuple(saved.shape)}, needed for the gradient of the weight of shape "
        f"{shapes}, was modified in place after the forward that used it: it is at version "
        f"{version_of(saved)}, expected version {version}; use the operation that is not in place, "
        "or keep the tensor unchanged until the weight gradient W is done"
    )


def _hand_over(parameters: list[Any], totals: list[Tensor]) -> None:
    """Accumulate into parameters that are used as themselves alone; both lists are emptied."""
    if not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None or not parameter.requires_grad:
            _hand_over_first(parameters, totals)
            break
    else:
        backward = run_backward if parameters[0].is_cpu else torch.autograd.backward
        backward(parameters, totals)
    parameters.clear()
    totals.clear()


def _hand_over_first(parameters: list[Any], totals: list[Tensor]) -> None:
    """``_hand_over`` of first gradients, and where parameters were frozen since the forward."""
    live = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
    if not live:
        return
    parameters[:] = [parameters[index] for index in live]
    totals[:] = [totals[index] for index in live]
    with torch.enable_grad():
        root = _Handover.apply(totals, *parameters)  # type: ignore[no-untyped-call]
    torch.autograd.backward((root,), (root.detach(),))


class _Handover(torch.autograd.Function):
    """A node whose inputs are parameters and whose backward returns their gradients.

    A first gradient that nobody else holds becomes ``.grad`` itself. Gradients given to
    ``torch.autograd.backward`` are held by the caller, and it would copy them.
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


def _hand_through(weights: list[Weight], totals: list[Tensor]) -> None:
    """Run one backward pass from expressions to their parameters, and these themselves."""
    pairs: list[tuple[Any, Tensor]] = [
        (weight.edge if isinstance(weight, Expression) else weight, total)
        for weight, total in zip(weights, totals, strict=True)
        if isinstance(weight, Expression) or weight.requires_grad
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [total for _, total in pairs])
