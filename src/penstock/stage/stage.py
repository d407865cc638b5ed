"""Forward and backward of one microbatch in one stage.

    RECV_F       F                     SEND_F     RECV_B            B, or I           W
    received ───►leaves, roots, work,  to_send    received_grads ──►grads_to_send     (work done)
                 to_send

A forward produces detached tensors to send, and the autograd edges at which the backward starts.
A stage depends on neither schedules nor messages. All state of a microbatch is in the
``MicrobatchState`` that the caller passes; each field is set by one action and cleared by the one
that consumes it, so that memory is held only for microbatches in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock._torch_compat import run_backward, version_of
from penstock.errors import BoundaryError, StageError
from penstock.stage.boundary import BoundarySpec
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import DTensorMeta, find_mesh, unknown_mesh
from penstock.stage.offload import ActivationOffload
from penstock.stage.pytree import flatten
from penstock.stage.recompute import RecomputeContext
from penstock.stage.sequence_state import SequenceState

__all__ = ["MicrobatchState", "Stage"]


class MicrobatchState:
    """One microbatch's tensors and graph edges in one stage, between its actions.

    A schedule makes its own states and reuses them from step to step.

    Args:
        microbatch: its index.
        in_sequence: whether it is a chunk of a sequence, whose backward returns the gradient of
            the state that the chunk before has passed on.
    """

    def __init__(self, microbatch: int, *, in_sequence: bool = False) -> None:
        self.microbatch = microbatch
        self.in_sequence = in_sequence
        self.clear()

    def clear(self) -> None:
        """Reset all fields to their values before the first action."""
        # The activations, and the gradients of ``to_send``: a pending receive, then tensors.
        self.received: Any = None
        self.received_grads: Any = None
        # The inputs whose gradients are sent back, and these gradients.
        self.leaves: Sequence[Tensor] = ()
        self.grads_to_send: Sequence[Tensor | None] | None = None
        # Output tensors, None once sent; and the gradient edges of those that take gradients, None
        # for one that required grad when its shape was first seen but no longer does.
        self.to_send: Sequence[Tensor] | None = None
        self.roots: Sequence[GradientEdge | None] = ()
        # After F the DeferredGrads that recorded it, if any; after I the callable of W.
        self.work: Any = None
        # The state to restore when the forward is run again; saved activations to be offloaded.
        self.recompute: RecomputeContext | None = None
        self.offload: ActivationOffload | None = None
        # The state passed to the next chunk of a sequence.
        self.sequence: SequenceState | None = None
        # The specs of inputs and outputs; the encoded ``out_spec``, if it is to be sent.
        self.in_spec: BoundarySpec | None = None
        self.out_spec: BoundarySpec | None = None
        self.metadata: bytes | None = None
        # For each gradient of ``to_send``, whether it is sent at all.
        self.grads_present: tuple[bool, ...] = ()


class Stage:
    """One stage of a model.

    Args and errors: see ``penstock.PipelineStage``. ``submod`` may be reassigned (wrapped,
    compiled) between steps.

    Attributes:
        static_inputs, static_outputs: boundary specs that the user gave in advance.
        inputs_spec, outputs_spec: boundary specs of the last microbatch.
        get_mesh: returns the mesh with the given dimension names, for received DTensors.
    """

    def __init__(
        self,
        submod: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        defers_weights: bool = True,
    ) -> None:
        stage_index = _as_int("stage_index", stage_index)
        num_stages = _as_int("num_stages", num_stages)
        if not isinstance(submod, nn.Module):
            raise StageError(
                f"stage {stage_index}: its module is {submod!r}, expected an nn.Module"
            )
        if num_stages < 1:
            raise StageError(f"num_stages is {num_stages}, expected 1 or more")
        if not 0 <= stage_index < num_stages:
            raise StageError(
                f"stage_index is {stage_index}, expected 0 to {num_stages - 1} "
                f"for num_stages={num_stages}"
            )
        self.submod = submod
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = indexed(torch.device(device))
        self.dw_builder = dw_builder
        self.defers_weights = defers_weights and dw_builder is None
        self.static_inputs: BoundarySpec | None = None
        self.static_outputs: BoundarySpec | None = None
        self.inputs_spec: BoundarySpec | None = None
        self.outputs_spec: BoundarySpec | None = None
        self.get_mesh: Callable[..., Any] | None = None
        self._meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        on_cpu = self.device.type == "cpu"
        self._backward_from: Any = run_backward if on_cpu else torch.autograd.backward
        # The module, the parameters of it that are not deferred, and its compiled parts.
        self._deferral: tuple[nn.Module, list[nn.Parameter] | None, Any] | None = None
        # The module, and whether it may write into its inputs; None before its first forward.
        self._writes: tuple[nn.Module, bool] | None = None
        # Inputs with their versions: those of a module's first forward, and, with their indices,
        # those that shared memory in the previous stage.
        self._first: list[tuple[Tensor, int]] = []
        self._shared: list[tuple[int, int, Tensor, int]] = []

    @property
    def is_first(self) -> bool:
        """True for the stage that takes the model's inputs."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.stage_index == self.num_stages - 1

    # --- forward -----------------------------------------------------------------------------

    def enter(
        self, state: MicrobatchState, tensors: Sequence[Tensor], spec: BoundarySpec
    ) -> tuple[Any, ...]:
        """Make the module's arguments of received tensors; those that take gradients are leaves.

        Autograd refuses in-place writes into leaves (``nn.ReLU(inplace=True)``, ``x.add_(1)``). In
        the unsplit model the inputs would be none, so the module gets differentiable aliases,
        unless its first forward has shown that it does not write.
        """
        state.in_spec = self.inputs_spec = spec
        # In an evaluation there is no graph, though parameters that are sent on require grad.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        state.leaves = [tensors[i].requires_grad_() for i in grad_slots]
        writes = self._writes
        if writes is not None and writes[0] is not self.submod:
            writes = self._writes = None
        self._first = []
        if state.leaves and (writes is None or writes[1]):
            tensors = [alias(t) if t.requires_grad else t for t in tensors]
            if writes is None:
                self._first = [(t, version_of(t)) for t in tensors if t.requires_grad]
        if spec.shared:
            pairs = (p for i, j in spec.shared for p in ((i, j), (j, i)))
            watched = ((i, j, t) for i, j in pairs if not (t := tensors[i]).is_inference())
            self._shared = [(i, j, t, version_of(t)) for i, j, t in watched]
        return spec.arguments(tensors, self.mesh_of)

    def _check_writes(self) -> None:
        """Learn from a module's first forward whether it writes into its inputs.

        Refuses a write into an input that shared memory with another one in the previous stage.
        """
        first, self._first = self._first, []
        shared, self._shared = self._shared, []
        if first:
            inplace = (getattr(m, "inplace", False) is True for m in self.submod.modules())
            wrote = any(version_of(t) != version for t, version in first)
            self._writes = (self.submod, wrote or any(inplace))
        for one, other, tensor, version in shared:
            if version_of(tensor) != version:
                raise BoundaryError(
                    f"the stage writes into tensor {one} of its inputs in place; it has memory in "
                    f"common with tensor {other} in the stage before, which would not see the "
                    "write here: return a clone of one of them there, or don't write in place"
                )

    def mesh_of(self, meta: DTensorMeta) -> Any:
        """The mesh of this stage over which a received DTensor is sharded."""
        if meta.mesh not in self._meshes:
            if self.get_mesh is not None:
                found = self.get_mesh(tuple(name for name, _ in meta.mesh), None)
            else:
                found = find_mesh(meta, self.submod.parameters()) or unknown_mesh(meta)
            self._meshes[meta.mesh] = found
        return self._meshes[meta.mesh]

    def forward(
        self,
        state: MicrobatchState,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        defer: bool,
    ) -> Any:
        """Run the module; ``defer`` says whether weight gradients are deferred to W."""
        if defer and self.defers_weights and not self._leaves_all_to_w(state):
            output = self._forward_deferring(state, args, kwargs)
        else:
            output = self.submod(*args, **kwargs)
        if self._first or self._shared:
            self._check_writes()
        return output

    def _leaves_all_to_w(self, state: MicrobatchState) -> bool:
        """True if no gradient is sent back, as on the first stage.

        W then runs the full backward, which costs less than two halves, and I does nothing.
        """
        return self.defers_weights and not state.leaves and not state.in_sequence

    def _forward_deferring(
        self, state: MicrobatchState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        # Imported here, since few schedules defer weight gradients.
        from penstock.stage.weight_grad import DeferredGrads, compiled_parts, find_undeferred

        known = self._deferral
        if known is None or known[0] is not self.submod:
            known = (self.submod, None, compiled_parts(self.submod))
        _, undeferred, compiled = known
        state.work = deferred = DeferredGrads(undeferred or (), compiled)
        with deferred:
            output = self.submod(*args, **kwargs)
        if undeferred is None:
            # Parameters whose gradients I computes anyway: later forwards defer none of their
            # uses, or their hooks would fire twice. A module's uses stay the same.
            undeferred = find_undeferred(flatten(output)[0], self.submod.parameters())
            deferred.note_undeferred(undeferred)
            self._deferral = (self.submod, undeferred, compiled)
        return output

    def leave(self, state: MicrobatchState, output: Any, spec: BoundarySpec) -> None:
        """Split the output into detached tensors to send and the edges where the backward starts.

        The output itself is not kept, so that its memory is free once it is sent.
        """
        tensors = spec.tensors(output)
        state.out_spec = self.outputs_spec = spec
        # In an evaluation there are no edges, though views of parameters require grad.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        state.roots = [
            get_gradient_edge(t) if (t := tensors[i]).requires_grad else None for i in grad_slots
        ]
        state.to_send = [t.detach() for t in tensors]

    # --- backward ----------------------------------------------------------------------------

    def backward(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        """Full backward of a microbatch, from a gradient, or None, for each of its roots."""
        self._run_backward(state, grads)
        if self.dw_builder is not None:
            self._built_work()()

    def input_grad(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        """Input gradients of a microbatch; ``weight_grad`` computes its weight gradients."""
        deferred = state.work
        if deferred is not None:  # recorded by the forward
            with deferred, deferred.holding_undeferred():
                self._run_backward(state, grads)
            state.work = deferred.accumulate
        elif self._leaves_all_to_w(state):
            state.grads_to_send = ()
            state.work = partial(self._run_backward, state, grads)
        else:
            self._run_backward(state, grads)
            computed = self.dw_builder is None  # all gradients, by I
            state.work = (lambda: None) if computed else self._built_work()

    def weight_grad(self, state: MicrobatchState) -> None:
        """Weight gradients of a microbatch, after its input gradients."""
        work, state.work = state.work, None
        work()

    def _built_work(self) -> Callable[..., None]:
        """The user's callable for the weight gradients of the last backward."""
        assert self.dw_builder is not None
        work = self.dw_builder()
        if not callable(work):
            raise StageError(
                f"dw_builder returned {work!r}, expected a callable that computes the weight "
                "gradients of the backward before it"
            )
        return work

    def _run_backward(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        roots, state.roots = state.roots, ()
        if len(roots) != 1 or roots[0] is None or grads[0] is None:
            pairs = zip(roots, grads, strict=True)
            present = [(r, g) for r, g in pairs if r is not None and g is not None]
            roots, grads = [r for r, _ in present], [g for _, g in present]
        if roots:
            self._backward_from(roots, grads)
        leaves, state.leaves = state.leaves, ()
        state.grads_to_send = [leaf.grad for leaf in leaves]


def _as_int(name: str, number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise StageError(f"{name} is {number!r}, expected a whole number") from None


def alias(leaf: Tensor) -> Tensor:
    """A differentiable alias of ``leaf`` that may be written into."""
    made: Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return made


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()  # the shared version counter shows writes to autograd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
