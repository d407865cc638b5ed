"""W: from the records of one microbatch to the gradients of its parameters.

    records ──► groups ──► one backward pass per group ──► AccumulateGrad, hooks, DDP, ...

Each parameter belongs to one group, so that whatever is hooked on it runs once, as in an
ordinary backward. A group is closed when its weights fill some megabytes: the gradients of a
large stage never exist all at once beside the ones that they are added to. This module knows no
operation and no formula.
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

__all__ = ["deliver"]

GROUP_BYTES = 1 << 20


def deliver(records: list[Record], *, group_bytes: int = GROUP_BYTES) -> None:
    """Compute all weight gradients and accumulate them into the parameters' ``.grad``.

    Args:
        records: the records of one microbatch, latest operation first; emptied.
        group_bytes: the size of the weights whose gradients may exist at once.

    Raises:
        StageError: a tensor that a weight gradient needs was changed in place since the forward.
    """
    entangled: frozenset[int] = frozenset().union(
        *(w.leaves for record in records for w in record[1] if isinstance(w, Expression))
    )
    if entangled:
        mixed = [r for r in records if touches(r, entangled)]
        # A record that also holds an untangled weight draws that weight in.
        size = -1
        while size != len(entangled):
            size = len(entangled)
            entangled |= {id(w) for r in mixed for w in r[1]}
            mixed = [r for r in records if touches(r, entangled)]
        records = [r for r in records if not touches(r, entangled)]
        deliver_through_graph(mixed)
    for group in grouped(records, group_bytes):
        deliver_to_leaves(group)


def touches(record: Record, entangled: frozenset[int]) -> bool:
    """Whether the record holds an expression, or a parameter that expressions depend on."""
    return any(isinstance(w, Expression) or id(w) in entangled for w in record[1])


def grouped(records: list[Record], group_bytes: int) -> list[list[Record]]:
    """``records`` in groups that share no weight, each of about ``group_bytes`` of weights."""
    groups: list[list[Record]] = [[]]
    home: dict[int, int] = {}
    filled = 0
    for record in records:
        homes = {home[id(w)] for w in record[1] if id(w) in home}
        if len(homes) > 1:
            return [records]  # one operation ties two groups: rare enough not to merge them
        if homes:
            index = homes.pop()
        else:
            if filled > group_bytes:
                groups.append([])
                filled = 0
            index = len(groups) - 1
        groups[index].append(record)
        for weight in record[1]:
            if id(weight) not in home:
                home[id(weight)] = index
                filled += weight.nbytes  # type: ignore[union-attr]
    return groups


def contributions(records: list[Record]) -> tuple[list[Weight], list[Tensor]]:
    """Every weight of ``records`` with the sum of its contributions; ``records`` is emptied."""
    weights: dict[int, Weight] = {}
    totals: dict[int, Tensor] = {}
    records.reverse()
    while records:
        rule, owners, saved, version, extra, grads = records.pop()
        if saved is not None and saved._version != version:
            raise_changed(saved, version, owners)
        for grad in grads:
            if grad is None:
                continue
            for weight, part in zip(owners, rule(saved, extra, owners, grad), strict=True):
                if part.dtype is not weight.dtype:
                    part = part.to(weight.dtype)
                key = id(weight)
                if key in totals:
                    totals[key] = totals[key] + part
                else:
                    weights[key] = weight
                    totals[key] = part
    return list(weights.values()), list(totals.values())


def raise_changed(saved: Tensor, version: int, owners: Sequence[Weight]) -> None:
    """Refuse a gradient that would be computed from other data than the forward's."""
    shapes = ", ".join(str(tuple(owner.shape)) for owner in owners)
    raise StageError(
        f"a tensor of shape {tuple(saved.shape)}, needed for the gradient of the weight of shape "
        f"{shapes}, was modified in place after the forward that used it: it is at version "
        f"{saved._version}, expected version {version}; use the operation that is not in place, "
        "or keep the tensor unchanged until the weight gradient W is done"
    )


class Deliver(torch.autograd.Function):
    """A node whose inputs are parameters and whose backward computes their gradients.

    Gradients that a node returns are owned by nobody else, so that AccumulateGrad keeps them;
    those handed to ``torch.autograd.backward`` from outside it has to copy.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, records: list[Record], *weights: Parameter) -> Tensor:
        ctx.records = records  # type: ignore[attr-defined]
        ctx.order = [id(weight) for weight in weights]  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, totals = contributions(ctx.records)
        found = {id(w): total for w, total in zip(weights, totals, strict=True)}
        del totals
        return (None, *(found.pop(key, None) for key in ctx.order))


def deliver_to_leaves(records: list[Record]) -> None:
    """One backward pass into parameters that take part as themselves alone."""
    weights = {id(w): w for record in records for w in record[1]}
    if not weights:
        return
    with torch.enable_grad():
        root = Deliver.apply(records, *weights.values())  # type: ignore[no-untyped-call]
    if root.requires_grad:  # else every parameter has been frozen since the forward
        torch.autograd.backward((root,), (root.detach(),))


def deliver_through_graph(records: list[Record]) -> None:
    """One backward pass from expressions down to their parameters, and these themselves."""
    with torch.no_grad():
        weights, totals = contributions(records)
    pairs: list[tuple[Any, Tensor]] = [
        (w.edge if isinstance(w, Expression) else w, total)
        for w, total in zip(weights, totals, strict=True)
        if isinstance(w, Expression) or w.requires_grad
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [total for _, total in pairs])
