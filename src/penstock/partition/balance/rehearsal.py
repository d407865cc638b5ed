"""One run of a model, to see which units run when, what is kept of them and what crosses.

It holds no clock: it may take its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch_compat import saved_through
from penstock.errors import PartitionError
from penstock.partition.balance.subject import Subject
from penstock.partition.balance.traffic import Traffic, memory_of
from penstock.partition.balance.watch import UnitWatch
from penstock.partition.blocks import LeafModule
from penstock.partition.plan import abbreviate
from penstock.stage.pytree import tensors_of
from penstock.stage.weight_grad import (
    CannotDeferError,
    DeferredGrads,
    compiled_parts,
    find_undeferred,
)

__all__ = ["Rehearsal", "rehearse", "same"]

_REFUSED = (
    "the model differentiates by torch.func (grad, vjp, hessian, ...), under which torch lets "
    "nobody see what is kept for the backward, so it can't be measured; pass split= as counts or "
    "names, and name a schedule"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rehearsal:
    """What one run of a model tells beside times.

    Args:
        order: the names of the units that run, by their first call.
        kept_bytes: per segment, what autograd keeps for the backward.
        sends: per segment, what crosses a cut behind it.
        leaks: the parameters whose gradients come in I; None where no gradient can be put off.
    """

    order: tuple[str, ...]
    kept_bytes: tuple[int, ...]
    sends: tuple[tuple[Tensor, ...], ...]
    leaks: tuple[nn.Parameter, ...] | None


def rehearse(subject: Subject, units: Sequence[LeafModule]) -> Rehearsal:
    """Run the model once, and see."""
    own = [*subject.state.values(), *tensors_of((subject.args, subject.kwargs))]
    mine = {memory_of(tensor) for tensor in own}
    traffic = Traffic(own)
    kept: list[dict[int, int]] = [{}]

    def enter(segment: int, given: Any) -> None:
        traffic.enter(segment, given)
        if segment:  # what is kept before the first unit counts with it
            kept.append({})

    def keep(tensor: Tensor) -> Tensor:
        if memory_of(tensor) not in mine:
            kept[-1][memory_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    watch = UnitWatch(units, enter=enter, leave=traffic.leave)
    with watch.watching(), saved_through(keep, same, PartitionError(_REFUSED)):
        subject.forward()
    if not watch.order:
        raise PartitionError(
            f"a run of the {type(subject.model).__name__} calls none of "
            f"{abbreviate([unit.name for unit in units])}; pass a list of modules, its blocks"
        )
    return Rehearsal(
        order=tuple(watch.order),
        kept_bytes=tuple(sum(each.values()) for each in kept),
        sends=tuple(tuple(traffic.behind(i)) for i in range(len(watch.order))),
        leaks=leaks_of(subject),
    )


def leaks_of(subject: Subject) -> tuple[nn.Parameter, ...] | None:
    """The parameters whose gradients can't be put off to W; None where none can."""
    work = DeferredGrads(compiled=compiled_parts(subject.model))
    try:
        with work:
            roots, grads = subject.forward()
        leaks = find_undeferred(roots, subject.parameters)
        with work:
            torch.autograd.backward(roots, grads)
        work.accumulate()
    except CannotDeferError:
        return None
    return tuple(leaks)


def same(tensor: Tensor) -> Tensor:
    """What is kept, as it was."""
    return tensor
