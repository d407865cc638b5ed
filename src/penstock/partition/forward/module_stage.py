"""One stage of a model cut by module, as an ``nn.Module``.

    stage 0   forward(ids, labels)        the model's arguments
              ──► plan, values            the boundary values; the plan says which is which
    stage 1   forward(plan, values)       the model's own forward, with its own modules
              ──► the model's output

A stage runs the model's forward up to its own last module. This module knows neither schedules nor
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock._torch_compat import HookWatch, autocast_state
from penstock.errors import PartitionError
from penstock.partition.forward.call_handler import StageCallHandler, StopForward
from penstock.partition.forward.forward_plan import ForwardPlan
from penstock.partition.forward.forward_trace import input_names
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.placeholder import (
    ValueKind,
    ValueRef,
    describe_refs,
    make_placeholder,
    refs_of,
)
from penstock.partition.forward.stage_tree import StageTree, registered_tree, registry_of
from penstock.stage.boundary import TensorMeta
from penstock.stage.pytree import flatten, unflatten

__all__ = ["MakePlan", "ModuleStage"]

MakePlan = Callable[[tuple[Any, ...], Mapping[str, Any], bool], ForwardPlan]
"""A function from positional arguments, keyword arguments and training mode to a plan."""


class ModuleStage(nn.Module):
    """One stage of a model, under the plain model's names.

    Args:
        leaves: the leaf modules of the plain model, whose modules and parameters become the
            stage's.
        own: the names of the leaf modules, and of direct parameters, that this stage holds.
        index: the index of the stage.
        num_stages: the number of stages.
        make_plan: a function that plans for inputs of new shapes; needed only on the first stage.
        device: the device of the stage.
    """

    _handler: StageCallHandler
    _tree: StageTree

    def __init__(
        self,
        leaves: LeafModules,
        own: frozenset[str],
        index: int,
        num_stages: int,
        make_plan: MakePlan | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        tree = registered_tree(leaves, own)
        for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, registry, vars(tree)[registry])
        self.training = leaves.model.training
        self._handler = StageCallHandler(index, device)
        # Not set as module attributes, since the tree contains modules that this stage does not
        # hold.
        self._tree = StageTree(leaves, own, self._handler, device, self)
        self._index = index
        self._is_last = index == num_stages - 1
        self._make_plan = make_plan
        # The cached plans: by input on the first stage, as received on later ones.
        self._known: dict[Any, tuple[bytes, ForwardPlan, list[tuple[ValueRef, int]]]] = {}
        self._received: dict[bytes, ForwardPlan] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage.

        Args:
            args: the model's arguments on the first stage, else the previous stage's output.
            kwargs: the model's keyword arguments on the first stage; later stages receive them in
                ``args``.

        Returns:
            On the last stage the model's output, else the next stage's input.

        Raises:
            PartitionError: the forward differs from its trace.
        """
        if self._index == 0:
            data, plan, values = self._enter(args, kwargs)
        else:
            data, tensors = args
            if data not in self._received:
                self._received[data] = ForwardPlan.decode(data)
            plan = self._received[data]
            values = dict(zip(plan.boundary_values[self._index - 1], tensors, strict=True))
        args, kwargs = self._inputs(plan, values)
        output = self._run(plan, values, args, kwargs)
        if self._is_last:
            missing = refs_of(flatten(output)[0])
            if missing:
                raise PartitionError(
                    f"the model's output needs {describe_refs(missing)}, which its trace did not "
                    "show and which is not here; does what it computes depend on values?"
                )
            return output
        return data, tuple(self._sent(ref, values) for ref in plan.boundary_values[self._index])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copying and pickling: the tree that runs reports to this stage alone."""
        raise TypeError(
            "a stage cut by module can't be copied or pickled; save its state_dict(), and for "
            "averages of weights copy its parameters()"
        )

    # --- plans -------------------------------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: ForwardPlan) -> None:
        """Cache the plan for inputs of these shapes.

        Args:
            args: the model's positional arguments.
            kwargs: its keyword arguments.
            plan: the plan.
        """
        names = input_names(args, kwargs)
        refs = [
            (ValueRef(ValueKind.INPUT, 0, i, names[i]), i)
            for i, leaf in enumerate(flatten((args, kwargs))[0])
            if isinstance(leaf, Tensor)
        ]
        self._known[self._key(args, kwargs)] = (plan.encode(), plan, refs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        leaves, tree = flatten((args, kwargs))
        marks = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in leaves
        ]
        return (tree, self.training, autocast_state(self._handler.device), *marks)

    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, ForwardPlan, dict[ValueRef, Tensor]]:
        """The plan for these inputs, and their tensors by reference."""
        key = self._key(args, kwargs)
        if key not in self._known:
            assert self._make_plan is not None
            self.prepare(args, kwargs, self._make_plan(args, kwargs, self.training))
        data, plan, refs = self._known[key]
        leaves, _ = flatten((args, kwargs))
        return data, plan, {ref: leaves[i] for ref, i in refs}

    def _inputs(self, plan: ForwardPlan, values: dict[ValueRef, Tensor]) -> Any:
        """The model's arguments, with placeholders for missing ones."""
        here = {ref.leaf: value for ref, value in values.items() if ref.kind is ValueKind.INPUT}
        leaves: list[Any] = list(plan.inputs.leaves)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, TensorMeta):
                continue
            if i in here:
                leaves[i] = here[i].clone() if i in plan.written else here[i]
            else:
                ref = ValueRef(ValueKind.INPUT, 0, i, f"number {i}")
                leaves[i] = make_placeholder(leaf, self._handler.device, ref)
        ((args, kwargs),) = unflatten(plan.inputs.tree, leaves)
        return args, kwargs

    # --- running -----------------------------------------------------------------------------

    def _run(
        self, plan: ForwardPlan, values: dict[ValueRef, Tensor], args: Any, kwargs: Any
    ) -> Any:
        """The output of the model's forward, up to this stage's last module."""
        self._tree.sync_modules()
        handler, output = self._handler, None
        lent = {r.name: value for r, value in values.items() if r.kind is ValueKind.PARAMETER}
        try:
            with self._tree.lent(lent), HookWatch(handler.refuse_hook) as hooks:
                handler.begin(plan, values, hooks)
                with suppress(StopForward):
                    output = self._tree.root(*args, **kwargs)
            handler.check_done()
        finally:
            handler.end()
        return output

    def _sent(self, ref: ValueRef, values: dict[ValueRef, Tensor]) -> Tensor:
        if ref.kind is ValueKind.PARAMETER and ref not in values:
            registry, name = registry_of(self._tree.root, ref.name)
            own: Tensor = registry[name]
            return own.view_as(own) if torch.is_grad_enabled() else own.detach()
        return values[ref]
