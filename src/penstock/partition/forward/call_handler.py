"""StageCallHandler: the results of leaf modules on one stage.

    calls          0     1     2     3     4        of a plan with three stages, for stage 1
    stage          0     0     1     1     2
    own module                 runs, and what crosses of its result is kept
    another's      gives the value that crossed, or a placeholder
    rerun_until    ├───────────┤                    stage 0 runs this top-level code too
    end            ├─────────────────────┤          behind that, the forward is left

The handler holds no modules and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from optree import PyTreeSpec
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
from penstock.stage.boundary import TensorMeta
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.rng import random_state, set_random_state

__all__ = ["StageCallHandler", "StagePlan", "StopForward"]


_Refs: TypeAlias = list[tuple[int, ValueRef]]


class StopForward(BaseException):  # not an Exception, so that no model catches it
    """Stop the model's forward once this stage needs no more of it."""


class StagePlan:
    """One stage's part of a ``ForwardPlan``.

    Attributes:
        end: the number of calls that the stage needs.
        sent: the reference of each value sent on, by call and leaf.
        sends: the calls in ``sent``.
        rerun_until: the number of calls up to which earlier stages also run the top-level forward.
        alone_from: the call from which on only this stage runs it.
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
        """The leaves that replace a call's result, and the references of its tensors."""
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
        if not call.written:  # later code would write into the placeholders of this microbatch
            self._placeholders[key] = list(leaves), refs
        return leaves, refs


