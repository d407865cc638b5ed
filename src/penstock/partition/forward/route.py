"""Route: what one stage has to know of a plan, worked out once; and what is absent on it.

    calls      0     1     2     3     4        of a plan with three stages, for stage 1
    stage      0     0     1     1     2
    again      ├───────────┤                    code between the parts that stage 0 runs too
    end        ├─────────────────────┤          behind that, the forward is left

It runs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.partition.forward.absent import Absent, Origin, Source, SourceKind
from penstock.partition.forward.crossings import Crossings
from penstock.stage.pytree import unflatten
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["Route", "absent"]


class Route:
    """What one stage has to know of a plan, worked out once.

    Args:
        plan: the plan.
        index: the stage.
        device: where absent values claim to be.

    Attributes:
        end: the number of calls that it needs.
        wanted: what it hands on of which leaf of which call.
        crossing: the calls that it hands something on of.
        again: the calls up to which earlier stages run the code between the parts too.
        alone: the call from which on no other stage does.
    """

    def __init__(self, plan: Crossings, index: int, device: torch.device) -> None:
        is_last = index == len(plan.carried)
        self.plan = plan
        self.end = len(plan.calls) if is_last else plan.last_call(index) + 1
        carried = () if is_last else plan.carried[index]
        self.wanted = {(s.call, s.leaf): s for s in carried if s.kind is SourceKind.OUTPUT}
        # Until there, the code between the parts has run on earlier stages too.
        self.again = max((plan.last_call(i) + 1 for i in range(index)), default=-1)
        self.alone = max(self.again, 0) if is_last else self.end
        self.crossing = {call for call, _ in self.wanted}
        self._device = device
        self._kept: dict[int, tuple[str, ...]] = {}
        self._hollow: dict[tuple[int, bool], tuple[list[Any], list[tuple[int, Source]]]] = {}

    def kept(self, index: int) -> tuple[str, ...]:
        """The attributes that a call's module keeps tensors in."""
        if index not in self._kept:
            output = self.plan.calls[index].output
            ((_, _, kept),) = unflatten(output.tree, output.leaves)
            self._kept[index] = tuple(kept)
        return self._kept[index]

    def hollow(self, index: int) -> tuple[list[Any], list[tuple[int, Source]]]:
        """The leaves that stand for a call's result, and which of them are absent tensors.

        They are made once: the dry run has shown whether anybody writes into them.
        """
        key = (index, torch.is_grad_enabled())
        if key not in self._hollow:
            call = self.plan.calls[index]
            leaves: list[Any] = list(call.output.leaves)
            sources = []
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, TensorMeta):
                    source = Source(SourceKind.OUTPUT, index, i, call.unit)
                    leaves[i] = absent(leaf, self._device, source)
                    sources.append((i, source))
            if call.written:
                return leaves, sources
            self._hollow[key] = (leaves, sources)
        leaves, sources = self._hollow[key]
        return list(leaves), sources


def absent(meta: TensorMeta, device: torch.device, source: Source) -> Absent:
    """What stands for a tensor that ``meta`` describes."""
    inner = torch.empty(meta.wire_shape, dtype=meta.dtype, device="meta")
    body = meta.unpack(inner)
    if not (meta.dtype.is_floating_point and torch.is_grad_enabled()):
        return Absent(body, device, Origin({source}))
    made: Absent = _Guarded.apply(_anchor, body, device, source)  # type: ignore[no-untyped-call]
    return made


# Requires a gradient, so that what is made from it does.
_anchor = torch.zeros(0, requires_grad=True)


class _Guarded(torch.autograd.Function):
    """Makes absent tensors that no gradient may reach: their real ones would not get it.

    Nothing that is here is computed from them. But an autograd function of the model's own may
    take one, leave its value alone, and have a gradient for it.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, body: Tensor, device: torch.device, source: Source
    ) -> Absent:
        ctx.source = source
        return Absent(body, device, Origin({source}))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise PartitionError(
            f"a gradient is computed for {ctx.source} on a stage that does not have it: an "
            "autograd function between the model's parts takes it without using its value; move "
            "that into a module"
        )
