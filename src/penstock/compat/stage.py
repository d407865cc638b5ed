"""PipelineStage: a manually split stage, with the API of torch's ``PipelineStage``.

Its methods drive a stage manually, one microbatch at a time.

    for op in stage.get_fwd_recv_ops(mb): ...          # post, wait
    out = stage.forward_one_chunk(mb, args)
    for op in stage.get_fwd_send_ops(mb): ...
    for op in stage.get_bwd_recv_ops(mb): ...
    stage.backward_one_chunk(mb, loss=loss)            # loss on the last stage
    for op in stage.get_bwd_send_ops(mb): ...

Without microbatches, the caller keeps the graph:

    out = stage.forward_maybe_with_nosync(x)
    stage.backward_maybe_with_nosync("full", {"stage_output": out, "output_grads": grads,
                                              "input_values": [x]})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.cause import own_group, publishing_errors
from penstock.compat.backward import full_backward, input_backward, weight_backward
from penstock.compat.exchange import ExchangingStage, ManualState, Phase
from penstock.compat.torch_names import OF_STAGE, no_attribute
from penstock.errors import StageError
from penstock.parallel.data_parallel import ReplicaStep
from penstock.stage.boundary import describe, static_spec
from penstock.stage.pytree import map_tensors
from penstock.stage.wrappers import unwrapped

__all__ = ["PipelineStage"]

GetMesh = Callable[..., Any]


class PipelineStage(ExchangingStage):
    """A stage of a manually split model.

    Args:
        submodule: this stage's module. Its arguments are the output of the previous stage (the
            items of a tuple or list as positional arguments) and the step's keyword arguments.
        stage_index: its index in the model, from 0.
        num_stages: the number of stages of the model.
        device: the device of the module.
        input_args, output_args: example inputs and outputs of one microbatch, to check shapes and
            dtypes. If None, shapes are inferred from the first microbatch.
        input_grads, output_grads: example gradients of these; None where there is no gradient.
        group: the pipeline's process group; the default group if None.
        dw_builder: called after each backward; returns a callable that computes the weight
            gradients. For modules that split their backward themselves.
        get_mesh: called with the dimension names of a mesh, and None, when a DTensor is received;
            returns this rank's mesh with these dimensions. If None, the mesh is taken from a
            parameter of the module.
        defers_weights: whether I defers weight gradients to W in schedules that split the backward.
            Pass False for a module that differentiates with respect to its parameters in its own
            forward; I then computes all gradients. Also settable on the stage.

    Attributes:
        stage_index_to_group_rank: the group rank of each stage, for manual messages. Round-robin
            unless a schedule or the user sets another mapping.
        has_backward: whether manually driven stages compute gradients.

    Raises:
        StageError: the index is out of range, ``submodule`` is not a module, or this process is not
            in the group.
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
        with publishing_errors(group):
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
        # Parameters that several stages share, by stage and name; set when the model is split.
        self.ties: Sequence[Mapping[int, str]] = getattr(unwrapped(submodule), "ties_of_stages", ())
        self.group = group
        self.group_rank: int = group.rank() if group is not None else 0
        self.group_size: int = group.size() if group is not None else 1
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(self.num_stages)}
        self._replica_step = ReplicaStep()
        self._states = {}

    # --- by microbatch -----------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one microbatch.

        Args:
            fwd_chunk_id: the microbatch.
            args: positional arguments of the first stage. The inputs of later stages come from
                ``get_fwd_recv_ops`` or ``set_local_fwd_input``.
            kwargs: keyword arguments.
            save_forward_output: whether ``output_chunks`` keeps the last stage's output.

        Returns:
            The module's output.
        """
        state = self._state(fwd_chunk_id)
        if not self.is_first:
            if state.received is None or state.in_spec is None:
                raise self._error(
                    state,
                    "no input has come; run get_fwd_recv_ops() or set_local_fwd_input() first",
                )
            tensors, state.received = state.received, None
            args = self.enter(state, tensors, state.in_spec)
        defer = self._begin()
        output = self.forward(state, args, kwargs or {}, defer=defer)
        state.phase = Phase.FORWARD
        if self.is_last:
            state.output = output if save_forward_output else None
        else:
            self.leave(state, output, self.static_outputs or describe(output))
        return output

    @property
    def output_chunks(self) -> list[Any]:
        """The last stage's outputs by microbatch, for manually run forwards."""
        states = sorted(self._states.items())
        return [state.output for _, state in states if state.output is not None]

    @property
    def log_prefix(self) -> str:
        """The stage's name in torch's log."""
        return f"[Stage {self.stage_index}]"

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of one microbatch; a no-op without ``has_backward``.

        Args:
            bwd_chunk_id: the microbatch.
            loss: the microbatch's loss, on the last stage.
            full_backward: False leaves the weight gradients to ``backward_weight_one_chunk``.
            last_backward: whether no further forward follows in the step. The backward that
                completes all gradients then reduces those of replicas (DDP, FSDP2); else call
                ``perform_reduce_grad``.

        Raises:
            StageError: the forward has not run, or the backward has already run.
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
        if deferred:
            self.weight_grad(state)
        self._finish(state, last_backward)

    def _output_grads(self, state: ManualState, loss: Tensor | None) -> Sequence[Tensor | None]:
        if self.is_last:
            if loss is None:
                raise StageError(f"stage {self.stage_index} is the last one: pass its loss")
            state.roots = (get_gradient_edge(loss),)
            state.output = map_tensors(Tensor.detach, state.output)
            return (torch.ones_like(loss),)
        grads: Sequence[Tensor | None] | None = state.received_grads
        if grads is None:
            raise self._error(
                state, "no gradient has come; run get_bwd_recv_ops() or set_local_bwd_input() first"
            )
        state.received_grads = None
        if len(grads) != len(state.roots):
            raise self._error(
                state,
                f"{len(grads)} gradients have come, expected {len(state.roots)}: one, or None, for "
                "each of the outputs that take a gradient",
            )
        return grads

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients deferred by ``backward_one_chunk(full_backward=False)``.

        Args: those of ``backward_one_chunk``. A no-op without ``has_backward``.

        Raises:
            StageError: the input gradients of this microbatch have not run, or its weight
                gradients have already run.
        """
        if not self.has_backward:
            return
        state = self._state(bwd_chunk_id)
        self._expect_phase(state, Phase.INPUT_GRAD, "a weight gradient")
        self.weight_grad(state)
        self._finish(state, last_backward)

    def _finish(self, state: ManualState, last_backward: bool) -> None:
        """Mark a microbatch as done; after the step's last one, reduce replicas if requested."""
        state.phase = Phase.DONE
        self._replica_step.due |= last_backward
        in_flight = (Phase.FORWARD, Phase.INPUT_GRAD)
        if self._replica_step.due and not any(s.phase in in_flight for s in self._states.values()):
            self._replica_step.end(reduce=True)

    def _expect_phase(self, state: ManualState, expected: Phase, requested: str) -> None:
        if state.phase is not expected:
            raise self._error(
                state,
                f"{requested} is requested, which comes after '{expected.value}', but this "
                f"microbatch is at '{state.phase.value}'",
            )

    # --- through a graph ---------------------------------------------------------------------

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradient reduction by a data-parallel wrapper.

        Weight gradients are not deferred. Run the backward by ``backward_maybe_with_nosync``.
        """
        self._begin()
        with self._no_sync():
            return self.submod(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Sequence[Tensor | None], list[dict[str, Any]] | None]:
        """Run a backward through a graph, such as that of ``forward_maybe_with_nosync``.

        Data-parallel wrappers do not reduce gradients during this backward.

        Args:
            backward_type: ``"full"``, ``"input"`` or ``"weight"``. ``"input"`` computes all
                gradients, and holds back the weights' (but sharded ones) for ``"weight"``.
            bwd_kwargs: ``stage_output`` (the outputs, or the loss), ``output_grads`` and
                ``input_values``; for ``"weight"`` the ``param_groups`` that ``"input"`` returned.
            last_backward: whether this backward, with its weight gradients, completes the step's
                gradients; those of replicas are then reduced.

        Returns:
            The gradients of the inputs (of the weights for ``"weight"``); for ``"input"`` also the
            parameter groups.

        Raises:
            StageError: ``backward_type`` is unknown, an argument is missing, or ``"input"`` is
                requested although ``forward_one_chunk`` has deferred weight gradients.
        """
        arguments = _arguments(backward_type, bwd_kwargs)
        if backward_type == "input" and (deferred := self._deferred()):
            raise self._error(
                deferred[0],
                "forward_one_chunk() has deferred its weight gradients, so that the graph does not "
                "lead to them; run backward_one_chunk(full_backward=False), or pass "
                "defers_weights=False to PipelineStage",
            )
        groups: list[dict[str, Any]] | None = None
        self._replica_step.begin(self.submod)
        with self._no_sync():
            if backward_type == "weight":
                grads = weight_backward(self.submod.parameters(), *arguments)
            # The graph of sharded parameters does not lead to the registered parameters.
            elif backward_type == "full" or self._replica_step.is_sharded:
                grads = full_backward(*arguments)
                groups = [] if backward_type == "input" else None
            else:
                output, received, inputs = arguments
                grads, groups = input_backward(output, received, inputs, self.submod.parameters())
        self._replica_step.due |= last_backward
        if backward_type != "input":
            for state in self._deferred():
                if state.work.is_reached:  # by this backward
                    work, state.work = state.work, None
                    work.accumulate()
                    state.phase = Phase.DONE
            if self._replica_step.due:
                self._replica_step.end(reduce=True)
        return grads, groups

    def _deferred(self) -> list[ManualState]:
        """The microbatches whose forward has deferred weight gradients, before their backward."""
        states = self._states.values()
        return [s for s in states if s.phase is Phase.FORWARD and s.work is not None]

    # --- replicas ----------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Begin a manual step, unless one has begun; True if it computes gradients."""
        trains = self.has_backward and torch.is_grad_enabled()
        if trains:
            self._replica_step.begin(self.submod)
        return trains

    def _no_sync(self) -> Any:
        no_sync = getattr(self.submod, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide every gradient of the module by ``grad_scale_factor``."""
        if grad_scale_factor != 1:
            for param in self.submod.parameters():
                if param.grad is not None:
                    param.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Average the gradients over the replicas, unless ``last_backward=True`` has, and scale.

        Call it once after a step's last backward. ``scale_grads`` divides by the factor.
        """
        self._replica_step.end(reduce=True)
        self.scale_grads(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Clear all microbatch states and abort an unfinished manual step."""
        self._states.clear()
        self._replica_step.end(reduce=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise no_attribute(self, name, OF_STAGE)


_OF_GRAPH = ("stage_output", "output_grads", "input_values")
_ARGUMENTS = {"full": _OF_GRAPH, "input": _OF_GRAPH, "weight": ("param_groups",)}


def _arguments(backward_type: str, bwd_kwargs: dict[str, Any]) -> list[Any]:
    if backward_type not in _ARGUMENTS:
        raise StageError(f"backward type {backward_type!r}: expected 'full', 'input' or 'weight'")
    for name in _ARGUMENTS[backward_type]:
        if name not in bwd_kwargs:
            raise StageError(
                f"a backward of type {backward_type!r} takes {name!r}, but was given "
                f"{sorted(bwd_kwargs)}"
            )
    return [bwd_kwargs[name] for name in _ARGUMENTS[backward_type]]