class StageCallHandler:
    """Run a stage's own leaf modules, and substitute the results of others (a ``CallHandler``).

    Args:
        index: the index of the stage.
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
            plan: the microbatch's plan, kept by the caller.
            values: the values that have arrived; the stage's own values that cross are added.
            hooks: a watcher of the top-level forward.
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
        # Re-run top-level code must not advance the RNG.
        self._random = random_state(self.device) if plan.draws else None

    def end(self) -> None:
        """Release the microbatch, completed or failed."""
        self._plan = None
        self._values, self._versions = {}, []

    def check_done(self) -> None:
        """Check that all own modules ran, and that crossing values were not modified since.

        Raises:
            PartitionError: a module did not run, or a crossing value was modified.
        """
        assert self._plan is not None
        if self._next < self._plan.end:
            missing = self._plan.plan.calls[self._next].leaf
            raise self._error(
                f"{missing} was not called, but was in the trace; which modules a model calls may "
                "not depend on values"
            )
        for refs, versions in self._versions:
            for i in versions.written():
                raise self._error(
                    f"{refs[i]} crosses to other stages, but was written into after it was "
                    "computed; compute a new tensor instead"
                )

    def refuse_hook(self, what: str) -> None:
        """Refuse a tensor hook where an earlier stage runs the same code, since it would run twice.

        Raises:
            PartitionError: an earlier stage runs the same code.
        """
        if self._plan is not None and self._next <= self._plan.rerun_until:
            raise self._error(
                f"the top-level forward {what}, which earlier stages do too, so that a hook would "
                "act on each; do it within a module, or use an autograd.Function"
            )

    def call(self, leaf: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a leaf module."""
        plan = self._plan
        if plan is None:  # recomputed in the backward, by checkpointing
            if is_stub(run):
                raise self._error(
                    f"{leaf}, which lies on another stage, is called again in the backward, as by "
                    "a checkpoint around modules of several stages; checkpoint each module by "
                    "itself, or cut where a checkpoint begins"
                )
            return run(*args, **kwargs)
        with self._hooks.paused():  # only the top-level forward is watched
            index = self._next
            call = self._expected(plan, leaf)
            self._next = index + 1
            if plan.plan.stages[index] != self.index:
                result = self._substitute(plan, index, call)
            else:
                result = self._run(plan, index, call, run, args, kwargs)
            if self._random is not None:
                if self._next == plan.rerun_until:  # from here on, first run is here
                    set_random_state(self.device, self._random)
                if self._next == plan.end:  # from here on, the next stage runs this code again
                    self._random = random_state(self.device)
        return result

    def _error(self, text: str) -> PartitionError:
        return PartitionError(f"stage {self.index}: {text}")

    def _expected(self, plan: StagePlan, leaf: str) -> LeafCall:
        """The traced call expected here."""
        index, calls = self._next, plan.plan.calls
        if index >= plan.end and plan.end < len(calls):
            if self._random is not None:
                set_random_state(self.device, self._random)
            raise StopForward
        call = calls[index] if index < len(calls) else None
        if call is None or call.leaf != leaf:
            traced = "nothing more" if call is None else call.leaf
            raise self._error(
                f"the model calls {leaf} where its trace called {traced}; which modules a model "
                "calls may not depend on values"
            )
        return call

    def _substitute(self, plan: StagePlan, index: int, call: LeafCall) -> Any:
        """The result of another stage's leaf module: received values, and placeholders."""
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
        """Run an own leaf module, and check that it behaves as in the trace."""
        given = flatten((args, kwargs))[0]
        missing = refs_of(given)
        if missing:
            raise self._error(
                f"{call.leaf} is called with {describe_refs(missing)}, which its trace did not "
                "show and which is not here; do its inputs depend on values?"
            )
        if self._snapshots.get(call.leaf, (None,))[0] is not run:
            self._snapshots[call.leaf] = run, ModuleSnapshot(run)
        snapshot = self._snapshots[call.leaf][1]
        marked, before, versions = mark(), snapshot.values(), TensorVersions(given)
        result = run(*args, **kwargs)
        for i in versions.written():
            if i not in call.writes:
                raise self._error(
                    f"{call.leaf} writes into argument {i}, which it did not in its trace; have it "
                    "return a new tensor instead"
                )
        for name in snapshot.fresh_tensors(before):
            if name not in call.changes:
                raise self._error(
                    f"{call.leaf} keeps tensors in its attribute {name}, which it did not in its "
                    "trace; other stages would not see them; have it return them"
                )
        if self._has_grad and not torch.is_grad_enabled() and index in plan.sends:
            takers = (x for x in (*run.parameters(), *given) if isinstance(x, Tensor))
            self._refuse_detached(any(x.requires_grad for x in takers), call.leaf)
        leaves, tree = flatten(((result, capture_since(marked)),))
        if tree != call.output.tree:
            raise self._error(
                f"{call.leaf} returned {_shown(tree, leaves)}, in its trace "
                f"{_shown(call.output.tree, call.output.leaves)}; how many values it returns, and "
                "in which containers, may not depend on values"
            )
        self._refuse_other_leaves(plan, index, call, leaves)
        crossing = [(i, plan.sent[index, i]) for i in range(len(leaves)) if (index, i) in plan.sent]
        self._values.update({ref: leaves[i] for i, ref in crossing})
        refs = [ref for _, ref in crossing]
        self._versions.append((refs, TensorVersions(self._values[ref] for ref in refs)))
        later = [i for i, _ in crossing if i in call.written]
        if not later:
            return result
        for i in later:
            leaves[i] = leaves[i].clone()
        return unflatten(tree, leaves)[0][0]

    def _refuse_other_leaves(
        self, plan: StagePlan, index: int, call: LeafCall, leaves: Sequence[Any]
    ) -> None:
        for i, (leaf, meta) in enumerate(zip(leaves, call.output.leaves, strict=True)):
            if isinstance(leaf, Tensor):
                same = isinstance(meta, TensorMeta) and leaf.dtype is meta.dtype
                same = same and (leaf.shape == meta.shape or index >= plan.alone_from)
            else:
                same = leaf == meta
            if not same:
                got = TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf
                raise self._error(
                    f"output {i} of {call.leaf} is {got}, in its trace {meta}; other stages run by "
                    "what the trace showed"
                )

    def _refuse_detached(self, takes_grad: bool, leaf: str) -> None:
        """Refuse a crossing value whose gradient is lost, unless the model uses no_grad there."""
        if takes_grad and self._has_grad and not torch.is_grad_enabled() and in_function_forward():
            raise self._error(
                f"{leaf} is called within an autograd function, as by a checkpoint with "
                "use_reentrant=True, but its result crosses to another stage: its gradient would "
                "be lost; use use_reentrant=False, or freeze its parameters"
            )


def _shown(tree: PyTreeSpec, leaves: Sequence[Any]) -> str:
    """A result with its tensors replaced by dtypes and shapes, and the values collected by
    hooks."""
    ((result, captured),) = unflatten(tree, [_Shown(leaf) for leaf in leaves])
    return f"{result!r}, appending {captured}" if captured else repr(result)


class _Shown:
    def __init__(self, leaf: Any) -> None:
        meta = TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf
        self._text = meta.kind if isinstance(meta, TensorMeta) else repr(meta)

    def __repr__(self) -> str:
        return self._text
