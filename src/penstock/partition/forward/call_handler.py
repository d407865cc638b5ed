"""StageCallHandler: the results of leaf modules on one stage.

    calls          0     1     2     3     4        of a plan with three stages, for stage 1
    stage          0     0     1     1     2
    own module                 runs, and what crosses of its result is kept
    another's      gives the value that crossed, or a placeholder
    rerun_until    ├───────────┤                    stage 0 runs this top-level code too
    end            ├─────────────────────┤          behind that, the forward is left

It holds no modules and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch_compat import HookWatch, in_function_forward
from penstock.errors import PartitionError
from penstock.partition.forward.forward_plan import ForwardPlan
from penstock.partition.forward.forward_trace import LeafCall
from penstock.partition.forward.module_state import ModuleSnapshot, TensorVersions
from penstock.partition.forward.placeholder import (
    ValueKind,
    ValueRef,
    describe_refs,
    make_placeholder,
    refs_of,
)
from penstock.partition.forward.stage_tree import is_stub
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.rng import random_state, set_random_state
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["StageCallHandler", "StagePlan", "StopForward"]


_Refs: TypeAlias = list[tuple[int, ValueRef]]


class StopForward(BaseException):
    """Leaves the model's forward, since no stage needs more of it here.

    Not an Exception, so that no model catches it.
    """


class StagePlan:
    """The part of a plan that concerns one stage, worked out once.

    Args:
        plan: the plan.
        index: the stage.
        device: the device that placeholders claim to be on.

    Attributes:
        end: the number of calls that the stage needs.
        sent: for each call and leaf that the stage sends on, the reference to it.
        sends: the calls among these.
        rerun_until: the calls up to which earlier stages run the top-level forward too.
        alone_from: the call from which on no other stage does.
    """

    def __init__(self, plan: ForwardPlan, index: int, device: torch.device) -> None:
        is_last = index == len(plan.boundary_values)
        self.plan = plan
        self.end = len(plan.calls) if is_last else plan.last_call(index) + 1
        values = () if is_last else plan.boundary_values[index]
        self.sent = {(ref.call, ref.leaf): ref for ref in values if ref.kind is ValueKind.OUTPUT}
        self.sends = {call for call, _ in self.sent}
        self.rerun_until = max((plan.last_call(i) + 1 for i in range(index)), default=-1)
        self.alone_from = max(self.rerun_until, 0) if is_last else self.end
        self._device = device
        self._placeholders: dict[tuple[int, bool], tuple[list[Any], _Refs]] = {}

    def placeholders(self, index: int) -> tuple[list[Any], _Refs]:
        """The leaves that stand for a call's result, and the references of its tensors.

        They are made once: the trace has shown if anybody writes into them.
        """
        key = (index, torch.is_grad_enabled())
        if key in self._placeholders:
            leaves, refs = self._placeholders[key]
            return list(leaves), refs
        call = self.plan.calls[index]
        leaves, refs = list(call.output.leaves), []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, TensorMeta):
                ref = ValueRef(ValueKind.OUTPUT, index, i, call.leaf)
                leaves[i] = make_placeholder(leaf, self._device, ref)
                refs.append((i, ref))
        if not call.written:
            self._placeholders[key] = list(leaves), refs
        return leaves, refs


class StageCallHandler:
    """Runs a stage's own leaf modules, and supplies the results of others (a ``CallHandler``).

    Args:
        index: the stage.
        device: the device that placeholders claim to be on.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self._plans: dict[int, StagePlan] = {}
        self._snapshots: dict[str, tuple[nn.Module, ModuleSnapshot]] = {}
        self._plan: StagePlan | None = None

    def begin(self, plan: ForwardPlan, values: dict[ValueRef, Tensor], hooks: HookWatch) -> None:
        """Begin a microbatch.

        Args:
            plan: its plan, kept by the caller.
            values: the values that are here; those of the stage's own that cross are added.
            hooks: watches the top-level forward.
        """
        known = self._plans.get(id(plan))
        if known is None or known.plan is not plan:
            known = self._plans[id(plan)] = StagePlan(plan, self.index, self.device)
        self._plan = known
        self._values = values
        self._hooks = hooks
        self._next = 0
        self._versions = [(list(values), TensorVersions(values.values()))]
        self._has_grad = torch.is_grad_enabled()
        # Top-level code that is run again shall not advance the random generator.
        self._random = random_state(self.device) if plan.draws else None

    def end(self) -> None:
        """Let go of the microbatch, which is through or has failed."""
        self._plan = None
        self._values, self._versions = {}, []

    def check_done(self) -> None:
        """Check that all own modules ran, and that what crosses is as it was computed.

        Raises:
            PartitionError: they did not, or it is not.
        """
        assert self._plan is not None
        if self._next < self._plan.end:
            raise PartitionError(
                f"stage {self.index} did not call {self._plan.plan.calls[self._next].leaf}, which "
                "it called in its trace; which modules a model calls may not depend on values"
            )
        for refs, versions in self._versions:
            for i in versions.written():
                raise PartitionError(
                    f"stage {self.index}: {refs[i]} crosses to other stages, but was written into "
                    "after it was computed; compute a new tensor instead"
                )

    def refuse_hook(self, what: str) -> None:
        """Refuse a hook on a tensor where an earlier stage runs the same code: it would act twice.

        Raises:
            PartitionError: an earlier stage does.
        """
        if self._plan is not None and self._next <= self._plan.rerun_until:
            raise PartitionError(
                f"stage {self.index}: the top-level forward {what}, which earlier stages do too, "
                "so that a hook would act on each; do it within a module, or use an "
                "autograd.Function"
            )

    # --- one call of a leaf module -----------------------------------------------------------

    def call(self, leaf: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a leaf module."""
        plan = self._plan
        if plan is None:  # computed again in the backward, by checkpointing
            if is_stub(run):
                raise PartitionError(
                    f"stage {self.index}: {leaf}, which lies on another stage, is called again in "
                    "the backward, as by a checkpoint around modules of several stages; checkpoint "
                    "each module by itself, or cut where a checkpoint begins"
                )
            return run(*args, **kwargs)
        with self._hooks.paused():  # the forward alone is watched
            index = self._next
            call = self._expected(plan, leaf)
            self._next = index + 1
            if plan.plan.stages[index] != self.index:
                result = self._substitute(plan, index, call)
            else:
                result = self._run(plan, index, call, run, args, kwargs)
            if self._random is not None:
                if self._next == plan.rerun_until:  # from here on, this code runs first here
                    set_random_state(self.device, self._random)
                if self._next == plan.end:  # from here on, it runs again on the next stage
                    self._random = random_state(self.device)
        return result

    def _expected(self, plan: StagePlan, leaf: str) -> LeafCall:
        """The call that the trace had here.

        Raises:
            StopForward: the stage needs nothing more.
            PartitionError: the trace had another one.
        """
        index, calls = self._next, plan.plan.calls
        if index >= plan.end and plan.end < len(calls):
            if self._random is not None:
                set_random_state(self.device, self._random)
            raise StopForward
        call = calls[index] if index < len(calls) else None
        if call is None or call.leaf != leaf:
            traced = "nothing more" if call is None else call.leaf
            raise PartitionError(
                f"stage {self.index} calls {leaf} where its trace called {traced}; which modules a "
                "model calls may not depend on values"
            )
        return call

    def _substitute(self, plan: StagePlan, index: int, call: LeafCall) -> Any:
        """The result of another stage's leaf module: values that crossed, and placeholders."""
        leaves, refs = plan.placeholders(index)
        for i, ref in refs:
            value = self._values.get(ref)
            if value is not None:
                self._refuse_detached(value.requires_grad, call.leaf)
                leaves[i] = value.clone() if i in call.written else value
        ((result, captured),) = unflatten(call.output.tree, leaves)
        replay(captured)
        return result

    def _run(
        self,
        plan: StagePlan,
        index: int,
        call: LeafCall,
        run: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = flatten((args, kwargs))[0]
        missing = refs_of(given)
        if missing:
            raise PartitionError(
                f"stage {self.index}: {call.leaf} is called with {describe_refs(missing)}, which "
                "its trace did not show and which is not here; do its inputs depend on values?"
            )
        marked, snapshot, versions = mark(), self._snapshot(call.leaf, run), TensorVersions(given)
        before = snapshot.values()
        result = run(*args, **kwargs)
        for i in versions.written():
            if i not in call.writes:
                raise PartitionError(
                    f"stage {self.index}: {call.leaf} writes into argument {i}, which it did not "
                    "in its trace; have it return a new tensor instead"
                )
        unseen = [name for name in snapshot.fresh_tensors(before) if name not in call.changes]
        if unseen:
            raise PartitionError(
                f"stage {self.index}: {call.leaf} keeps tensors in its attribute {unseen[0]}, "
                "which it did not in its trace; other stages would not see them; have it return "
                "them"
            )
        if self._has_grad and not torch.is_grad_enabled() and index in plan.sends:
            takers = (x for x in (*run.parameters(), *given) if isinstance(x, Tensor))
            self._refuse_detached(any(x.requires_grad for x in takers), call.leaf)
        return self._keep(plan, index, call, result, marked)

    def _snapshot(self, leaf: str, run: nn.Module) -> ModuleSnapshot:
        """Looks at a leaf module's attributes in every call: what it sets may depend on values."""
        if self._snapshots.get(leaf, (None,))[0] is not run:
            self._snapshots[leaf] = run, ModuleSnapshot(run)
        return self._snapshots[leaf][1]

    def _refuse_detached(self, takes_grad: bool, leaf: str) -> None:
        """Refuse a crossing value whose gradient is lost; none is where the model says no_grad."""
        if takes_grad and self._has_grad and not torch.is_grad_enabled() and in_function_forward():
            raise PartitionError(
                f"{leaf} is called within an autograd function, as by a checkpoint with "
                "use_reentrant=True, but its result crosses to another stage: its gradient would "
                "be lost; use use_reentrant=False, or freeze its parameters"
            )

    def _keep(
        self,
        plan: StagePlan,
        index: int,
        call: LeafCall,
        result: Any,
        marked: Mapping[str, int] | None,
    ) -> Any:
        """Check an own result against the trace, and keep what crosses of it."""
        leaves, tree = flatten(((result, capture_since(marked)),))
        expected = call.output.leaves
        if tree != call.output.tree:
            got = unflatten(tree, [_Shown(leaf) for leaf in leaves])
            traced = unflatten(call.output.tree, [_Shown(leaf) for leaf in expected])
            raise PartitionError(
                f"stage {self.index}: {call.leaf} returned {_told(got)}, in its trace "
                f"{_told(traced)}; how many values it returns, and in which containers, may not "
                "depend on values"
            )
        kept: list[ValueRef] = []
        changed = False
        for i, (leaf, meta) in enumerate(zip(leaves, expected, strict=True)):
            if not isinstance(meta, TensorMeta) or not isinstance(leaf, Tensor):
                same = not isinstance(leaf, Tensor) and leaf == meta
            else:
                same = leaf.dtype is meta.dtype and (
                    leaf.shape == meta.shape or index >= plan.alone_from
                )
            if not same:
                got = TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf
                raise PartitionError(
                    f"stage {self.index}: output {i} of {call.leaf} is {got}, in its trace {meta}; "
                    "other stages run by what the trace showed"
                )
            ref = plan.sent.get((index, i))
            if ref is not None:
                self._values[ref] = leaf
                kept.append(ref)
                if i in call.written:
                    leaves[i] = leaf.clone()
                    changed = True
        self._versions.append((kept, TensorVersions(self._values[ref] for ref in kept)))
        return unflatten(tree, leaves)[0][0] if changed else result


def _told(output: Sequence[Any]) -> str:
    ((result, captured),) = output
    return f"{result!r}, appending {captured}" if captured else repr(result)


class _Shown:
    """A leaf that a message shows by its dtype and shape, or by its value."""

    def __init__(self, leaf: Any) -> None:
        meta = TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf
        self._text = meta.kind if isinstance(meta, TensorMeta) else repr(meta)

    def __repr__(self) -> str:
        """The text."""
        return self._text
