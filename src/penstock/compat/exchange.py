"""Messages of a manually driven stage, which the caller posts, and inputs from the same rank.

stage 0                               stage 1, on another rank
get_fwd_send_ops(mb)   ──────────►    get_fwd_recv_ops(mb)
get_bwd_recv_ops(mb)   ◄──────────    get_bwd_send_ops(mb)

stage 0                               stage 1, on the same rank
the output of its forward  ──────►    set_local_fwd_input(outputs, mb)
set_local_bwd_input(grads, mb)  ◄─    get_local_bwd_output(mb)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import StageError
from penstock.stage.boundary import BoundarySpec, TensorMeta, describe
from penstock.stage.stage import MicrobatchState, Stage

__all__ = ["ExchangingStage", "ManualState", "Phase"]


class Phase(Enum):
    """The progress of a microbatch."""

    EMPTY = "not run"
    FORWARD = "forward done"
    INPUT_GRAD = "input gradient done"
    DONE = "backward done"


class ManualState(MicrobatchState):
    """The state of one microbatch, with its progress and the last stage's output."""

    def clear(self) -> None:
        """Reset all fields."""
        super().clear()
        self.phase = Phase.EMPTY
        self.output: Any = None


class ExchangingStage(Stage):
    """The base class of ``PipelineStage`` that exchanges tensors with neighbouring stages."""

    has_backward = True
    chunks: int | None = None  # the number of microbatches, once it is set
    group: dist.ProcessGroup | None
    stage_index_to_group_rank: dict[int, int]
    _states: dict[int, ManualState]

    def _state(self, chunk_id: int) -> ManualState:
        if chunk_id < 0 or (self.chunks is not None and chunk_id >= self.chunks):
            bound = "or more" if self.chunks is None else f"to {self.chunks - 1}"
            raise self._error(f"the microbatch is {chunk_id}, expected 0 {bound}")
        return self._states.setdefault(chunk_id, ManualState(chunk_id))

    def _error(self, what: str, state: ManualState | None = None) -> StageError:
        where = "" if state is None else f", microbatch {state.microbatch}"
        return StageError(f"stage {self.stage_index}{where}: {what}")

    def _p2p(self, op: Callable[..., Any], tensors: Sequence[Tensor], offset: int) -> list[Any]:
        """Make operations with the rank of the stage at ``offset`` from this one."""
        if self.group is None:
            raise self._error("messages need a process group: call init_process_group first")
        rank = self.stage_index_to_group_rank[self.stage_index + offset]
        peer = dist.get_global_rank(self.group, rank)
        return [dist.P2POp(op, tensor.contiguous(), peer, self.group) for tensor in tensors]

    def _known(self, spec: BoundarySpec | None, argument: str) -> BoundarySpec:
        if spec is None:
            raise self._error(
                f"shapes are not known yet; pass {argument} to PipelineStage, or let a schedule "
                "run the stage"
            )
        return spec

    # --- messages ----------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives for the microbatch's inputs; empty on the first stage.

        Raises:
            StageError: the input shapes are unknown; pass ``input_args``.
        """
        if self.is_first:
            return []
        state = self._state(fwd_chunk_id)
        state.in_spec = self._known(self.static_inputs or self.inputs_spec, "input_args")
        state.received = _empty(state.in_spec.metas, self.device)
        return self._p2p(dist.irecv, state.received, -1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the microbatch's outputs; empty on the last stage.

        Messages carry no metadata: outputs that share memory here arrive as separate tensors, so
        clone one if the next stage writes into the other.
        """
        if self.is_last:
            return []
        state = self._state(fwd_chunk_id)
        if state.to_send is None:
            raise self._error(
                "nothing to send; run forward_one_chunk() first, and send once", state
            )
        to_send, state.to_send = state.to_send, None
        return self._p2p(dist.isend, to_send, 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives for the gradients of the microbatch's outputs; empty on the last stage."""
        if self.is_last or not self.has_backward:
            return []
        state = self._state(bwd_chunk_id)
        spec = self._known(state.out_spec or self.static_outputs, "output_args")
        state.received_grads = _empty(spec.grad_metas, self.device)
        return self._p2p(dist.irecv, state.received_grads, 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradients of the microbatch's inputs; empty on the first stage.

        A missing gradient is sent as zeros, since the peer waits for a tensor.
        """
        if self.is_first or not self.has_backward:
            return []
        return self._p2p(dist.isend, self.get_local_bwd_output(bwd_chunk_id), -1)

    # --- neighbours on the same rank ---------------------------------------------------------

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Set a microbatch's inputs directly, from the previous stage on the same rank."""
        state = self._state(mb_index)
        state.in_spec = spec = describe(prev_stage_outputs)
        spec.check_static(self.static_inputs, "input")
        state.received = [t.detach() for t in spec.tensors(prev_stage_outputs)]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        """Return, once, the gradients of a microbatch's inputs for the previous stage."""
        state = self._state(mb_index)
        grads, spec = state.grads_to_send, state.in_spec
        if grads is None or spec is None:
            raise self._error(
                "no input gradients; run backward_one_chunk() first, and take them once", state
            )
        state.grads_to_send = None
        pairs = zip(grads, _empty(spec.grad_metas, self.device), strict=True)
        return tuple(empty.zero_() if grad is None else grad for grad, empty in pairs)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Set the gradients of a microbatch's outputs, from the next stage on the same rank."""
        grads = next_stage_bwd_outputs
        if not isinstance(grads, tuple):
            raise self._error(f"gradients come as a tuple, got {type(grads).__name__}")
        self._state(mb_index).received_grads = grads

    def get_outputs_meta(self) -> tuple[Tensor, ...]:
        """The outputs of one microbatch as meta tensors.

        Raises:
            StageError: the output shapes are unknown so far.
        """
        spec = self._known(self.static_outputs or self.outputs_spec, "output_args")
        return tuple(_empty(spec.metas, "meta"))


def _empty(metas: Sequence[TensorMeta], device: Any) -> list[Tensor]:
    # Contiguous regardless of ``meta.order``, since the peer may have only the shapes.
    return [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas]
