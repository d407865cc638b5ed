"""Trace a model's forward on shapes: the calls of its leaf modules, and their inputs.

    call    wte    h.0    h.1    h.2    lm_head
    needs   ids    wte    h.0    h.1    h.2, labels

The model's own forward runs, with copies of its leaf modules, on placeholders. A leaf module that
can't run on shapes (such as a mixture of experts that routes tokens) runs on made-up values, and so
does code behind the last leaf module, which only the last stage runs. The model stays unchanged,
and its RNG state too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock._torch_compat import HookWatch, in_function_forward
from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.leaf_runner import LeafRunner
from penstock.partition.forward.module_state import (
    ModuleSnapshot,
    TensorVersions,
    are_same,
    is_opaque,
    tensors_in,
)
from penstock.partition.forward.placeholder import (
    PlaceholderTensor,
    TopLevelOps,
    ValueKind,
    ValueRef,
    on_meta,
    refs_of,
    turn_into_placeholder,
)
from penstock.partition.forward.stage_tree import StageTree, refuse_reads
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.spec import own_loss
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.pytree import flatten, map_tensors, unflatten
from penstock.stage.rng import host_random_states, preserve_rng_state

__all__ = [
    "DrawsOnHost",
    "ForwardTrace",
    "ForwardTracer",
    "LeafCall",
    "input_names",
    "replaced_message",
]

logger = logging.getLogger(__name__)


class DrawsOnHost(PartitionError):
    """The top-level forward draws from Python's or NumPy's generator.

    No way of cutting supports this: a captured graph would contain the number as a constant.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCall:
    """One call of a leaf module; leaves are numbered in flattened order."""

    leaf: str
    output: BoundarySpec  # the result, and the values that hooks collected inside the module
    needs: frozenset[ValueRef] = frozenset()  # the provenance of its arguments
    written: tuple[int, ...] = ()  # the leaves of the output that later code writes into
    writes: tuple[int, ...] = ()  # the leaves of its arguments that the module writes into
    changes: tuple[str, ...] = ()  # the buffers and attributes of its own that it changes
    detached: bool = False  # called within an autograd function, such as a reentrant checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTrace:
    """A trace of the whole model's forward."""

    inputs: BoundarySpec  # the model's arguments, ((args, kwargs),)
    calls: tuple[LeafCall, ...]
    # The provenance of the output, and all inputs that are not floating point: every stage
    # receives these, since masks derive from them, and control flow may depend on them.
    needs: frozenset[ValueRef]
    written: tuple[int, ...]  # the leaves of the inputs that the model writes into
    loss: bool  # True if the output has a scalar named loss
    changes: frozenset[str]  # the parameters and buffers that the top-level forward writes into
    draws: bool  # True if the top-level forward draws random numbers

    def first_calls(self) -> dict[str, int]:
        """The first call of each leaf module that was called."""
        calls = reversed(list(enumerate(self.calls)))
        return {call.leaf: i for i, call in calls}


