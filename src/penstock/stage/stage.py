"""Forward and backward of one microbatch in one stage.

    RECV_F       F                     SEND_F     RECV_B            B, or I           W
    received ───►leaves, roots, work,  to_send    received_grads ──►grads_to_send     (work done)
                 to_send

A forward produces detached tensors to send, and the autograd edges at which the backward starts.
A stage depends on neither schedules nor messages. All state of a microbatch is in the
``MicrobatchState`` that the caller passes; each field is set by one action and cleared by the one
that consumes it, so that memory is held only for microbatches in flight.

Where sequences are split into chunks, the module is called as ``module(*args, state=state)`` and
returns ``(output, new_state)``. The state is a pytree of tensors and plain values, such as the keys
and values of all chunks so far; None for the first chunk:

    forward     chunk 0 ── state ──► chunk 1 ── state ──► chunk 2
    backward    chunk 0 ◄── grads ── chunk 1 ◄── grads ── chunk 2

Each chunk receives detached leaves, so that its backward ends there; their gradients are further
roots of the previous chunk's backward.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock._torch_compat import autocast_enabled, run_backward, version_of, without_hooks
from penstock.errors import BoundaryError, StageError
from penstock.stage.boundary import BoundarySpec
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import DTensorMeta, find_mesh
from penstock.stage.offload import ActivationOffload
from penstock.stage.pytree import Args, Kwargs, flatten, is_plain, unflatten
from penstock.stage.recompute import Findings, RecomputeContext
from penstock.stage.wrappers import unwrapped

__all__ = ["MicrobatchState", "SequenceState", "Stage", "detach_state", "holding_back"]
__all__ += ["takes_state"]


class MicrobatchState:
    """One microbatch's tensors and graph edges in one stage, between its actions.

    A schedule reuses its states from step to step. ``in_sequence`` is True for a chunk of a
    sequence, whose backward returns the gradient of the state that the chunk before has passed on.
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
        self.in_spec: BoundarySpec | None = None
        self.out_spec: BoundarySpec | None = None
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
        for name, number in (("stage_index", stage_index), ("num_stages", num_stages)):
            if not hasattr(number, "__index__"):
                raise StageError(f"{name} is {number!r}, expected a whole number")
        if not isinstance(submod, nn.Module):
            raise StageError(
                f"stage {stage_index}: its module is {submod!r}, expected an nn.Module"
            )
        if not 0 <= stage_index < num_stages:
            raise StageError(
                f"stage_index is {stage_index}, expected 0 to below num_stages={num_stages}"
            )
        self.submod = submod
        self.stage_index = operator.index(stage_index)
        self.num_stages = operator.index(num_stages)
        self.device = indexed(torch.device(device))
        self.dw_builder = dw_builder
        self.defers_weights = defers_weights
        self.static_inputs: BoundarySpec | None = None
        self.static_outputs: BoundarySpec | None = None
        self.inputs_spec: BoundarySpec | None = None
        self.outputs_spec: BoundarySpec | None = None
        self.get_mesh: Callable[..., Any] | None = None
        self._meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        self._findings = Findings(submod)
        # Inputs with their versions: None for those of a module's first forward; indices for those
        # that shared memory in the previous stage.
        self._watched: list[tuple[Tensor, int, tuple[int, int] | None]] = []

    @property
    def is_first(self) -> bool:
        """True for stage 0, which takes the model's inputs (the first copy's)."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True for the last stage, which computes the loss (of the last copy)."""
        return self.stage_index == self.num_stages - 1

    # --- forward -----------------------------------------------------------------------------

    def enter(
        self, state: MicrobatchState, tensors: Sequence[Tensor], spec: BoundarySpec
    ) -> tuple[Any, ...]:
        """Make the module's arguments of received tensors; those that take gradients are leaves.

        Autograd refuses in-place writes into leaves (``nn.ReLU(inplace=True)``, ``x.add_(1)``). The
        module gets differentiable aliases, unless its first forward has shown that it writes none.
        """
        state.in_spec = self.inputs_spec = spec
        # In an evaluation there is no graph, though parameters that are sent on require grad.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        state.leaves = [tensors[i].requires_grad_() for i in grad_slots]
        writes = self.findings().writes
        self._watched = []
        if state.leaves and writes is not False:
            tensors = [_Alias.apply(t) if t.requires_grad else t for t in tensors]  # type: ignore[no-untyped-call]
            if writes is None:
                self._watched = [(t, version_of(t), None) for t in tensors if t.requires_grad]
        for i, j in spec.shared:
            if not tensors[i].is_inference():
                pairs = ((i, j), (j, i))
                self._watched += [(tensors[p[0]], version_of(tensors[p[0]]), p) for p in pairs]
        return spec.arguments(tensors, self.mesh_of)

    def findings(self) -> Findings:
        """The findings of its present module's first forward."""
        if self._findings.module is not self.submod:
            self._findings = Findings(self.submod)
        return self._findings

    def _check_writes(self) -> None:
        """Learn whether the module writes into inputs; refuse writes into shared memory."""
        watched, self._watched = self._watched, []
        written = [pair for tensor, version, pair in watched if version_of(tensor) != version]
        if any(pair is None for *_, pair in watched):
            inplace = any(getattr(m, "inplace", False) is True for m in self.submod.modules())
            self.findings().writes = inplace or None in written
        for pair in written:
            if pair is not None:
                raise BoundaryError(
                    f"the stage writes into tensor {pair[0]} of its inputs in place; it has memory "
                    f"in common with tensor {pair[1]} in the stage before, which would not see the "
                    "write here: return a clone of one of them there, or don't write in place"
                )

    def mesh_of(self, meta: DTensorMeta) -> Any:
        """The mesh of this stage over which a received DTensor is sharded."""
        if meta.mesh not in self._meshes:
            names = tuple(name for name, _ in meta.mesh)
            params = self.submod.parameters()
            found = self.get_mesh(names, None) if self.get_mesh else find_mesh(meta, params)
            self._meshes[meta.mesh] = found
        return self._meshes[meta.mesh]

    def forward(self, state: MicrobatchState, args: Args, kwargs: Kwargs, *, defer: bool) -> Any:
        """Run the module; ``defer`` says whether weight gradients are deferred to W."""
        if defer and self.defers_weights and not (self.dw_builder or self._leaves_all_to_w(state)):
            output = self._forward_deferring(state, args, kwargs)
        else:
            output = self.submod(*args, **kwargs)
        if self._watched:
            self._check_writes()
        return output

    def _leaves_all_to_w(self, state: MicrobatchState) -> bool:
        """True if no gradient is sent back: W then runs the full backward, which costs less."""
        return self.defers_weights and not (self.dw_builder or state.leaves or state.in_sequence)

    def _forward_deferring(self, state: MicrobatchState, args: Args, kwargs: Kwargs) -> Any:
        from penstock.stage.weight_grad import DeferredGrads, compiled_parts

        known = self.findings()
        if known.compiled is None:
            known.compiled = compiled_parts(self.submod)
        state.work = deferred = DeferredGrads(known.undeferred, known.compiled)
        with deferred:
            return self.submod(*args, **kwargs)

    def leave(self, state: MicrobatchState, output: Any, spec: BoundarySpec) -> None:
        """Split the output, which is not kept, into tensors to send and roots of the backward."""
        tensors = spec.tensors(output)
        state.out_spec = self.outputs_spec = spec
        # In an evaluation there are no edges, though views of parameters require grad.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        state.roots = [
            get_gradient_edge(t) if (t := tensors[i]).requires_grad else None for i in grad_slots
        ]
        # Tensors without gradients may be state, into which later microbatches write: send copies.
        state.to_send = [t.detach() if t.requires_grad else t.clone() for t in tensors]

    # --- backward ----------------------------------------------------------------------------

    def backward(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        """Full backward of a microbatch, from a gradient, or None, for each of its roots."""
        if state.work is None and self.dw_builder is None:
            self._run_backward(state, grads)
        else:
            self.input_grad(state, grads)
            self.weight_grad(state)

    def input_grad(self, state: MicrobatchState, grads: Sequence[Tensor | None]) -> None:
        """Input gradients of a microbatch; ``weight_grad`` computes its weight gradients."""
        deferred = state.work
        if deferred is not None:  # recorded by the forward
            from penstock.stage.weight_grad import find_undeferred, refuse  # few schedules need it

            known = self.findings()
            if known.is_outdated:
                known.keep_undeferred(find_undeferred(state.roots))
            if any(leaf.grad is not None for leaf in state.leaves):
                refuse("backward()")
            deferred.note_undeferred(known.undeferred)
            around = holding_back(deferred.mixed) if deferred.mixed else nullcontext(())
            with deferred, around as held:
                self._run_backward(state, grads)
            deferred.add_computed(held)
            state.work = deferred.accumulate
        elif self._leaves_all_to_w(state):
            state.grads_to_send = ()
            state.work = partial(self._run_backward, state, grads)
        else:
            self._run_backward(state, grads)
            state.work = self._built_work()

    def weight_grad(self, state: MicrobatchState) -> None:
        """Weight gradients of a microbatch, after its input gradients."""
        work, state.work = state.work, None
        with self._outside_autocast():
            work()

    def _outside_autocast(self) -> AbstractContextManager[None]:
        """A context for backwards: a layer in float32 is differentiated in float32."""
        is_on = autocast_enabled()
        return torch.autocast(self.device.type, enabled=False) if is_on else nullcontext()

    def _built_work(self) -> Callable[..., None]:
        """The user's callable for the weight gradients of the last backward; or an empty one."""
        if self.dw_builder is None:
            return lambda: None
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
            with self._outside_autocast():
                run_backward(roots, grads)
        leaves, state.leaves = state.leaves, ()
        state.grads_to_send = [leaf.grad for leaf in leaves]


@contextmanager
def holding_back(parameters: Iterable[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Fill a list with gradients that a backward computes; ``.grad`` stays, no hook runs."""
    before = [(param, param.grad) for param in parameters if param.requires_grad]
    held: list[tuple[nn.Parameter, Tensor]] = []
    for param, _ in before:
        param.grad = None
    try:
        with without_hooks(*(param for param, _ in before)):
            yield held
    finally:
        for param, grad in before:
            if param.grad is not None:
                held.append((param, param.grad))
            param.grad = grad


class _Alias(torch.autograd.Function):
    """A differentiable alias of a leaf, which may be written into."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()  # the shared version counter shows writes to autograd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


# --- chunks of sequences -------------------------------------------------------------------------


@dataclass(slots=True)
class SequenceState:
    """The state that one chunk passes to the next."""

    value: Any  # detached; None once the next chunk has taken it
    leaves: Sequence[Tensor]  # its tensors that take gradients, as the next chunk sees them
    edges: Sequence[GradientEdge]  # of the same tensors in this chunk's graph

    def take(self) -> Any:
        """Return the value once, which transfers its memory to the next chunk."""
        value, self.value = self.value, None
        return value

    def grads(self) -> list[Tensor | None]:
        """The gradients of the leaves after the next chunk's backward; None where unused."""
        return [leaf.grad for leaf in self.leaves]


def detach_state(returned: Any) -> tuple[Any, SequenceState]:
    """Split a module's return value into its output and a detached state."""
    if type(returned) is not tuple or len(returned) != 2:
        what = f"{len(returned)} values" if type(returned) is tuple else type(returned).__name__
        raise StageError(
            f"the module returned {what}, expected (output, state): where sequences are split "
            "into chunks, a stage also returns the state for the next chunk"
        )
    output, state = returned
    values, tree = flatten(state)
    edges: list[GradientEdge] = []
    leaves: list[Tensor] = []
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            values[i] = value.detach()
            if value.requires_grad:
                leaves.append(values[i].requires_grad_())
                edges.append(get_gradient_edge(value))
        elif not is_plain(value):
            # Tensors hidden in it would tie the backwards of both chunks together.
            raise StageError(
                f"the state holds a {type(value).__qualname__}, expected tensors, numbers, "
                "strings, None and containers of these"
            )
    return output, SequenceState(unflatten(tree, values), leaves, edges)


def takes_state(module: nn.Module) -> bool:
    """True if the forward of a module, wrapped (DDP, compiled) or not, accepts ``state``."""
    return "state" in inspect.signature(unwrapped(module).forward).parameters
