"""PipelineStage: a manually split stage, with the API of torch's ``PipelineStage``.

Its methods drive a stage manually, one microbatch at a time:

    for op in stage.get_fwd_recv_ops(mb): ...          # post, wait
    out = stage.forward_one_chunk(mb, args)
    for op in stage.get_fwd_send_ops(mb): ...
    for op in stage.get_bwd_recv_ops(mb): ...
    stage.backward_one_chunk(mb, loss=loss)            # loss on the last stage
    for op in stage.get_bwd_send_ops(mb): ...

Or the caller keeps the graph: ``out = stage.forward_maybe_with_nosync(x)``, and then
``stage.backward_maybe_with_nosync("full", {"stage_output": out, ...})``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from penstock.cause import own_group, publishing_errors
from penstock.compat.backward import stage_backward, stage_backward_input, stage_backward_weight
from penstock.compat.exchange import ExchangingStage, ManualState, Phase
from penstock.errors import StageError
from penstock.parallel.data_parallel import Replicas, replicas_of
from penstock.stage.boundary import describe, static_spec
from penstock.stage.pytree import Args, Kwargs, leaves_in_order, map_tensors
from penstock.stage.stage import MicrobatchState
from penstock.stage.wrappers import unwrapped

__all__ = ["HAND_DRIVEN", "PipelineStage", "PipelineStageInfo", "TracedStage", "build_stage"]

GetMesh = Callable[..., Any]
ForwardContext = Callable[["PipelineStageInfo"], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """A forward of a stage.

    Args:
        stage_index: the stage.
        microbatch_index: the microbatch, or the chunk of a sequence.
        is_metadata_inference: always False: shapes are learned from microbatches.
    """

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


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
            Pass False for a module that takes gradients in its own forward; I then computes all
            gradients. Also settable on the stage.

    Attributes:
        stage_index_to_group_rank: the group rank of each stage, for manual messages. Round-robin
            unless a schedule or the user sets another mapping.
        has_backward: whether manually driven stages compute gradients.

    Raises:
        StageError: the index is out of range, ``submodule`` is not a module, or this process is not
            in the group.
        BoundaryError: static gradients do not match static values.

    Examples:
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
        self._replicas: Replicas | None = None  # None between manual steps
        self._reduces = False  # True if the backward that completes the step reduces
        self._states = {}
        self.log_prefix = f"[Stage {self.stage_index}]"  # as in torch
        self._forward_contexts: OrderedDict[int, ForwardContext] = OrderedDict()

    # --- the context of forwards -------------------------------------------------------------

    def register_forward_context(self, context_factory: ForwardContext) -> RemovableHandle:
        """Run every forward of a microbatch, recomputed or not, in a context of one's own.

        Args:
            context_factory: called with a ``PipelineStageInfo``; returns a context manager, which
                may not suppress exceptions.

        Returns:
            A handle whose ``remove()`` ends it.

        Raises:
            StageError: the stage has a context already.
        """
        if self._forward_contexts:
            raise self._error("it has a forward context already; remove() its handle first")
        handle = RemovableHandle(self._forward_contexts)
        self._forward_contexts[handle.id] = context_factory
        return handle

    def forward(self, state: MicrobatchState, args: Args, kwargs: Kwargs, *, defer: bool) -> Any:
        """Run the module, in the registered context if there is one."""
        if not self._forward_contexts:
            return super().forward(state, args, kwargs, defer=defer)
        (context_factory,) = self._forward_contexts.values()
        info = PipelineStageInfo(stage_index=self.stage_index, microbatch_index=state.microbatch)
        with context_factory(info):
            return super().forward(state, args, kwargs, defer=defer)
        raise self._error("its forward context suppressed an exception of the module")

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
            tensors, state.received = state.received, None
            if tensors is None or state.in_spec is None:
                raise self._error(
                    "no input has come; run get_fwd_recv_ops() or set_local_fwd_input() first",
                    state,
                )
            args = self.enter(state, tensors, state.in_spec)
        trains = self._begin()
        output = self.forward(state, args, kwargs or {}, defer=trains)
        state.phase = Phase.FORWARD if trains else Phase.EMPTY
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
        state = self._state_after(Phase.FORWARD, bwd_chunk_id, "a backward")
        grads = self._output_grads(state, loss)
        (self.backward if full_backward else self.input_grad)(state, grads)
        state.phase = Phase.DONE if full_backward else Phase.INPUT_GRAD
        self._reduce_if_done(last_backward)

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
                "no gradient has come; run get_bwd_recv_ops() or set_local_bwd_input() first", state
            )
        state.received_grads = None
        if len(grads) != len(state.roots):
            raise self._error(
                f"{len(grads)} gradients have come, expected {len(state.roots)}: one, or None, for "
                "each of the outputs that take a gradient",
                state,
            )
        return grads

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients deferred by ``backward_one_chunk(full_backward=False)``.

        Args: those of ``backward_one_chunk``. A no-op without ``has_backward``.

        Raises:
            StageError: its input gradients have not run, or its weight gradients have already run.
        """
        if not self.has_backward:
            return
        state = self._state_after(Phase.INPUT_GRAD, bwd_chunk_id, "a weight gradient")
        self.weight_grad(state)
        state.phase = Phase.DONE
        self._reduce_if_done(last_backward)

    def _reduce_if_done(self, last_backward: bool) -> None:
        """After a backward: reduce replicas, if requested, after the step's last microbatch."""
        if self._replicas is not None:
            self._replicas.end_weight_grad()
        self._reduces |= last_backward
        phases = {state.phase for state in self._states.values()}
        if self._reduces and phases <= {Phase.EMPTY, Phase.DONE}:
            self._end_step(reduce=True)

    def _state_after(self, phase: Phase, chunk_id: int, requested: str) -> ManualState:
        state = self._state(chunk_id)
        if state.phase is not phase:
            raise self._error(
                f"{requested} is requested, which comes after '{phase.value}', but this "
                f"microbatch is at '{state.phase.value}'",
                state,
            )
        return state

    # --- through a graph ---------------------------------------------------------------------

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradient reduction by a data-parallel wrapper.

        Weight gradients are not deferred. Run the backward by ``backward_maybe_with_nosync``.
        """
        self._begin()
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
            StageError: ``backward_type`` is unknown, an argument is missing, or
                ``forward_one_chunk`` has deferred weight gradients.
        """
        arguments = _arguments(backward_type, bwd_kwargs)
        for state in self._states.values():
            if state.phase is Phase.FORWARD and state.work is not None:
                raise self._error(
                    "forward_one_chunk() has deferred its weight gradients, so that the graph does "
                    "not lead to them; run backward_one_chunk(), or pass defers_weights=False to "
                    "PipelineStage",
                    state,
                )
        groups: list[dict[str, Any]] | None = None
        replicas = self._begin_step()
        if backward_type == "weight":
            grads = stage_backward_weight(self.submod.parameters(), *arguments)
        # The graph of sharded parameters does not lead to the registered parameters.
        elif backward_type == "full" or replicas.sharded:
            grads = stage_backward(*arguments)
            groups = [] if backward_type == "input" else None
        else:
            output, received, inputs = arguments
            grads, groups = stage_backward_input(output, received, inputs, self.submod.parameters())
        self._reduces |= last_backward
        if self._reduces and backward_type != "input":
            self._end_step(reduce=True)
        return grads, groups

    # --- replicas ----------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Begin a manual step, unless one has begun; True if it computes gradients."""
        trains = self.has_backward and torch.is_grad_enabled()
        if trains:
            self._begin_step()
        return trains

    def _begin_step(self) -> Replicas:
        """Suspend reductions, unless the manual step has begun."""
        if self._replicas is None:
            self._replicas = replicas_of(self.submod) or Replicas()
            self._replicas.begin()
            self._replicas.share_buffers()
        return self._replicas

    def _end_step(self, *, reduce: bool) -> None:
        """End the manual step, if one has begun, and average its gradients if requested."""
        replicas, self._replicas, self._reduces = self._replicas or Replicas(), None, False
        try:
            if reduce:
                replicas.start_reduction()
                replicas.wait()
        finally:
            replicas.end()

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
        self.start_gradient_reduction()
        self.wait_for_gradient_reduction(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Average the gradients as ``perform_reduce_grad`` does, without scaling."""
        self._end_step(reduce=True)

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Scale the gradients after ``start_gradient_reduction``."""
        self.scale_grads(grad_scale_factor)

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """No effect: ``get_fwd_send_ops`` gives up the outputs of a microbatch."""

    def clear_runtime_states(self) -> None:
        """Clear all microbatch states and abort an unfinished manual step."""
        self._states.clear()
        self._end_step(reduce=False)


# The methods that no schedule calls.
HAND_DRIVEN = tuple(
    name
    for name, value in {**vars(ExchangingStage), **vars(PipelineStage)}.items()
    if isfunction(value) and name[0] != "_" and name not in ("forward", "register_forward_context")
)

_OF_GRAPH = ("stage_output", "output_grads", "input_values")
_ARGUMENTS = {"full": _OF_GRAPH, "input": _OF_GRAPH, "weight": ("param_groups",)}


def _arguments(backward_type: str, bwd_kwargs: dict[str, Any]) -> list[Any]:
    if backward_type not in _ARGUMENTS:
        raise StageError(f"backward type {backward_type!r}: expected 'full', 'input' or 'weight'")
    try:
        return [bwd_kwargs[name] for name in _ARGUMENTS[backward_type]]
    except KeyError as missing:
        raise StageError(
            f"a backward of type {backward_type!r} takes {missing}, but was given "
            f"{sorted(bwd_kwargs)}"
        ) from None


# --- traced models -------------------------------------------------------------------------------


class TracedStage(PipelineStage):
    """The ``PipelineStage`` of a traced model, with the graph of all stages.

    Any rank may pass the model's own keyword arguments. A later stage uses those that the first
    stage was called without.

    Args:
        stage_module: the stage's module, from ``Pipe.get_stage_module``.
        stage_index: the stage's index, from 0.
        pipe_info: ``Pipe.info()``, a ``penstock.PipeInfo``.
        device: the device of the module.
        group: the pipeline's process group; the default group if None.
    """

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: Any,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group=group)
        self.pipe_info = pipe_info
        self.ties = pipe_info.shared
        nodes = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
        self._stage_names = {str(node.target): i for i, node in enumerate(nodes)}
        self.name = nodes[stage_index].name

    def forward(self, state: MicrobatchState, args: Args, kwargs: Kwargs, *, defer: bool) -> Any:
        """Run the module. The model's output is its tensor, or a tuple of its tensors."""
        output = super().forward(state, args, kwargs, defer=defer)
        if self.is_last:
            tensors = [leaf for leaf in leaves_in_order(output) if isinstance(leaf, Tensor)]
            return tuple(tensors) if len(tensors) > 1 else tensors[0] if tensors else output
        return output

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """Look up a stage's index by its name in the pipe's graph, such as ``"submod_pp_0"``.

        Raises:
            StageError: no stage has this name.
        """
        if submod_name not in self._stage_names:
            raise StageError(
                f"no stage is called {submod_name!r}; the pipe's stages are "
                f"{list(self._stage_names)}"
            )
        return self._stage_names[submod_name]

    def find_dst_rank(self, user: fx.Node) -> int | None:
        """The group rank of the stage of a node of ``Pipe.info().graph``; None without one."""
        if user.op != "call_module":
            return None
        return self.stage_index_to_group_rank[self.get_stage_index_of_submod(str(user.target))]


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> TracedStage:
    """Make a ``TracedStage``, with its arguments; the module, wrapped or not, is moved."""
    return TracedStage(stage_module.to(device), stage_index, pipe_info, device, group)
