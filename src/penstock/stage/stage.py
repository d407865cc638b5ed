"""Forward and backward of one microbatch in one stage.

A stage takes tensors in, runs its module, and leaves behind two things: detached tensors to send
on, and the autograd edges to start its backward from. It knows neither schedules nor messages.
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
from penstock.stage.carry import Carry
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import DTensorMeta, find_mesh, unknown_mesh
from penstock.stage.pytree import flatten
from penstock.stage.rng import RandomStream
from penstock.stage.slots import Slot
from penstock.stage.wrappers import unwrapped

__all__ = ["Stage"]


class Stage:
    """One cut of a model, and how a microbatch runs through it.

    Args:
        submod: the module. It may be reassigned (wrapped, compiled) between steps.
        stage_index: its place in the model, from 0.
        num_stages: how many stages the model has.
        device: where the module lives.
        dw_builder: makes, after each backward, a callable that computes the weight gradients,
            for modules that split their backward by themselves.
        defers_weights: whether I leaves weight gradients to W. False: I computes all, W has
            nothing to do; for modules that differentiate within their own forward.

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
        stage_index = _whole("stage_index", stage_index)
        num_stages = _whole("num_stages", num_stages)
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
        on_cpu = self.device.type == "cpu"
        self._backward_from: Any = run_backward if on_cpu else torch.autograd.backward
        # What pieces of a sequence hand on to each other here, where sequences are split.
        self.carry: Carry | None = None
        # Its part of the microbatches' random numbers, where these are to be one device's.
        self.random: RandomStream | None = None
        # What crosses its boundaries, where the user has said so in advance.
        self.static_inputs: BoundarySpec | None = None
        self.static_outputs: BoundarySpec | None = None
        # Says by names of its dimensions over which mesh tensors are spread; those found so far.
        self.get_mesh: Callable[..., Any] | None = None
        self._meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        # What crossed them last.
        self.inputs_spec: BoundarySpec | None = None
        self.outputs_spec: BoundarySpec | None = None
        self.defers_weights = defers_weights and dw_builder is None
        self._leaks: tuple[nn.Module, list[nn.Parameter]] | None = None
        self._aliases = InputAliases()

    @property
    def is_first(self) -> bool:
        """Whether the model's inputs enter here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def enter(self, slot: Slot, tensors: Sequence[Tensor], spec: BoundarySpec) -> tuple[Any, ...]:
        """Received tensors as this stage's arguments; those that take gradients become leaves."""
        slot.in_spec = self.inputs_spec = spec
        # In an evaluation there is no graph to be leaves of, whatever comes out of parameters.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        slot.leaves = [tensors[i].requires_grad_() for i in grad_slots]
        if slot.leaves and self._aliases.may_write(self.submod):
            tensors = self._aliases.of(tensors)
        if spec.shared:
            self._aliases.watch(tensors, spec.shared)
        return spec.arguments(tensors, self.mesh_of)

    def mesh_of(self, meta: DTensorMeta) -> Any:
        """This rank's mesh of a received DTensor.

        Raises:
            BoundaryError: it is not known.
        """
        if meta.mesh not in self._meshes:
            names = tuple(name for name, _ in meta.mesh)
            if self.get_mesh is not None:
                found = self.get_mesh(names, None)
            else:
                found = find_mesh(meta, self.submod.parameters()) or unknown_mesh(meta)
            self._meshes[meta.mesh] = found
        return self._meshes[meta.mesh]

    @property
    def reads_kwargs(self) -> bool:
        """Whether keyword arguments count here, also where the model's inputs do not enter."""
        return self.is_first or not getattr(unwrapped(self.submod), "kwargs_come_along", False)

    @property
    def may_write_inputs(self) -> bool:
        """Whether the module writes into what it receives, or may do so for all that is known."""
        return self._aliases.may_write(self.submod)

    def forward(
        self, slot: Slot, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, defer: bool
    ) -> Any:
        """Run the module.

        Args:
            slot: the microbatch's state.
            args: positional arguments.
            kwargs: keyword arguments.
            defer: whether weight gradients are to be left to W.

        Raises:
            BoundaryError: it wrote into what it received, and others should have seen it.
        """
        random = self.random
        if random is None or not torch.is_grad_enabled():
            return self._run_piece(slot, args, kwargs, defer=defer)
        args = random.begin(slot.microbatch, args)
        try:
            return random.end(self._run_piece(slot, args, kwargs, defer=defer))
        finally:
            random.leave()

    def _run_piece(
        self, slot: Slot, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, defer: bool
    ) -> Any:
        if self.carry is not None:
            kwargs = self.carry.take(slot.microbatch, kwargs)
        output = self._run_module(slot, args, kwargs, defer=defer)
        self._aliases.check()
        return output if self.carry is None else self.carry.give(slot.microbatch, output)

    def _run_module(
        self, slot: Slot, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, defer: bool
    ) -> Any:
        if defer and self.defers_weights and not self._leaves_all_to_w(slot):
            return self._run_deferring(slot, args, kwargs)
        return self.submod(*args, **kwargs)

    def _leaves_all_to_w(self, slot: Slot) -> bool:
        """Whether nobody waits for what I computes, as on the first stage: then W is the whole
        backward, which costs less than two halves, and what comes before W starts sooner."""
        return not slot.leaves and self.carry is None and self.defers_weights

    def _run_deferring(self, slot: Slot, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # Imported where weight gradients are put off, since few schedules do that.
        from penstock.stage.weight_grad.deferred import DeferredWeights, find_leaks

        known = self._leaks is not None and self._leaks[0] is self.submod
        if not known:
            from penstock.stage.weight_grad.compiled import keep_compiled

            keep_compiled(self.submod)
        slot.work = work = DeferredWeights(self._leaks[1] if known and self._leaks else ())
        with work:
            output = self.submod(*args, **kwargs)
        if not known:
            # Parameters whose gradients come in I whatever we do: nothing of theirs is deferred,
            # or their hooks would fire twice. Found once; a module takes them the same way always.
            leaks = find_leaks(flatten(output)[0], self.submod.parameters())
            work.note_leaks(leaks)
            self._leaks = (self.submod, leaks)
        return output

    def leave(self, slot: Slot, output: Any, spec: BoundarySpec) -> None:
        """Take the output apart: detached tensors to send, edges to start the backward from.

        The output itself is not kept, so that its memory is free once it is sent.

        Raises:
            BoundaryError: the output is not what ``spec`` says.
        """
        tensors = spec.tensors(output)
        slot.spec = self.outputs_spec = spec
        # In an evaluation there are no edges, though views of parameters say that they need one.
        grad_slots = spec.grad_slots if torch.is_grad_enabled() else ()
        if grad_slots and len(tensors) == 1 and tensors[0].requires_grad:
            slot.roots = (get_gradient_edge(tensors[0]),)
            slot.outgoing = (tensors[0].detach(),)
            return
        slot.roots = [
            get_gradient_edge(t) if (t := tensors[i]).requires_grad else None for i in grad_slots
        ]
        slot.outgoing = [t.detach() for t in tensors]

    def backward(self, slot: Slot, grads: Sequence[Tensor | None]) -> None:
        """Full backward of a microbatch: input and weight gradients.

        Args:
            slot: the microbatch's state, after its forward.
            grads: for each of the roots its gradient, None where there is none.
        """
        self._run_backward(slot, grads)
        if self.dw_builder is not None:
            self._weight_runner()()

    def input_grad(self, slot: Slot, grads: Sequence[Tensor | None]) -> None:
        """Input gradients of a microbatch; its weight gradients are left to ``weight_grad``."""
        work = slot.work
        if isinstance(work, TorchFunctionMode):  # what the forward has deferred
            leaks = getattr(work, "leaks", ())
            with work, work.holding_leaks() if leaks else nullcontext():
                self._run_backward(slot, grads)
        elif self._leaves_all_to_w(slot):
            slot.outgoing_grads = ()
            slot.work = _Runner(partial(self._run_backward, slot, grads))
        else:
            self._run_backward(slot, grads)
            slot.work = _Runner(self._weight_runner())

    def weight_grad(self, slot: Slot) -> None:
        """Weight gradients of a microbatch, after its input gradients."""
        work, slot.work = slot.work, None
        assert work is not None
        work.accumulate()

    def _weight_runner(self) -> Callable[..., None]:
        """The weight gradients of the backward that has just run, as the user's module says."""
        if self.dw_builder is None:
            return _nothing
        runner = self.dw_builder()
        if not callable(runner):
            raise StageError(
                f"dw_builder returned {runner!r}, expected a callable that computes the weight "
                "gradients of the backward before it"
            )
        return runner

    def _run_backward(self, slot: Slot, grads: Sequence[Tensor | None]) -> None:
        roots, slot.roots = slot.roots, ()
        if self.carry is not None:
            roots, grads = self.carry.join(slot.microbatch, roots, grads)
        if len(roots) != 1 or roots[0] is None or grads[0] is None:
            pairs = zip(roots, grads, strict=True)
            kept = [(r, g) for r, g in pairs if r is not None and g is not None]
            roots, grads = [r for r, _ in kept], [g for _, g in kept]
        if roots:
            self._backward_from(roots, grads)
        leaves = slot.leaves
        slot.leaves = ()
        slot.outgoing_grads = [leaf.grad for leaf in leaves]


def _whole(what: str, number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise StageError(f"{what} is {number!r}, expected a whole number") from None


def _nothing() -> None:
    """What is left to W where I has computed all."""


class _Runner:
    """A weight-gradient callable, as work left to W."""

    is_reached = False

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def accumulate(self) -> None:
        self._run()
