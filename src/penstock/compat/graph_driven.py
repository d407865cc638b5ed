"""The part of a stage driven by hand that knows no microbatch: a call, and a backward through it.

    out = stage.forward_maybe_with_nosync(x)
    stage.backward_maybe_with_nosync("full", {"stage_output": out, "output_grads": grads,
                                              "input_values": [x]})

Whoever calls them keeps the graph in between; data-parallel wrappers reduce nothing on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.compat.exchange import ExchangingStage
from penstock.errors import StageError
from penstock.parallel.replica_step import ReplicaStep
from penstock.stage.backward import stage_backward, stage_backward_input, stage_backward_weight
from penstock.stage.microbatch_state import Phase

__all__ = ["GraphDrivenStage"]

# What a backward through a graph takes.
_GRAPH = ("stage_output", "output_grads", "input_values")


class GraphDrivenStage(ExchangingStage):
    """This part of ``PipelineStage``, whose constructor sets what it needs."""

    _replica_step: ReplicaStep

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, without a reduction of gradients by a data-parallel wrapper.

        Its weight gradients are not put off: ``backward_maybe_with_nosync`` goes with it.
        """
        if self.has_backward and torch.is_grad_enabled():
            self._replica_step.begin(self.submod)
        with self._no_sync():
            return self.submod(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Sequence[Tensor | None], list[dict[str, Any]] | None]:
        """Run a backward through a graph, such as ``forward_maybe_with_nosync`` leaves behind.

        A data-parallel wrapper reduces no gradients in it.

        Args:
            backward_type: ``"full"``, ``"input"`` or ``"weight"``, as ``stage_backward``,
                ``stage_backward_input`` and ``stage_backward_weight`` do. Where parameters are
                sharded, ``"input"`` computes all and leaves nothing to ``"weight"``.
            bwd_kwargs: what these take: ``stage_output`` (the outputs, or the loss),
                ``output_grads`` and ``input_values``; for the weights ``param_groups``.
            last_backward: whether the step's gradients are complete with this backward, or with
                the weight gradients that it leaves: then replicas are reduced.

        Returns:
            The gradients of the inputs (of the weights, where those are asked for); and, of the
            input gradient, the groups of weights that are left.

        Raises:
            StageError: there is no such backward, or something that it takes is missing; or an
                input gradient is asked for where a microbatch went ``forward_one_chunk``, and
                weight gradients have been put off.
        """
        if backward_type == "input":
            self._refuse_deferred()
        take = partial(_taken, backward_type, bwd_kwargs)
        self._replica_step.begin(self.submod)
        groups: list[dict[str, Any]] | None = None
        with self._no_sync():
            match backward_type:
                case "full":
                    grads = stage_backward(*map(take, _GRAPH))
                case "input" if self._replica_step.is_sharded:
                    # The graph's weights can't be told from the module's parameters.
                    grads, groups = stage_backward(*map(take, _GRAPH)), []
                case "input":
                    output, output_grads, values = map(take, _GRAPH)
                    outputs = (output,) if isinstance(output, Tensor) else output
                    weights = self.submod.parameters()
                    grads, groups = stage_backward_input(outputs, output_grads, values, weights)
                case "weight":
                    grads = stage_backward_weight(self.submod.parameters(), take("param_groups"))
                case _:
                    raise StageError(
                        f"backward type {backward_type!r}: expected 'full', 'input' or 'weight'"
                    )
        self._replica_step.due |= last_backward
        if backward_type != "input":
            self._hand_over()
            if self._replica_step.due:
                self._replica_step.end(reduce=True)
        return grads, groups

    def _refuse_deferred(self) -> None:
        """Refuse to split along the graph what ``forward_one_chunk`` has split by operation."""
        for state in self._states.values():
            if state.phase is Phase.FORWARD and state.work is not None:
                raise StageError(
                    f"stage {self.stage_index}, microbatch {state.microbatch}: forward_one_chunk() "
                    "has put its weight gradients off, so that the graph does not lead to them; "
                    "run backward_one_chunk(full_backward=False), or pass defers_weights=False to "
                    "PipelineStage"
                )

    def _hand_over(self) -> None:
        """Weight gradients that ``forward_one_chunk`` put off, where a backward came by since."""
        for state in self._states.values():
            work = state.work if state.phase is Phase.FORWARD else None
            if work is not None and work.is_reached:
                self.weight_grad(state)
                state.phase = Phase.DONE

    def _no_sync(self) -> Any:
        no_sync = getattr(self.submod, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()


def _taken(backward_type: str, bwd_kwargs: dict[str, Any], name: str) -> Any:
    if name not in bwd_kwargs:
        raise StageError(
            f"a backward of type {backward_type!r} takes {name!r}, but was given "
            f"{sorted(bwd_kwargs)}"
        )
    return bwd_kwargs[name]
