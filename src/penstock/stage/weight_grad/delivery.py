"""W: from the records of one microbatch to the gradients of its parameters.

    records ──rules──► sums per weight ──► AccumulateGrad, and all that is hooked on it

A weight is handed over once, when its last contribution is in, together with others until they
fill about a megabyte: the gradients of a large stage never exist all at once beside the ones that
they are added to. Weights that are computed from parameters go last, with these parameters, in
one backward pass. This module knows no operation and no formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Parameter

from penstock._torch_compat import run_backward
from penstock.errors import StageError
from penstock.stage.weight_grad.ledger import Record, refuse
from penstock.stage.weight_grad.rules import Expression, Weight

__all__ = ["deliver"]

# Where a batch of gradients is larger than the allocator keeps at hand, its pages are fetched from
# the system anew in every W: with 32 MiB, a W of width 512 takes a sixth longer than with 1 MiB.
BATCH_NUMBERS = 1 << 18


def deliver(records: list[Record]) -> None:
    """Compute all weight gradients and accumulate them into the parameters' ``.grad``.

    Args:
        records: the records of one microbatch in the order of its forward; emptied from the end,
            so that what they hold is freed as it is used.

    Raises:
        StageError: a tensor that a weight gradient needs was changed in place since the forward.
    """
    weights = [weight for record in records for weight in record[1]]
    if len(set(map(id, weights))) == len(weights) and Expression not in map(type, weights):
        deliver_singly(records)
    else:
        deliver_summed(records, weights)


def deliver_singly(records: list[Record]) -> None:
    """The usual case, quickly: parameters that take part once, as themselves."""
    parameters: list[Any] = []
    totals: list[Tensor] = []
    held = 0
    while records:
        weights, parts = contribution(records.pop())
        if not parts:
            continue
        parameters += weights
        totals += parts
        held += parts[0].numel()  # a bias beside it is no more
        del parts
        if held > BATCH_NUMBERS:
            hand_over(parameters, totals)
            held = 0
    hand_over(parameters, totals)


def deliver_summed(records: list[Record], weights: list[Weight]) -> None:
    """The general case: parameters used several times, and expressions of parameters."""
    due = Counter(map(id, weights))
    tangled: set[int] = set()
    for weight in weights:
        if type(weight) is Expression:
            tangled |= {id(weight), *weight.leaves}
    sums: dict[int, Tensor] = {}
    parameters: list[Any] = []
    totals: list[Tensor] = []
    roots: list[Any] = []
    root_totals: list[Tensor] = []
    held = 0
    while records:
        used, parts = contribution(records.pop())
        for weight, part in zip(used, parts, strict=False):  # parts may be none at all
            key = id(weight)
            sums[key] = added(sums[key], part, weight) if key in sums else part
        del parts
        for weight in used:
            key = id(weight)
            due[key] -= 1
            if due[key] or key not in sums:
                continue
            if key in tangled:
                roots.append(weight)
                root_totals.append(sums.pop(key))
            else:
                parameters.append(weight)
                totals.append(sums.pop(key))
                held += totals[-1].numel()
        if held > BATCH_NUMBERS:
            hand_over(parameters, totals)
            held = 0
    hand_over(parameters, totals)
    hand_through(roots, root_totals)


def contribution(record: Record) -> tuple[tuple[Weight, ...], tuple[Tensor, ...]]:
    """The weights of ``record`` and a gradient for each; none where no gradient came by."""
    rule, weights, saved, version, extra, grads = record
    if saved is not None and saved._version != version:
        raise_changed(saved, version, weights)
    parts: tuple[Tensor, ...] = ()
    for grad in grads:
        if grad is None:
            continue
        more = rule(saved, extra, weights, grad)
        if more[0].requires_grad:
            refuse("backward(create_graph=True)")
        parts = tuple(map(added, parts, more, weights)) if parts else more
    return weights, parts


def added(total: Tensor, part: Tensor, weight: Weight) -> Tensor:
    """One more contribution to ``weight``, each first in its dtype, as autograd adds them."""
    return total.to(weight.dtype) + part.to(weight.dtype)


def raise_changed(saved: Tensor, version: int, owners: Sequence[Weight]) -> None:
    """Refuse a gradient that would be computed from other data than the forward's."""
    shapes = ", ".join(str(tuple(owner.shape)) for owner in owners)
    raise StageError(
        f"a tensor of shape {tuple(saved.shape)}, needed for the gradient of the weight of shape "
        f"{shapes}, was modified in place after the forward that used it: it is at version "
        f"{saved._version}, expected version {version}; use the operation that is not in place, "
        "or keep the tensor unchanged until the weight gradient W is done"
    )


def hand_over(parameters: list[Any], totals: list[Tensor]) -> None:
    """Accumulate into parameters that take part as themselves alone; both lists are emptied."""
    if not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None or not parameter.requires_grad:
            hand_over_first(parameters, totals)
            break
    else:
        backward = run_backward if parameters[0].is_cpu else torch.autograd.backward
        backward(parameters, totals)
    parameters.clear()
    totals.clear()


def hand_over_first(parameters: list[Any], totals: list[Tensor]) -> None:
    """The same where a gradient is the first, or a parameter was frozen since the forward."""
    live = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
    if not live:
        return
    parameters[:] = [parameters[index] for index in live]
    totals[:] = [totals[index] for index in live]
    with torch.enable_grad():
        root = Handover.apply(totals, *parameters)  # type: ignore[no-untyped-call]
    torch.autograd.backward((root,), (root.detach(),))


class Handover(torch.autograd.Function):
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


def hand_through(weights: list[Weight], totals: list[Tensor]) -> None:
    """One backward pass from expressions down to their parameters, and these themselves."""
    pairs: list[tuple[Any, Tensor]] = [
        (weight.edge if isinstance(weight, Expression) else weight, total)
        for weight, total in zip(weights, totals, strict=True)
        if isinstance(weight, Expression) or weight.requires_grad
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [total for _, total in pairs])
