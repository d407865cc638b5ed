"""W: from the records of one microbatch to the gradients of its parameters.

    records ──rules──► sums per weight ──► AccumulateGrad, and all that is hooked on it

A weight is handed over once, when its last contribution is in, and together with others until
they fill a megabyte: the gradients of a large stage never exist all at once beside the ones that
they are added to. Weights that are computed from parameters go last, with these parameters, in
one backward pass. This module knows no operation and no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Parameter

from penstock.errors import StageError
from penstock.stage.deferred_ledger import Record
from penstock.stage.deferred_rules import Expression, Weight
from penstock.stage.torch_private import accumulate_into_leaves

__all__ = ["deliver"]

# Where a batch of gradients is larger than the allocator keeps at hand, its pages are fetched from
# the system anew in every W: at 32 MiB a W of width 512 takes a sixth longer than at 1 MiB.
BATCH_BYTES = 1 << 20


def deliver(records: list[Record], *, batch_bytes: int = BATCH_BYTES) -> None:
    """Compute all weight gradients and accumulate them into the parameters' ``.grad``.

    Args:
        records: the records of one microbatch, latest operation first; emptied, so that what they
            hold is freed as it is used.
        batch_bytes: how many bytes of gradients may be held back.

    Raises:
        StageError: a tensor that a weight gradient needs was changed in place since the forward.
    """
    due, tangled = outstanding(records)
    sums: dict[int, Tensor] = {}
    ready: list[tuple[Weight, Tensor]] = []
    last: list[tuple[Weight, Tensor]] = []
    held_bytes = 0
    records.reverse()
    while records:
        weights = contribute(records.pop(), sums)
        for weight in weights:
            key = id(weight)
            due[key] -= 1
            if due[key] or key not in sums:
                continue
            if key in tangled:
                last.append((weight, sums.pop(key)))
            else:
                ready.append((weight, sums.pop(key)))
                held_bytes += weight.nbytes  # type: ignore[union-attr]
        if held_bytes > batch_bytes:
            hand_over(ready)
            held_bytes = 0
    if ready:
        hand_over(ready)
    if last:
        hand_through(last)


def outstanding(records: list[Record]) -> tuple[dict[int, int], set[int]]:
    """How many records each weight is in, by id; and the ids that belong to expressions."""
    due: dict[int, int] = {}
    tangled: set[int] = set()
    for record in records:
        for weight in record[1]:
            key = id(weight)
            due[key] = due.get(key, 0) + 1
            if type(weight) is Expression:
                tangled |= {key, *weight.leaves}
    return due, tangled


def contribute(record: Record, sums: dict[int, Tensor]) -> tuple[Weight, ...]:
    """Add to ``sums``, by id, what ``record`` contributes to its weights; returns these."""
    rule, weights, saved, version, extra, grads = record
    if saved is not None and saved._version != version:
        raise_changed(saved, version, weights)
    with torch.no_grad():
        for grad in grads:
            if grad is None:
                continue
            for weight, part in zip(weights, rule(saved, extra, weights, grad), strict=True):
                key = id(weight)
                sums[key] = added(sums[key], part, weight) if key in sums else part
    return weights


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


def hand_over(ready: list[tuple[Weight, Tensor]]) -> None:
    """Accumulate into parameters that take part as themselves alone; ``ready`` is emptied."""
    live: list[Any] = [pair for pair in ready if pair[0].requires_grad]  # type: ignore[union-attr]
    ready.clear()
    if not live:  # frozen since the forward
        return
    parameters = tuple(pair[0] for pair in live)
    totals = [pair[1] for pair in live]
    live.clear()
    if any(parameter.grad is None for parameter in parameters):
        with torch.enable_grad():
            root = Handover.apply(totals, *parameters)  # type: ignore[no-untyped-call]
        torch.autograd.backward((root,), (root.detach(),))
    else:
        accumulate_into_leaves(parameters, tuple(totals))


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


def hand_through(last: list[tuple[Weight, Tensor]]) -> None:
    """One backward pass from expressions down to their parameters, and these themselves."""
    pairs: list[tuple[Any, Tensor]] = [
        (weight.edge if isinstance(weight, Expression) else weight, total)
        for weight, total in last
        if isinstance(weight, Expression) or weight.requires_grad
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [total for _, total in pairs])
