"""Trace a model's forward on shapes: the calls of its leaf modules, and their inputs.

    call    wte    h.0    h.1    h.2    lm_head
    needs   ids    wte    h.0    h.1    h.2, labels

The model's own forward runs, with copies of its leaf modules on the meta device, which compute only
shapes. A leaf module that needs values (such as a mixture of experts that routes tokens) can't run
on shapes; then the whole model is traced on values, if it has any. The model stays unchanged, and
its RNG state too. This module knows no stage.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from penstock._torch_compat import (
    HookWatch,
    in_function_forward,
    registries,
)
from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.leaf_runner import LeafRunner, RunOnValues, with_values
from penstock.partition.forward.module_state import (
    ModuleSnapshot,
    StateChanges,
    TensorVersions,
    are_same,
    hidden_tensors_message,
    hides_tensors,
    is_opaque,
    tensors_in,
)
from penstock.partition.forward.placeholder import (
    NeedsValue,
    PlaceholderTensor,
    TopLevelOps,
    ValueKind,
    ValueRef,
    on_meta,
    refs_of,
    turn_into_placeholder,
)
from penstock.partition.forward.stage_tree import StageTree, mark_stale
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.spec import own_loss
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.pytree import flatten, map_tensors, unflatten
from penstock.stage.rng import host_random_states, undrawn

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
    """One call of a leaf module.

    Args:
        leaf: the name of the leaf module.
        needs: the provenance of its arguments.
        output: the result, and the values that hooks collected inside the module.
        written: the leaves of the output that later code writes into.
        writes: the leaves of its arguments that the module writes into.
        changes: the module's own buffers and attributes that the call changes.
        detached: True if the result has lost its gradients because the call ran inside an autograd
            function, such as a reentrant checkpoint.
    """

    leaf: str
    needs: frozenset[ValueRef]
    output: BoundarySpec
    written: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    changes: tuple[str, ...] = ()
    detached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTrace:
    """A trace of the whole model's forward.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls of leaf modules in order.
        needs: the provenance of the model's output.
        everywhere: the inputs that every stage receives: all that are not floating point. Masks and
            positions derive from them, and control flow may depend on them.
        written: the leaves of the inputs that the model writes into.
        loss: True if the output has a scalar named ``loss``.
        changes: the parameters and buffers that the top-level forward writes into.
        draws: True if the top-level forward draws random numbers.
    """

    inputs: BoundarySpec
    calls: tuple[LeafCall, ...]
    needs: frozenset[ValueRef]
    everywhere: frozenset[ValueRef]
    written: tuple[int, ...]
    loss: bool
    changes: frozenset[str] = frozenset()
    draws: bool = False

    def first_calls(self) -> dict[str, int]:
        """The first call of each leaf module that was called."""
        found: dict[str, int] = {}
        for i, call in enumerate(self.calls):
            found.setdefault(call.leaf, i)
        return found


class ForwardTracer:
    """Trace one model (a ``CallHandler``).

    Args:
        leaves: the leaf modules of the plain model, on any device.
        device: the device of the stages.

    Attributes:
        captures: True if hooks collect values within the model (see ``huggingface``).
    """

    def __init__(self, leaves: LeafModules, device: torch.device) -> None:
        tree = StageTree(leaves, (), self, device)
        self._root, self._containers = tree.root, tree.containers
        for module in self._containers.values():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):  # the model's own inputs, which must not be written
                    vars(module)[name] = value.detach().clone()
        # Placeholders of the containers' own tensors, until a trace is known to need no values.
        self._state: list[tuple[Any, Tensor]] = [
            (made[name], tensor)
            for path, module in leaves.containers.items()
            for registry, made in zip(
                registries(module), registries(self._containers[path]), strict=True
            )
            for name, tensor in registry.items()
            if tensor is not None
        ]
        self._runner = LeafRunner(leaves.leaves, device)
        self._device = device
        self.captures = False
        # Attributes set by leaf modules and replaced by the top-level forward. Reading one earlier
        # in a microbatch is an error, which the next run detects.
        self._set: set[tuple[str, str]] = set()
        self._replaced: dict[str, Tensor] = {}
        # The error of a run on shapes in which the top-level forward read a value.
        self._looked: NeedsValue | None = None

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool
    ) -> ForwardTrace:
        """Trace the model.

        Args:
            args: the model's positional arguments, one microbatch.
            kwargs: the model's keyword arguments.
            training: the training mode.

        Raises:
            PartitionError: the model can't be traced.
        """
        known = -1
        while known < len(self._set) + len(self._replaced):
            known = len(self._set) + len(self._replaced)
            trace = self._on_shapes_or_values(args, kwargs, training)
        return trace

    def _on_shapes_or_values(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> ForwardTrace:
        if not self._runner.on_values:
            try:
                trace = self._run(args, kwargs, training)
            except (RunOnValues, NeedsValue) as error:
                self._runner.take_values(error)
                self._looked = error if isinstance(error, NeedsValue) else None
                logger.info("traced on values: %s", error)
            else:
                self._runner.let_go()
                self._state = []
                return trace
        # Only the last stage runs the code after the last leaf module, so that code may read
        # values.
        trace = self._run(args, kwargs, training)
        if self._looked is not None and any(at < len(trace.calls) for at, _ in self._ops.looks):
            raise self._looked
        behind = (refs for at, refs in self._ops.looks if at == len(trace.calls))
        return replace(trace, needs=trace.needs.union(*behind))

    def _run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> ForwardTrace:
        self._calls: list[LeafCall] = []
        self._device = self._runner.device
        if self._runner.on_values:
            for placeholder, tensor in self._state:
                placeholder.body = with_values(tensor, self._device)
        for name, tensor in self._replaced.items():
            path, _, last = name.rpartition(".")
            body = with_values(tensor, self._device) if self._runner.on_values else on_meta(tensor)
            made = PlaceholderTensor.of(ValueRef(ValueKind.STATE, 0, 0, name), body, self._device)
            vars(self._containers[path])[last] = made
        self._root.train(training)
        self._runner.train(training)
        leaves, tree = flatten((args, dict(kwargs)))
        names = input_names(args, kwargs)
        given = [self._enter(i, leaf, names[i]) for i, leaf in enumerate(leaves)]
        inputs = TensorVersions(given)
        self._outputs: list[TensorVersions] = []
        positional, named = unflatten(tree, given)
        output, changes = self._run_forward(positional, named)
        return ForwardTrace(
            inputs=_describe_inputs((args, dict(kwargs)), leaves, names),
            calls=tuple(
                replace(call, written=versions.written())
                for call, versions in zip(self._calls, self._outputs, strict=True)
            ),
            needs=frozenset(refs_of(flatten(output)[0])),
            everywhere=frozenset(
                ValueRef(ValueKind.INPUT, 0, i, names[i])
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and not leaf.is_floating_point()
            ),
            written=inputs.written(),
            loss=_has_loss(output),
            changes=changes,
            draws=self._ops.num_draws > 0,
        )

    def _enter(self, index: int, leaf: Any, name: str) -> Any:
        """An input in the model's view; inputs that are not floating point have values."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point() and not self._runner.on_values:
            body = on_meta(leaf)
        else:
            body = leaf.detach().to(self._device, copy=True)
        if not leaf.is_floating_point():
            return body
        ref = ValueRef(ValueKind.INPUT, 0, index, name)
        return PlaceholderTensor.of(ref, body, self._device)

    def _run_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, frozenset[str]]:
        """The model's output, and the containers' parameters and buffers that it writes."""
        with (
            torch.no_grad(),
            HookWatch(self._refuse_hook) as self._hooks,
            undrawn(self._device),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # stages issue these warnings themselves
            snapshot = ModuleSnapshot(self._root)
            snapshot.hold()
            self._ops = TopLevelOps(self._calls)
            self._host = _host_states()
            try:
                with self._ops:
                    output = self._root(*args, **kwargs)
                self._refuse_host_draws()
                return output, self._state_changes(snapshot)
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

    def _refuse_hook(self, what: str) -> None:
        raise PartitionError(
            f"the top-level forward {what}, which several stages would do; do it within a module, "
            "or use an autograd.Function"
        )

    def _refuse_host_draws(self) -> None:
        now = _host_states()
        if any(now[name] != state for name, state in self._host.items()):
            raise DrawsOnHost(
                "the top-level forward draws from the random generator of Python or NumPy, and "
                "each stage would draw numbers of its own; draw within a module, with torch, or "
                "pass the numbers as inputs"
            )

    # --- one call of a leaf module -----------------------------------------------------------

    def call(self, leaf: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a leaf module on shapes, or on values, and record its inputs."""
        leaves, tree = flatten((args, kwargs))
        index = len(self._calls)
        opaque = [(each, tensors_in(each)) for each in leaves if is_opaque(each)]
        lowered = [self._runner.lower(each) for each in leaves]
        versions = TensorVersions(lowered)
        given = unflatten(tree, lowered)
        marked = mark()
        self.captures |= bool(marked)
        result, changes = self._run_leaf(leaf, given)
        _refuse_filled(leaf, opaque, given, lowered, tree)
        output: Any = ((result, capture_since(marked)),)
        if self._runner.casts:  # all modules return meta tensors
            output = map_tensors(on_meta, output)
        self._calls.append(
            LeafCall(
                leaf=leaf,
                needs=frozenset(refs_of(leaves)),
                output=_describe_output(leaf, output),
                writes=versions.written(),
                changes=(*changes.replaced, *changes.written, *changes.attributes),
                detached=self._runner.trains(leaf) and in_function_forward(),
            )
        )
        made, shape = flatten(output)
        for i, each in enumerate(made):
            if isinstance(each, Tensor):
                ref = ValueRef(ValueKind.OUTPUT, index, i, leaf)
                made[i] = PlaceholderTensor.of(ref, each, self._device)
        self._outputs.append(TensorVersions(made))
        for i in versions.written():
            self._note_write(ValueRef(ValueKind.WRITE, index, i, leaf), leaves[i])
        for name in changes.attributes:
            self._set.add((leaf, name))
            mark_stale(run, name, _stale_message(leaf, name))
        ((result, captured),) = unflatten(shape, made)
        replay(captured, marked)
        return result

    def _run_leaf(self, leaf: str, given: Any) -> tuple[Any, StateChanges]:
        """The result of a leaf module, and the changes of its own state."""
        args, kwargs = given
        with self._runner.module_of(leaf) as module:
            snapshot = ModuleSnapshot(module)
            snapshot.hold()
            self._refuse_host_draws()
            self._ops.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            try:
                with self._hooks.paused():
                    result = self._runner.run(leaf, module, args, kwargs)
                changes = snapshot.changes()
            finally:
                self._ops.__enter__()  # type: ignore[no-untyped-call]
                snapshot.restore()
                self._host = _host_states()
        for name in changes.filled:
            raise PartitionError(
                f"{leaf} puts tensors into its attribute {name}, a container that modules on "
                "other stages may hold too, where they would not see it; have it return them"
            )
        return result, changes

    def _note_write(self, ref: ValueRef, tensor: Tensor) -> None:
        """Record that a leaf module wrote into an argument, whose value then comes from that call
        too."""
        if type(tensor) is PlaceholderTensor:
            tensor.provenance.refs.add(ref)
            tensor.provenance.num_writes += 1
        elif not turn_into_placeholder(tensor, {ref}, keep_value=self._runner.on_values):
            raise PartitionError(
                f"{ref.name} writes into the tensor that it is called with (argument {ref.leaf}), "
                "which shares its memory with others, of whom some may be on other stages; have "
                "it return a new tensor instead"
            )


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


def _refuse_filled(
    leaf: str, opaque: list[Any], given: Any, lowered: list[Any], tree: optree.PyTreeSpec
) -> None:
    """Refuse a leaf module that writes into objects and containers among its arguments."""
    for each, held in opaque:
        if not are_same(tensors_in(each), held):
            raise PartitionError(
                f"{leaf} writes tensors into the {type(each).__name__} that it is called with, "
                "which its other users, on other stages, would not see; leave it out "
                "(use_cache=False, for instance)"
            )
    leaves, shape = flatten(given)
    if shape != tree or not are_same(leaves, lowered):
        raise PartitionError(
            f"{leaf} writes into a list or dict that it is called with, which its other users, on "
            "other stages, would not see; have it return what it writes"
        )


def _host_states() -> dict[str, Any]:
    """The states of Python's and NumPy's generators, for comparison."""
    return {
        name: tuple(x.tobytes() if hasattr(x, "tobytes") else x for x in state)
        for name, state in host_random_states().items()
    }


def _describe_inputs(call: Any, leaves: Sequence[Any], names: Sequence[str]) -> BoundarySpec:
    try:
        return describe((call,))
    except BoundaryError as error:
        for leaf, name in zip(leaves, names, strict=True):
            if hides_tensors(leaf):
                raise PartitionError(hidden_tensors_message(name, leaf)) from error
        raise


def _describe_output(leaf: str, output: Any) -> BoundarySpec:
    try:
        return describe(output)
    except BoundaryError as error:
        raise PartitionError(
            f"{leaf} returns what can't be sent to other stages: {error}; cut the model by other "
            "modules, so that this stays within one"
        ) from error


def _has_loss(output: Any) -> bool:
    loss = own_loss(output)
    return isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
