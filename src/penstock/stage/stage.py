"""Forward and backward of one microbatch in one stage.

A forward produces detached tensors to send, and the autograd edges at which the backward starts.
A stage depends on neither schedules nor messages. All state of a microbatch is in the
``MicrobatchState`` that the caller passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock._torch_compat import run_backward
from penstock.errors import StageError
from penstock.stage.aliasing import InputAliases
from penstock.stage.boundary import BoundarySpec
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import DTensorMeta, find_mesh, unknown_mesh
from penstock.stage.microbatch_state import MicrobatchState
from penstock.stage.pytree import flatten

__all__ = ["Stage"]


class Stage:
    """One stage of a model.

    Args:
        submod: the module. It may be reassigned (wrapped, compiled) between steps.
        stage_index: its place in the model, from 0.
        num_stages: the number of stages of the model.
        device: where the module lives.
        dw_builder: makes, after each backward, a callable that computes the weight gradients,
            for modules that split their backward by themselves.
        defers_weights: whether I defers weight gradients to W. If False, I computes all and W
            does nothing; for modules that differentiate within their own forward.

    Attributes:
        static_inputs, static_outputs: boundary specs that the user gave in advance.
        inputs_spec, outputs_spec: boundary specs of the last microbatch.
        get_mesh: returns the mesh with the given dimension names, for received DTensors.

    Raises:
        StageError: ``stage_index`` is out of range, or ``submod`` is no module.
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
        self._aliases = InputAliases()

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
        """Make the module's arguments of received tensors; those that take gradients are leaves."""
        state.in_spec = self.inputs_spec = spec
        # In an evaluation there is no graph, though parameters that are sent on require grad.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        state.leaves = [tensors[i].requires_grad_() for i in grad_slots]
        if state.leaves and self._aliases.may_write(self.submod):
            tensors = self._aliases.of(tensors)
        if spec.shared:
            self._aliases.watch(tensors, spec.shared)
        return spec.arguments(tensors, self.mesh_of)

    def mesh_of(self, meta: DTensorMeta) -> Any:
        """The mesh of this stage over which a received DTensor is sharded.

        Raises:
            BoundaryError: neither ``get_mesh`` nor a parameter determines it.
        """
        if meta.mesh not in self._meshes:
            names = tuple(name for name, _ in meta.mesh)
            if self.get_mesh is not None:
                found = self.get_mesh(names, None)
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
        """Run the module.

        Args:
            state: the microbatch's state.
            args: positional arguments.
            kwargs: keyword arguments.
            defer: whether weight gradients are deferred to W.

        Raises:
            BoundaryError: it wrote into an input that shares memory with another one.
        """
        if defer and self.defers_weights and not self._leaves_all_to_w(state):
            output = self._forward_deferring(state, args, kwargs)
        else:
            output = self.submod(*args, **kwargs)
        self._aliases.check()
        return output

    def _leaves_all_to_w(self, state: MicrobatchState) -> bool:
        """True if no gradient is sent back, as on the first stage.

        W then runs the whole backward, which costs less than two halves, and I does nothing.
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
        state.work = work = DeferredGrads(undeferred or (), compiled)
        with work:
            output = self.submod(*args, **kwargs)
        if undeferred is None:
            # Parameters whose gradients I computes anyway: later forwards defer none of their
            # uses, or their hooks would fire twice. A module's uses stay the same.
            undeferred = find_undeferred(flatten(output)[0], self.submod.parameters())
            work.note_undeferred(undeferred)
            self._deferral = (self.submod, undeferred, compiled)
        return output

    def leave(self, state: MicrobatchState, output: Any, spec: BoundarySpec) -> None:
        """Split the output into detached tensors to send and the edges where the backward starts.

        The output itself is not kept, so that its memory is free once it is sent.

        Raises:
            BoundaryError: the output does not match ``spec``.
        """
        tensors = spec.tensors(output)
        state.out_spec = self.outputs_spec = spec
        # In an evaluation there are no edges, though views of parameters require grad.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        if grad_slots and len(tensors) == 1 and tensors[0].requires_grad:
            state.roots = (get_gradient_edge(tensors[0]),)
            state.to_send = (tensors[0].detach(),)
            return
        state.roots = [
            get_gradient_edge(t) if (t := tensors[i]).requires_grad else None for i in grad_slots
        ]
        state.to_send = [t.detach() for t in tensors]

    # --- backward ----------------------------------------------------------------------------

    def backward(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        """Full backward of a microbatch: input and weight gradients.

        Args:
            state: the microbatch's state after its forward.
            grads: for each of the roots its gradient, or None.
        """
        self._run_backward(state, grads)
        if self.dw_builder is not None:
            self._weight_runner()()

    def input_grad(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        """Input gradients of a microbatch; ``weight_grad`` computes its weight gradients."""
        work = state.work
        if isinstance(work, TorchFunctionMode):  # recorded by the forward
            held = getattr(work, "undeferred_now", ())
            with work, work.holding_undeferred() if held else nullcontext():
                self._run_backward(state, grads)
        elif self._leaves_all_to_w(state):
            state.grads_to_send = ()
            state.work = _Deferred(partial(self._run_backward, state, grads))
        else:
            self._run_backward(state, grads)
            state.work = _Deferred(self._weight_runner())

    def weight_grad(self, state: MicrobatchState) -> None:
        """Weight gradients of a microbatch, after its input gradients."""
        work, state.work = state.work, None
        assert work is not None
        work.accumulate()

    def _weight_runner(self) -> Callable[..., None]:
        """The user's callable for the weight gradients of the last backward."""
        if self.dw_builder is None:
            return _nothing
        runner = self.dw_builder()
        if not callable(runner):
            raise StageError(
                f"dw_builder returned {runner!r}, expected a callable that computes the weight "
                "gradients of the backward before it"
            )
        return runner

    def _run_backward(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        roots, state.roots = state.roots, ()
        if len(roots) != 1 or roots[0] is None or grads[0] is None:
            pairs = zip(roots, grads, strict=True)
            kept = [(r, g) for r, g in pairs if r is not None and g is not None]
            roots, grads = [r for r, _ in kept], [g for _, g in kept]
        if roots:
            self._backward_from(roots, grads)
        leaves = state.leaves
        state.leaves = ()
        state.grads_to_send = [leaf.grad for leaf in leaves]


def _as_int(name: str, number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise StageError(f"{name} is {number!r}, expected a whole number") from None


def _nothing() -> None:
    """The no-op W after I has computed all gradients."""


class _Deferred:
    """A callable that W runs."""

    is_reached = False

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def accumulate(self) -> None:
        self._run()