class ForwardTracer:
    """Trace one model, for one or several shapes of inputs.

    Attributes:
        captures: True if hooks collect values within the model (see ``huggingface``).
    """

    def __init__(self, leaves: LeafModules, device: torch.device) -> None:
        self._tree = StageTree(leaves, (), self._call, device)
        for container in self._tree.containers.values():
            for name, value in vars(container).items():
                if isinstance(value, Tensor):  # the model's own, which must not be written
                    vars(container)[name] = value.detach().clone()
        self._runner = LeafRunner(leaves.leaves, device)
        self._device = device
        self.captures = False
        # Attributes set by leaf modules and replaced by the top-level forward. Reading one earlier
        # in a microbatch is an error, which the next run detects.
        self._set: set[tuple[str, str]] = set()
        self._replaced: dict[str, Tensor] = {}

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool
    ) -> ForwardTrace:
        """Trace the model, called with one microbatch.

        Raises:
            PartitionError: the model can't be traced.
        """
        known = -1
        while known < len(self._set) + len(self._replaced):
            known = len(self._set) + len(self._replaced)
            trace = self._run(args, dict(kwargs), training)
        self._runner.end_trace()
        return trace

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> ForwardTrace:
        self._calls: list[LeafCall] = []
        self._outputs: list[TensorVersions] = []
        self._training = training
        for name, tensor in self._replaced.items():
            path, _, last = name.rpartition(".")
            ref = ValueRef(ValueKind.STATE, 0, 0, name)
            made = PlaceholderTensor.of(ref, on_meta(tensor), self._device)
            vars(self._tree.containers[path])[last] = made
        self._tree.root.train(training)
        self._runner.train(training)
        leaves, tree = flatten((args, kwargs))
        names = input_names(args, kwargs)
        tensors = {
            ValueRef(ValueKind.INPUT, 0, i, names[i]): leaf
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        }
        given = list(leaves)
        for ref, tensor in tensors.items():
            if tensor.is_floating_point():
                given[ref.leaf] = PlaceholderTensor.of(ref, on_meta(tensor), self._device)
            else:
                given[ref.leaf] = tensor.detach().to(self._device, copy=True)
        inputs = TensorVersions(given)
        output, changes = self._run_forward(*unflatten(tree, given))
        loss = own_loss(output)
        return ForwardTrace(
            inputs=_describe(((args, kwargs),), "the model is called with"),
            calls=tuple(
                replace(call, written=versions.written())
                for call, versions in zip(self._calls, self._outputs, strict=True)
            ),
            needs=frozenset(refs_of(flatten(output)[0])).union(
                (ref for ref, tensor in tensors.items() if not tensor.is_floating_point()),
                *(read.refs for read in self._ops.reads),
            ),
            written=inputs.written(),
            loss=isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point(),
            changes=changes,
            draws=self._ops.num_draws > 0,
        )

    def _run_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, frozenset[str]]:
        """The model's output, and the containers' parameters and buffers that it writes."""
        with (
            torch.no_grad(),
            HookWatch(_refuse_hook) as self._hooks,
            preserve_rng_state(self._device),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # stages issue these warnings themselves
            snapshot = ModuleSnapshot(self._tree.root)
            snapshot.watch_writes()
            self._ops = TopLevelOps(self._calls)
            host = _host_states()
            try:
                with self._ops:
                    output = self._tree.root(*args, **kwargs)
                if _host_states() != host:
                    raise DrawsOnHost(
                        "the top-level forward draws from the random generator of Python or NumPy, "
                        "and each stage would draw numbers of its own; draw within a module, with "
                        "torch, or pass the numbers as inputs"
                    )
                return output, self._state_changes(snapshot)
            except Exception as error:
                for read in self._ops.reads:  # an error of made-up values
                    raise read from error
                raise
            finally:
                snapshot.restore()

    def _state_changes(self, snapshot: ModuleSnapshot) -> frozenset[str]:
        """The parameters and buffers that the top-level forward writes.

        Raises:
            PartitionError: the forward replaces a parameter or buffer, or writes into any other
                tensor.
        """
        changes, loose = snapshot.changes(), snapshot.loose
        for name in changes.replaced:
            raise PartitionError(replaced_message(name))
        for name in loose.keys() & set(changes.attributes):
            self._replaced.setdefault(name, loose[name])
        for name in changes.written:
            if name in loose and name not in self._replaced:
                raise PartitionError(
                    f"the top-level forward writes into {name}, a tensor that is neither parameter "
                    "nor buffer; register it as a buffer of a module that runs whole"
                )
        return frozenset(changes.written) - loose.keys()

    # --- one call of a leaf module -----------------------------------------------------------

    def _call(self, leaf: str, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a leaf module on shapes and record its inputs (a ``CallHandler``)."""
        for read in self._ops.reads:
            raise read
        leaves, tree = flatten((args, kwargs))
        index = len(self._calls)
        opaque = [(each, tensors_in(each)) for each in leaves if is_opaque(each)]
        marked = mark()
        self.captures |= bool(marked)
        with self._ops.paused(), self._hooks.paused(), preserve_rng_state(self._device):
            found = self._runner.run(leaf, leaves, tree)
        changes = found.changes
        filled = [type(each) for each, before in opaque if not are_same(tensors_in(each), before)]
        if found.fills or filled:
            kind = filled[0].__name__ if filled else "list or dict"
            raise PartitionError(
                f"{leaf} writes tensors into the {kind} that it is called with, which its other "
                "users, on other stages, would not see; have it return them, or leave it out "
                "(use_cache=False, for instance)"
            )
        for name in changes.filled:
            raise PartitionError(
                f"{leaf} puts tensors into its attribute {name}, a container that modules on "
                "other stages may hold too, where they would not see it; have it return them"
            )
        output: Any = map_tensors(_shape_of, ((found.output, capture_since(marked)),))
        self._calls.append(
            LeafCall(
                leaf=leaf,
                needs=frozenset(refs_of(leaves)),
                output=_describe(output, f"{leaf} returns"),
                writes=found.writes,
                changes=(*changes.replaced, *changes.written, *changes.attributes),
                detached=self._training and in_function_forward(),
            )
        )
        made, shape = flatten(output)
        for i, each in enumerate(made):
            if isinstance(each, Tensor):
                ref = ValueRef(ValueKind.OUTPUT, index, i, leaf)
                made[i] = PlaceholderTensor.of(ref, each, self._device)
        self._outputs.append(TensorVersions(made))
        for i in found.writes:
            ref, tensor = ValueRef(ValueKind.WRITE, index, i, leaf), leaves[i]
            if type(tensor) is PlaceholderTensor:
                tensor.provenance.refs.add(ref)
                tensor.provenance.num_writes += 1
            elif not turn_into_placeholder(tensor, {ref}):
                raise PartitionError(
                    f"{leaf} writes into the tensor that it is called with (argument {i}), which "
                    "shares its memory with others, of whom some may be on other stages; have it "
                    "return a new tensor instead"
                )
        for name in changes.attributes:
            if (leaf, name) not in self._set:
                self._set.add((leaf, name))
                refuse_reads(self._tree.stubs[leaf], name, _stale_message(leaf, name))
        ((result, captured),) = unflatten(shape, made)
        replay(captured, marked)
        return result


def _shape_of(tensor: Tensor) -> Tensor:
    return on_meta(tensor.body if type(tensor) is PlaceholderTensor else tensor)


def input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of a model's argument leaves in messages: ``argument 0``, ``labels``."""
    paths = flatten((args, dict(kwargs)))[1].paths()
    return [
        ".".join(map(str, path[1:])) if path[0] == 1 else f"argument {path[1]}" for path in paths
    ]


def replaced_message(name: str) -> str:
    """The message for an attribute of a container that each forward replaces after its use."""
    return (
        f"the top-level forward assigns a new tensor to {name}, and uses the one of the microbatch "
        "before: every stage would do that for itself, and some could not; keep it within a module "
        "that runs whole"
    )


def _stale_message(leaf: str, name: str) -> str:
    return (
        f"the top-level forward reads {leaf}.{name}, which {leaf} sets when it is called: on other "
        "stages that would be an older value, or none; have the module return it, or keep its "
        "users in one module"
    )


def _refuse_hook(what: str) -> None:
    raise PartitionError(
        f"the top-level forward {what}, which several stages would do; do it within a module, "
        "or use an autograd.Function"
    )


def _host_states() -> dict[str, Any]:
    """The states of Python's and NumPy's generators, for comparison."""
    return {
        name: tuple(x.tobytes() if hasattr(x, "tobytes") else x for x in state)
        for name, state in host_random_states().items()
    }


def _describe(value: Any, what: str) -> BoundarySpec:
    try:
        return describe(value)
    except BoundaryError as error:
        raise PartitionError(
            f"{what} a value that can't be sent to other stages: {error}; or cut the model by "
            "other modules, so that this stays within one"
        ) from error
