"""One stage of a model cut by module, as an ``nn.Module``.

stage 0   forward(ids, labels)        the model's arguments
          ──► plan, values            the boundary values; the plan says which is which
stage 1   forward(plan, values)       the model's own forward, with its own modules
          ──► the model's output

calls          0     1     2     3     4        of a plan with three stages, for stage 1
stage          0     0     1     1     2
own module                 runs, and its boundary values are kept
other stages'  modules give the received boundary value, or a placeholder
rerun_until    ├───────────┤                    stage 0 runs this top-level code too
end            ├─────────────────────┤          the forward stops here
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, NoReturn, TypeAlias

import torch
from optree import PyTreeSpec
from torch import Tensor, nn

from penstock._torch_compat import HookWatch, autocast_state, compile_in_place, in_function_forward
from penstock.errors import PartitionError
from penstock.partition.forward.forward_plan import ForwardPlan
from penstock.partition.forward.forward_trace import LeafCall
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.module_state import AttributeValues, TensorVersions
from penstock.partition.forward.placeholder import (
    ValueKind,
    ValueRef,
    describe_refs,
    make_placeholder,
    refs_of,
)
from penstock.partition.forward.stage_tree import StageTree
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.spec import with_remote_kwargs
from penstock.stage.boundary import TensorMeta
from penstock.stage.device_streams import widest_float
from penstock.stage.pytree import flatten, is_plain, unflatten
from penstock.stage.rng import random_state, set_random_state

__all__ = ["ModuleStage"]

Values: TypeAlias = dict[ValueRef, Tensor]
# After so many plans, of as many shapes of inputs, a stage forgets them all.
MAX_PLANS = 256


class ModuleStage(nn.Module):
    """One stage of a model, under the plain model's names.

    Args:
        leaves: the leaf modules of the plain model.
        own: the names of those, and of direct parameters, that become the stage's.
        index: the index of the stage.
        make_plan: on the first stage, a function from positional arguments, keyword arguments and
            training mode to a plan.
        device: the device of the stage.
    """

    _handler: _StageCallHandler
    _tree: StageTree

    def __init__(
        self,
        leaves: LeafModules,
        own: frozenset[str],
        index: int,
        make_plan: Callable[[tuple[Any, ...], dict[str, Any], bool], ForwardPlan] | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._handler = _StageCallHandler(index, device)
        self._tree = StageTree(leaves, own, self._handler.call, device)
        self._tree.register(self, leaves)
        self.training = leaves.model.training
        self._make_plan = make_plan
        self._own_leaves = [name for name in leaves.leaves if name in own]
        # By the key of its inputs on the first stage, as received on later ones.
        self._plans: dict[Any, _StagePlan] = {}

    def compile(self, **options: Any) -> None:
        """Compile each of the stage's leaf modules in place. The forward above them can't be: it
        meets placeholders."""
        for name in self._own_leaves:
            compile_in_place(self.get_submodule(name), **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage on the model's arguments, or on the previous stage's output.

        Returns the model's output on the last stage, else the next stage's input. Raises a
        PartitionError where the forward differs from its trace.
        """
        values: Values
        inputs: dict[int, Any]
        if self._handler.index == 0:
            key = self._key(args, kwargs)
            if key not in self._plans:
                assert self._make_plan is not None
                self.prepare(args, kwargs, self._make_plan(args, kwargs, self.training))
            plan, leaves = self._plans[key], flatten((args, kwargs))[0]
            inputs = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor | float)}
            values = {r: inputs[r.leaf] for r in plan.sent_refs if r.kind is ValueKind.INPUT}
            given = [inputs[i] for i in plan.floats]
            device = self._handler.device
            floats = [torch.tensor(given, dtype=widest_float(device), device=device)]
        else:
            key, tensors = args
            if key not in self._plans:
                self._cache(key, ForwardPlan.decode(key))
            plan = self._plans[key]
            num_values = len(plan.received_refs)
            pairs = zip(plan.received_refs, tensors[:num_values], strict=True)
            values = {ref: plan.restored(ref, value) for ref, value in pairs}
            inputs = {r.leaf: value for r, value in values.items() if r.kind is ValueKind.INPUT}
            floats = tensors[num_values:]
            for each in floats:
                inputs |= zip(plan.floats, each.tolist(), strict=True)
            inputs |= plan.passed_here(kwargs)
        beside, (args, kwargs) = kwargs, plan.arguments(inputs)
        if any(beside[name] is not None for name in beside.keys() - kwargs.keys()):
            self._refuse_unplanned(beside, args, kwargs)
        self._tree.sync_modules()
        params = {r.name: value for r, value in values.items() if r.kind is ValueKind.PARAMETER}
        with self._tree.substituted(params):
            output = self._handler.run(plan, values, lambda: self._tree.root(*args, **kwargs))
        if not plan.is_last:
            for ref in plan.sent_refs:
                if ref not in values and ref.kind is ValueKind.PARAMETER:
                    own = self._tree.own_tensor(ref.name)
                    values[ref] = own.view_as(own) if torch.is_grad_enabled() else own.detach()
            sent = (values[ref] for ref in plan.sent_refs)
            return plan.encoded, (*sent, *floats) if plan.floats else tuple(sent)
        missing = refs_of(flatten(output)[0])
        if missing:
            raise PartitionError(
                f"the model's output needs {describe_refs(missing)}, which is not here and was not "
                "needed in its trace; what it computes with may not depend on values"
            )
        return output

    def complete_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], others: Any
    ) -> dict[str, Any]:
        """The first stage's keyword arguments, with those of other ranks that the call lacks."""
        forward = inspect.signature(type(self._tree.root).forward)
        return with_remote_kwargs(forward, (None, *args), kwargs, others)

    def _refuse_unplanned(
        self, beside: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse keyword arguments of this rank that the first stage's trace was made without."""
        bound = inspect.signature(type(self._tree.root).forward).bind_partial(None, *args, **kwargs)
        for name in beside.keys() - kwargs.keys() - bound.arguments.keys():
            if beside[name] is not None:
                raise PartitionError(
                    f"stage {self._handler.index}: the argument {name} is passed here, but not on "
                    "the rank of the first stage, where the model is traced; pass it there too"
                )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copying and pickling: the tree that runs reports to this stage alone."""
        raise TypeError(
            "a stage cut by module can't be copied or pickled; save its state_dict(), and for "
            "averages of weights copy its parameters()"
        )

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: ForwardPlan) -> None:
        """Cache the plan for inputs of these shapes."""
        self._cache(self._key(args, kwargs), plan)

    def _cache(self, key: Any, plan: ForwardPlan) -> None:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = _StagePlan(plan, self._handler)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        leaves, tree = flatten((args, kwargs))
        marks = [
            (leaf.shape, leaf.dtype)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf if is_plain(leaf) and not isinstance(leaf, float) else None)
            for leaf in leaves
        ]
        return (tree, self.training, autocast_state(self._handler.device), *marks)


class _StagePlan:
    """One stage's part of a ``ForwardPlan``.

    Attributes:
        encoded: the plan of all stages, with the dtypes of the calls so far, as it is sent.
        remote_inputs: the indices of the model's arguments that other ranks pass to their stages.
        floats: the indices of the floats among the model's arguments. They may change at any step,
            so that they cross with the tensors, as one more.
        trace, calls, stages: of that plan.
        is_last: True on the last stage.
        received_refs, sent_refs: the values that arrive, and that are sent on.
        received, sent: the outputs among them, by call.
        end: the number of calls that the stage needs.
        rerun_until: the number of calls up to which earlier stages also run the top-level forward.
    """

    def __init__(self, plan: ForwardPlan, handler: _StageCallHandler) -> None:
        index, self._device = handler.index, handler.device
        ends = {stage: i + 1 for i, stage in enumerate(plan.stages)}
        self._plan, self.encoded, self.stages = plan, plan.encode(), plan.stages
        self.trace, self.calls = plan.trace, list(plan.trace.calls)
        self.remote_inputs, inputs = plan.remote_inputs, plan.trace.inputs
        self.floats = tuple(i for i, x in enumerate(inputs.leaves) if isinstance(x, float))
        self._names = [
            ".".join(map(str, path[2:])) if path[1] else f"argument {path[2]}"
            for path in inputs.tree.paths()
        ]
        self.is_last = index == len(plan.boundary_values)
        self.received_refs = plan.boundary_values[index - 1] if index else ()
        self.sent_refs = () if self.is_last else plan.boundary_values[index]
        self.received, self.sent = map(_outputs_by_call, (self.received_refs, self.sent_refs))
        self.end = len(self.calls) if self.is_last else ends.get(index, 0)
        self.rerun_until = max((ends.get(i, 0) for i in range(index)), default=-1)
        self._outputs: dict[tuple[int, bool], list[Any]] = {}

    def arguments(self, inputs: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, with placeholders for tensors that are not among ``inputs``."""
        leaves: list[Any] = list(self.trace.inputs.leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, TensorMeta) and i in inputs:
                leaves[i] = inputs[i].clone() if i in self.trace.written else inputs[i]
            elif isinstance(leaf, TensorMeta):
                ref = ValueRef(ValueKind.INPUT, 0, i, self._names[i])
                leaves[i] = make_placeholder(leaf, self._device, ref)
            elif i in inputs:
                leaves[i] = inputs[i]
        ((args, kwargs),) = unflatten(self.trace.inputs.tree, leaves)
        return args, kwargs

    def passed_here(self, beside: Mapping[str, Any]) -> dict[int, Any]:
        """The inputs that no stage sends, by index, among this rank's keyword arguments."""
        if not self.remote_inputs:
            return {}
        numbers = list(range(len(self.trace.inputs.leaves)))
        ((_, planned),) = unflatten(self.trace.inputs.tree, numbers)
        found: dict[int, Any] = {}
        for name in beside.keys() & planned.keys():
            found |= zip(flatten(planned[name])[0], flatten(beside[name])[0], strict=True)
        return {i: found[i] for i in self.remote_inputs if isinstance(found.get(i), Tensor)}

    def restored(self, ref: ValueRef, value: Tensor) -> Tensor:
        """A received value in the dtype that its stage computed, since FSDP may cast arguments.

        Raises a PartitionError if the cast has rounded it.
        """
        meta = self.trace.meta_of(ref)
        if meta is None or value.dtype is meta.dtype:
            return value
        if torch.promote_types(value.dtype, meta.dtype) is not value.dtype:
            raise PartitionError(
                f"{ref} is {meta.dtype}, but the wrapper of the next stage casts it to "
                f"{value.dtype}, which the whole model would not; shard that stage with "
                "MixedPrecisionPolicy(cast_forward_inputs=False), and its layers as before"
            )
        return value.to(meta.dtype)

    def retype(self, calls: Mapping[int, LeafCall]) -> None:
        """Adopt the dtypes that calls of this stage have returned, by their index.

        They differ from the trace where the model was sharded or cast after the cut.
        """
        for index, call in calls.items():
            if index < self.rerun_until:
                raise PartitionError(
                    f"{call.leaf} returns {call.output.metas[0].dtype} tensors, other ones than in "
                    "its trace, and earlier stages run the code behind its call; cast or shard "
                    "the model before it is cut, or cut it so that stages call in turn"
                )
            self.calls[index] = call
        self.trace = replace(self.trace, calls=tuple(self.calls))
        self.encoded = replace(self._plan, trace=self.trace).encode()

    def placeholders(self, index: int) -> list[Any]:
        """The leaves that replace a call's result: placeholders and plain values."""
        key = (index, torch.is_grad_enabled())
        if key in self._outputs:
            return list(self._outputs[key])
        call = self.calls[index]
        leaves = [
            make_placeholder(leaf, self._device, ValueRef(ValueKind.OUTPUT, index, i, call.leaf))
            if isinstance(leaf, TensorMeta)
            else leaf
            for i, leaf in enumerate(call.output.leaves)
        ]
        if not call.written:  # later code would write into the placeholders of this microbatch
            self._outputs[key] = list(leaves)
        return leaves


def _outputs_by_call(refs: Sequence[ValueRef]) -> dict[int, list[ValueRef]]:
    outputs = [ref for ref in refs if ref.kind is ValueKind.OUTPUT]  # in the order of their calls
    return {call: list(group) for call, group in groupby(outputs, lambda ref: ref.call)}


class _StopForward(BaseException):  # not an Exception, so that no model catches it
    """Stop the model's forward once this stage needs no more of it."""


class _StageCallHandler:
    """Run a stage's own leaf modules, and substitute the results of others."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self._attributes: dict[str, tuple[nn.Module, AttributeValues]] = {}
        self._plan: _StagePlan | None = None

    def run(self, plan: _StagePlan, values: Values, forward: Callable[[], Any]) -> Any:
        """Run the model's forward for one microbatch, up to this stage's last module.

        Adds the stage's own values that cross to ``values``, the values that have arrived. Returns
        the model's output, or None if the forward was left before.
        """
        self._plan, self._values, self._next = plan, values, 0
        self._retyped: dict[int, LeafCall] = {}
        self._versions = [(list(values), TensorVersions(values.values()))]
        self._has_grad = torch.is_grad_enabled()
        # Re-run top-level code must not advance the RNG.
        self._random = random_state(self.device) if plan.trace.draws else None
        output = None
        try:
            with HookWatch(self._refuse_hook) as self._hooks, suppress(_StopForward):
                output = forward()
            if self._next < plan.end:
                raise self._differs(f"{plan.calls[self._next].leaf} is not called any more")
            if self._retyped:
                plan.retype(self._retyped)
            for refs, versions in self._versions:
                for i in versions.written():
                    raise self._error(
                        f"{refs[i]} crosses to other stages, but was written into after it was "
                        "computed; compute a new tensor instead"
                    )
        finally:
            self._plan = None
            self._values, self._versions, self._retyped = {}, [], {}
        return output

    def _refuse_hook(self, what: str) -> None:
        """Refuse a tensor hook where an earlier stage runs the same code."""
        if self._plan is not None and self._next <= self._plan.rerun_until:
            raise self._error(
                f"the top-level forward {what}, which earlier stages do too, so that a hook would "
                "act on each; do it within a module, or use an autograd.Function"
            )

    def call(
        self, leaf: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a leaf module (a ``CallHandler``)."""
        plan = self._plan
        if plan is None:  # recomputed in the backward, by checkpointing
            if module is not None:
                return module(*args, **kwargs)
            raise self._error(
                f"{leaf}, which lies on another stage, is called again in the backward, as by a "
                "checkpoint around modules of several stages; checkpoint each module by itself, "
                "or cut where a checkpoint begins"
            )
        with self._hooks.paused():  # only the top-level forward is watched
            call = self._expected(plan, leaf)
            if plan.stages[self._next] == self.index:
                assert module is not None
                result = self._run(plan, call, module, args, kwargs)
            else:
                result = self._substitute(plan, call)
            self._next += 1
            if self._random is not None and self._next == plan.rerun_until:
                set_random_state(self.device, self._random)  # from here on, first run is here
            if self._random is not None and self._next == plan.end:
                self._random = random_state(self.device)  # from here on, the next stage runs again
        return result

    def _error(self, text: str) -> PartitionError:
        return PartitionError(f"stage {self.index}: {text}")

    def _differs(self, text: str) -> PartitionError:
        return self._error(
            f"{text}; stages run by the model's trace: which modules it calls, and what these "
            "take, return, write and keep, may not depend on values, nor on floats, which may "
            "change at any step (an int, a bool or a str may choose)"
        )

    def _expected(self, plan: _StagePlan, leaf: str) -> LeafCall:
        """The traced call expected here."""
        calls = plan.calls
        if self._next >= plan.end and plan.end < len(calls):
            if self._random is not None:
                set_random_state(self.device, self._random)
            raise _StopForward
        call = calls[self._next] if self._next < len(calls) else None
        if call is None or call.leaf != leaf:
            traced = "nothing more" if call is None else call.leaf
            raise self._differs(f"the model calls {leaf} where its trace called {traced}")
        return call

    def _substitute(self, plan: _StagePlan, call: LeafCall) -> Any:
        """The result of another stage's leaf module: received values, and placeholders."""
        leaves = plan.placeholders(self._next)
        for ref in plan.received.get(self._next, ()):
            value = self._values[ref]
            leaves[ref.leaf] = value.clone() if ref.leaf in call.written else value
        ((result, captured),) = unflatten(call.output.tree, leaves)
        replay(captured)
        return result

    def _run(
        self, plan: _StagePlan, call: LeafCall, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run an own leaf module, and check that it behaves as in the trace."""
        given = flatten((args, kwargs))[0]
        missing = refs_of(given)
        if any(ref.kind is ValueKind.INPUT and ref.leaf in plan.remote_inputs for ref in missing):
            raise self._error(
                f"{call.leaf} takes {describe_refs(missing)}, which is passed on another rank; "
                "pass it on the rank of this stage or of the first"
            )
        if missing:
            raise self._differs(f"{call.leaf} is called with {describe_refs(missing)}, not here")
        if self._attributes.get(call.leaf, (None,))[0] is not module:
            self._attributes[call.leaf] = module, AttributeValues(module)
        attributes = self._attributes[call.leaf][1]
        attributes.record()
        marked, versions = mark(), TensorVersions(given)
        result = module(*args, **kwargs)
        for i in versions.written():
            if i not in call.writes:
                raise self._differs(f"{call.leaf} writes into argument {i}")
        for name in attributes.fresh_tensors():
            if name not in call.changes:
                raise self._differs(f"{call.leaf} keeps tensors in its attribute {name}")
        sent = plan.sent.get(self._next, [])
        if sent and self._has_grad and in_function_forward():
            takers = (x for x in (*module.parameters(), *given) if isinstance(x, Tensor))
            if any(x.requires_grad for x in takers):
                raise self._error(
                    f"{call.leaf} is called within an autograd function, as by a checkpoint with "
                    "use_reentrant=True, but its result crosses to another stage: its gradient "
                    "would be lost; use use_reentrant=False, or freeze its parameters"
                )
        leaves, tree = flatten(((result, capture_since(marked)),))
        any_shape = plan.is_last and self._next >= plan.rerun_until  # for this stage alone
        if tree != call.output.tree or not all(
            _is_like(leaf, traced, any_shape)
            for leaf, traced in zip(leaves, call.output.leaves, strict=True)
        ):
            raise self._differs(
                f"{call.leaf} returned {_shown(tree, leaves)}, in its trace "
                f"{_shown(call.output.tree, call.output.leaves)}"
            )
        output = call.output.retyped(leaves)
        if output is not call.output:
            self._retyped[self._next] = replace(call, output=output)
        self._values.update({ref: leaves[ref.leaf] for ref in sent})
        self._versions.append((sent, TensorVersions(leaves[ref.leaf] for ref in sent)))
        for ref in sent:
            if ref.leaf in call.written:
                leaves[ref.leaf] = leaves[ref.leaf].clone()
                result = unflatten(tree, leaves)[0][0]
        return result


def _is_like(leaf: Any, traced: Any, any_shape: bool) -> bool:
    if isinstance(leaf, Tensor) and isinstance(traced, TensorMeta):
        are_floats = leaf.is_floating_point() and traced.dtype.is_floating_point
        same = are_floats or leaf.dtype is traced.dtype
        return same and (any_shape or leaf.shape == traced.shape)
    return not isinstance(leaf, Tensor) and bool(leaf == traced)


def _shown(tree: PyTreeSpec, leaves: Sequence[Any]) -> str:
    """A result, and what hooks have collected, with tensors as dtypes and shapes."""
    metas = (TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    kinds = [meta.kind if isinstance(meta, TensorMeta) else meta for meta in metas]
    ((result, captured),) = unflatten(tree, kinds)
    return f"{result!r}, appending {captured}" if captured else repr(result)
