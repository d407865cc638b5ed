"""PipelineStage: a stage that the user cut by hand, with the API of torch's class of that name.

A schedule drives a stage through ``Stage``'s methods. Those here are for people who drive one by
hand, microbatch by microbatch; what it exchanges with its neighbours stands in ``exchange.py``,
and what runs without microbatches in ``graph_driven.py``.

    for op in stage.get_fwd_recv_ops(mb): ...          # post, wait
    out = stage.forward_one_chunk(mb, args)
    for op in stage.get_fwd_send_ops(mb): ...
    for op in stage.get_bwd_recv_ops(mb): ...
    stage.backward_one_chunk(mb, loss=loss)            # loss on the last stage
    for op in stage.get_bwd_send_ops(mb): ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.compat.announcing import announced, own_group
from penstock.compat.graph_driven import GraphDrivenStage
from penstock.compat.torch_names import OF_STAGE, no_attribute
from penstock.errors import StageError
from penstock.parallel.replica_step import ReplicaStep
from penstock.stage.boundary import describe, static_spec
from penstock.stage.microbatch_state import MicrobatchState, Phase
from penstock.stage.pytree import map_tensors
from penstock.stage.wrappers import unwrapped

__all__ = ["PipelineStage"]

GetMesh = Callable[..., Any]


class PipelineStage(GraphDrivenStage):
    """A stage of a model that was cut by hand.

    Args:
        submodule: this stage's module. It is called with what the stage before returned (the
            items of a tuple or list as positional arguments), plus the step's keyword arguments.
        stage_index: its place, from 0.
        num_stages: number of stages in all.
        device: where the module lives.
        input_args: example inputs of one microbatch (shapes and dtypes count, values do not).
            Optional: shapes are learned from the first microbatch; if given, they are held to.
        output_args: example outputs, likewise.
        output_grads: example gradients of the outputs; None where an output takes none.
        input_grads: example gradients of the inputs; None where an input takes none.
        group: the pipeline's process group; the default group if None.
        dw_builder: makes, after each backward, a callable that computes the weight gradients,
            for modules that split their backward by themselves.
        get_mesh: called with the names of a mesh's dimensions, and None, where a DTensor comes
            from the stage before; returns this rank's mesh of these names. If None, it is the
            mesh with such dimensions over which a parameter of the module is spread.
        defers_weights: whether the input gradient I leaves weight gradients to W, in schedules
            that split the backward. False, for a module that differentiates with respect to its
            parameters in its own forward: I computes all. It may be set on the stage, too.

    Attributes:
        stage_index_to_group_rank: which rank of the group holds which stage, for messages by
            hand. Ranks hold stages in turn unless a schedule, or you, says otherwise.

    Raises:
        StageError: the index is out of range, the module is none, or this process is not in the
            group.
        BoundaryError: static gradients do not match static values.

    Example:
        >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
        >>> stage.forward_one_chunk(0, (torch.ones(2, 4),)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensor | Sequence[Tensor] | None = None,
        output_args: Tensor | Sequence[Tensor] | None = None,
        output_grads: Tensor | Sequence[Tensor | None] | None = None,
        input_grads: Tensor | Sequence[Tensor | None] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: GetMesh | None = None,
        *,
        defers_weights: bool = True,
    ) -> None:
        group = own_group(group)
        with announced(group):
            super().__init__(
                submodule,
                stage_index,
                num_stages,
                device,
                dw_builder=dw_builder,
                defers_weights=defers_weights,
            )
            self.static_inputs = static_spec(input_args, input_grads, "input", stage_index)
            self.static_outputs = static_spec(output_args, output_grads, "output", stage_index)
        self.get_mesh = get_mesh
        # The parameters that several stages share, by stage and name, where that is known: whoever
        # has cut a model tells the modules that it has made.
        self.ties: Sequence[Mapping[int, str]] = getattr(unwrapped(submodule), "ties_of_stages", ())
        self.group = group
        self.group_rank: int = group.rank() if group is not None else 0
        self.group_size: int = group.size() if group is not None else 1
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(self.num_stages)}
        self.has_backward = True
        self.chunks: int | None = None
        self._states: dict[int, MicrobatchState] = {}
        self._replica_step = ReplicaStep()

    # --- driven by hand ----------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one microbatch forward.

        Args:
            fwd_chunk_id: the microbatch.
            args: positional arguments of the first stage; ignored on later ones, which take
                what was received (``get_fwd_recv_ops``) or set (``set_local_fwd_input``).
            kwargs: keyword arguments.
            save_forward_output: whether ``output_chunks`` keeps the last stage's output. What is
                sent on is never kept.

        Returns:
            What the module returned.
        """
        state = self._state(fwd_chunk_id)
        if not self.is_first:
            args = self._received_args(state)
        defer = self.has_backward and torch.is_grad_enabled()
        if defer:
            self._replica_step.begin(self.submod)
        output = self.forward(state, args, kwargs or {}, defer=defer)
        state.phase = Phase.FORWARD
        if self.is_last:
            state.output = output if save_forward_output else None
        else:
            self.leave(state, output, self.static_outputs or describe(output))
        return output

    @property
    def output_chunks(self) -> list[Any]:
        """The last stage's outputs by microbatch, of forwards that were run by hand."""
        states = sorted(self._states.items())
        return [state.output for _, state in states if state.output is not None]

    @property
    def log_prefix(self) -> str:
        """How torch names a stage in its log."""
        return f"[Stage {self.stage_index}]"

    def _received_args(self, state: MicrobatchState) -> tuple[Any, ...]:
        if state.received is None:
            raise StageError(
                f"stage {self.stage_index}, microbatch {state.microbatch}: no input has come; run "
                "get_fwd_recv_ops() or set_local_fwd_input() first"
            )
        tensors, state.received = state.received, None
        spec = state.in_spec
        assert spec is not None
        return self.enter(state, tensors, spec)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run one microbatch backward; without ``has_backward`` nothing is done.

        Args:
            bwd_chunk_id: the microbatch.
            loss: its loss, on the last stage.
            full_backward: False leaves the weight gradients to ``backward_weight_one_chunk``.
            last_backward: whether the step's gradients are complete when all microbatches that
                went forward have been backward: then replicas (DDP, FSDP2) are reduced, by the
                backward that completes them. ``perform_reduce_grad`` does it otherwise.

        Raises:
            StageError: the forward has not run, or the backward has run already.
        """
        if not self.has_backward:
            return
        state = self._state(bwd_chunk_id)
        self._expect_phase(state, Phase.FORWARD, "a backward")
        grads = self._output_grads(state, loss)
        deferred = state.work is not None
        with self._no_sync():
            if full_backward and not deferred:
                self.backward(state, grads)
            else:
                self.input_grad(state, grads)
        if not full_backward:
            state.phase = Phase.INPUT_GRAD
            self._replica_step.due |= last_backward
            return
        if deferred:  # nothing is lost: W follows at once
            self.weight_grad(state)
        self._finish(state, last_backward)

    def _output_grads(self, state: MicrobatchState, loss: Tensor | None) -> Sequence[Tensor | None]:
        if not self.is_last:
            if state.received_grads is None:
                raise StageError(
                    f"stage {self.stage_index}, microbatch {state.microbatch}: no gradient has "
                    "come; run get_bwd_recv_ops() or set_local_bwd_input() first"
                )
            grads: Sequence[Tensor | None] = state.received_grads
            state.received_grads = None
            if len(grads) != len(state.roots):
                raise StageError(
                    f"stage {self.stage_index}, microbatch {state.microbatch}: {len(grads)} "
                    f"gradients have come, expected {len(state.roots)}: one, or None, for each of "
                    "the outputs that take a gradient"
                )
            return grads
        if loss is None:
            raise StageError(f"stage {self.stage_index} is the last one: pass its loss")
        state.roots = (get_gradient_edge(loss),)
        state.output = map_tensors(Tensor.detach, state.output)
        return (torch.ones_like(loss),)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients that ``backward_one_chunk(full_backward=False)`` left;
        without ``has_backward`` nothing is done.

        Args:
            bwd_chunk_id: the microbatch.
            last_backward: see ``backward_one_chunk``.

        Raises:
            StageError: that has not run for this microbatch, or its weights are done already.
        """
        if not self.has_backward:
            return
        state = self._state(bwd_chunk_id)
        self._expect_phase(state, Phase.INPUT_GRAD, "a weight gradient")
        self.weight_grad(state)
        self._finish(state, last_backward)

    def _finish(self, state: MicrobatchState, last_backward: bool) -> None:
        """Note that a microbatch is through; the last one may have to reduce replicas."""
        state.phase = Phase.DONE
        self._replica_step.due |= last_backward
        under_way = (Phase.FORWARD, Phase.INPUT_GRAD)
        if self._replica_step.due and not any(s.phase in under_way for s in self._states.values()):
            self._replica_step.end(reduce=True)

    def _expect_phase(self, state: MicrobatchState, expected: Phase, asked: str) -> None:
        if state.phase is not expected:
            raise StageError(
                f"stage {self.stage_index}, microbatch {state.microbatch}: {asked} is asked for, "
                f"which comes after '{expected.value}', but this microbatch is at "
                f"'{state.phase.value}'"
            )

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide every gradient of the module by ``grad_scale_factor``."""
        if grad_scale_factor != 1:
            for param in self.submod.parameters():
                if param.grad is not None:
                    param.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Average the gradients over the module's replicas, once after a step's last backward.

        Where a backward with ``last_backward=True`` has done so already, they are left alone.

        Args:
            grad_scale_factor: what to divide the gradients by, too (see ``scale_grads``).
        """
        self._replica_step.end(reduce=True)
        self.scale_grads(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Forget all microbatches, and a step driven by hand that is not over."""
        self._states.clear()
        self._replica_step.end(reduce=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise no_attribute(self, name, OF_STAGE)
