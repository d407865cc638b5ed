"""PipelineStage: a stage that the user cut by hand, with the API of torch's class of that name.

A schedule drives a stage through the methods of ``Stage``. The methods here drive one by hand,
microbatch by microbatch; ``exchange.py`` has those for messages.

    for op in stage.get_fwd_recv_ops(mb): ...          # post, wait
    out = stage.forward_one_chunk(mb, args)
    for op in stage.get_fwd_send_ops(mb): ...
    for op in stage.get_bwd_recv_ops(mb): ...
    stage.backward_one_chunk(mb, loss=loss)            # loss on the last stage
    for op in stage.get_bwd_send_ops(mb): ...

or without microbatches, while the caller keeps the graph:

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
from penstock.compat.exchange import ExchangingStage
from penstock.compat.torch_names import OF_STAGE, no_attribute
from penstock.errors import StageError
from penstock.parallel.data_parallel import ReplicaStep
from penstock.stage.boundary import describe, static_spec
from penstock.stage.microbatch_state import MicrobatchState, Phase
from penstock.stage.pytree import map_tensors
from penstock.stage.wrappers import unwrapped

__all__ = ["PipelineStage"]

GetMesh = Callable[..., Any]


class PipelineStage(ExchangingStage):
    """A stage of a model that was cut by hand.

    Args:
        submodule: this stage's module. It is called with the output of the previous stage (the
            items of a tuple or list as positional arguments) and the step's keyword arguments.
        stage_index: its index in the model, from 0.
        num_stages: the number of stages of the model.
        device: the device of the module.
        input_args: example inputs of one microbatch (shapes and dtypes count, values do not).
            Optional: shapes are learned from the first microbatch; if given, they are checked.
        output_args: example outputs, likewise.
        output_grads: example gradients of the outputs; None where an output takes none.
        input_grads: example gradients of the inputs; None where an input takes none.
        group: the pipeline's process group; the default group if None.
        dw_builder: makes, after each backward, a callable that computes the weight gradients,
            for modules that split their backward by themselves.
        get_mesh: called with the names of a mesh's dimensions, and None, when a DTensor is
            received; returns this rank's mesh of these names. If None, it is the mesh with such
            dimensions of a parameter of the module.
        defers_weights: whether the input gradient I defers weight gradients to W, in schedules
            that split the backward. False, for a module that differentiates with respect to its
            parameters in its own forward: I computes all. It may be set on the stage, too.

    Attributes:
        stage_index_to_group_rank: the rank of each stage in the group, for messages by hand:
            stages in turn, unless a schedule, or you, says otherwise.
        has_backward: whether stages driven by hand compute gradients.

    Raises:
        StageError: the index is out of range, ``submodule`` is no module, or this process is not
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
        # Parameters that several stages share, by stage and name, told by the cut of the model.
        self.ties: Sequence[Mapping[int, str]] = getattr(unwrapped(submodule), "ties_of_stages", ())
        self.group = group
        self.group_rank: int = group.rank() if group is not None else 0
        self.group_size: int = group.size() if group is not None else 1
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(self.num_stages)}
        self._replica_step = ReplicaStep()

    # --- by microbatch -----------------------------------------------------------------------

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
                received inputs (``get_fwd_recv_ops``) or set ones (``set_local_fwd_input``).
            kwargs: keyword arguments.
            save_forward_output: whether ``output_chunks`` keeps the last stage's output. Outputs
                that are sent are never kept.

        Returns:
            The module's output.
        """
        state = self._state(fwd_chunk_id)
        if not self.is_first:
            args = self._received_args(state)
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
        """The last stage's outputs by microbatch, of forwards that were run by hand."""
        states = sorted(self._states.items())
        return [state.output for _, state in states if state.output is not None]

    @property
    def log_prefix(self) -> str:
        """The stage's name in torch's log."""
        return f"[Stage {self.stage_index}]"

    def _received_args(self, state: MicrobatchState) -> tuple[Any, ...]:
        if state.received is None:
            raise self._missing(state, "input", "get_fwd_recv_ops() or set_local_fwd_input()")
        tensors, state.received = state.received, None
        assert state.in_spec is not None
        return self.enter(state, tensors, state.in_spec)

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
                went forward have been backward: then the backward that completes them reduces
                the gradients of replicas (DDP, FSDP2). Otherwise ``perform_reduce_grad`` does.

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
        if deferred:
            self.weight_grad(state)
        self._finish(state, last_backward)

    def _output_grads(self, state: MicrobatchState, loss: Tensor | None) -> Sequence[Tensor | None]:
        if self.is_last:
            if loss is None:
                raise StageError(f"stage {self.stage_index} is the last one: pass its loss")
            state.roots = (get_gradient_edge(loss),)
            state.output = map_tensors(Tensor.detach, state.output)
            return (torch.ones_like(loss),)
        if state.received_grads is None:
            raise self._missing(state, "gradient", "get_bwd_recv_ops() or set_local_bwd_input()")
        grads: Sequence[Tensor | None] = state.received_grads
        state.received_grads = None
        if len(grads) != len(state.roots):
            raise StageError(
                f"stage {self.stage_index}, microbatch {state.microbatch}: {len(grads)} "
                f"gradients have come, expected {len(state.roots)}: one, or None, for each of "
                "the outputs that take a gradient"
            )
        return grads

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients that ``backward_one_chunk(full_backward=False)`` left.

        Without ``has_backward`` nothing is done.

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
        """Mark a microbatch as done; after the step's last one, reduce replicas if due."""
        state.phase = Phase.DONE
        self._replica_step.due |= last_backward
        in_flight = (Phase.FORWARD, Phase.INPUT_GRAD)
        if self._replica_step.due and not any(s.phase in in_flight for s in self._states.values()):
            self._replica_step.end(reduce=True)

    def _expect_phase(self, state: MicrobatchState, expected: Phase, asked: str) -> None:
        if state.phase is not expected:
            raise StageError(
                f"stage {self.stage_index}, microbatch {state.microbatch}: {asked} is asked for, "
                f"which comes after '{expected.value}', but this microbatch is at "
                f"'{state.phase.value}'"
            )

    def _missing(self, state: MicrobatchState, what: str, methods: str) -> StageError:
        return StageError(
            f"stage {self.stage_index}, microbatch {state.microbatch}: no {what} has come; run "
            f"{methods} first"
        )

    # --- through a graph ---------------------------------------------------------------------

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, without a reduction of gradients by a data-parallel wrapper.

        Its weight gradients are not deferred. ``backward_maybe_with_nosync`` goes with it.
        """
        self._begin()
        with self._no_sync():
            return self.submod(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Sequence[Tensor | None], list[dict[str, Any]] | None]:
        """Run a backward through a graph, such as ``forward_maybe_with_nosync`` leaves.

        A data-parallel wrapper reduces no gradients in it.

        Args:
            backward_type: ``"full"``, ``"input"`` or ``"weight"``. With sharded parameters,
                ``"input"`` computes all gradients and leaves nothing to ``"weight"``. Without,
                both together cost half a backward more than ``"full"``.
            bwd_kwargs: ``stage_output`` (the outputs, or the loss), ``output_grads`` and
                ``input_values``; for ``"weight"`` the ``param_groups`` that ``"input"`` returned.
            last_backward: whether the step's gradients are complete with this backward, or with
                the weight gradients that it leaves: then replicas are reduced.

        Returns:
            The gradients of the inputs (for ``"weight"``, of the weights); and for ``"input"``
            the groups for ``"weight"``.

        Raises:
            StageError: there is no such backward, or one of its arguments is missing; or an
                input gradient is asked for where ``forward_one_chunk`` has deferred weight
                gradients.
        """
        self._replica_step.begin(self.submod)
        groups: list[dict[str, Any]] | None = None
        with self._no_sync():
            if backward_type == "weight":
                (param_groups,) = _taken(backward_type, bwd_kwargs, "param_groups")
                grads = weight_backward(self.submod.parameters(), param_groups)
            elif backward_type in ("full", "input"):
                graph = _taken(
                    backward_type, bwd_kwargs, "stage_output", "output_grads", "input_values"
                )
                if backward_type == "input":
                    self._refuse_deferred()
                if backward_type == "full" or self._replica_step.is_sharded:
                    # The graph of sharded parameters does not lead to the module's own.
                    grads, groups = full_backward(*graph), [] if backward_type == "input" else None
                else:
                    output, output_grads, values = graph
                    outputs = (output,) if isinstance(output, Tensor) else output
                    weights = self.submod.parameters()
                    grads, groups = input_backward(outputs, output_grads, values, weights)
            else:
                raise StageError(
                    f"backward type {backward_type!r}: expected 'full', 'input' or 'weight'"
                )
        self._replica_step.due |= last_backward
        if backward_type != "input":
            self._run_reached()
            if self._replica_step.due:
                self._replica_step.end(reduce=True)
        return grads, groups

    def _refuse_deferred(self) -> None:
        """Refuse to split a backward along the graph whose forward has deferred by operation."""
        for state in self._states.values():
            if state.phase is Phase.FORWARD and state.work is not None:
                raise StageError(
                    f"stage {self.stage_index}, microbatch {state.microbatch}: forward_one_chunk() "
                    "has put its weight gradients off, so that the graph does not lead to them; "
                    "run backward_one_chunk(full_backward=False), or pass defers_weights=False to "
                    "PipelineStage"
                )

    def _run_reached(self) -> None:
        """Run the deferred weight gradients that a backward through the graph has reached."""
        for state in self._states.values():
            work = state.work if state.phase is Phase.FORWARD else None
            if work is not None and work.is_reached:
                self.weight_grad(state)
                state.phase = Phase.DONE

    # --- replicas ----------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Begin a step driven by hand, if there is none; True if it computes gradients."""
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
        """Average the gradients over the module's replicas, once after a step's last backward.

        Nothing is averaged where a backward with ``last_backward=True`` has done so already.

        Args:
            grad_scale_factor: the number to divide the gradients by (see ``scale_grads``).
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


def _taken(backward_type: str, bwd_kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    for name in names:
        if name not in bwd_kwargs:
            raise StageError(
                f"a backward of type {backward_type!r} takes {name!r}, but was given "
                f"{sorted(bwd_kwargs)}"
            )
    return tuple(bwd_kwargs[name] for name in names)
