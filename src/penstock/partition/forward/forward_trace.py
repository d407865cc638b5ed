"""Trace a model's forward on shapes: the calls of its leaf modules, and their inputs.

    call    wte    h.0    h.1    h.2    lm_head
    needs   ids    wte    h.0    h.1    h.2, labels

The model's own forward runs on placeholders, with copies of its leaf modules:

    on shapes    a copy whose parameters are placeholders
    on values    if that fails, as for experts that route tokens: small numbers as arguments and
                 parameters

The model and its RNG state stay unchanged.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from optree import PyTreeSpec
from torch import Tensor, nn

from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.forward.module_state import (
    ModuleSnapshot,
    StateChanges,
    TensorVersions,
    are_same,
    tensors_in,
)
from penstock.partition.forward.placeholder import (
    ForeignParameters,
    PlaceholderTensor,
    TopLevelOps,
    ValueKind,
    ValueRef,
    on_meta,
    refs_of,
    turn_into_placeholder,
    with_values,
)
from penstock.partition.forward.stage_tree import StageTree, copy_with_tensors, refuse_reads
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.spec import own_loss
from penstock.stage.boundary import BoundarySpec, TensorMeta, describe
from penstock.stage.pytree import flatten, map_tensors, unflatten
from penstock.stage.rng import host_random_states, preserve_rng_state

__all__ = ["CollectsOutputs", "ForwardTrace", "ForwardTracer", "LeafCall", "replaced_message"]

logger = logging.getLogger("penstock.partition.forward")


@dataclass(frozen=True, slots=True)
class LeafCall:
    """One call of a leaf module; leaves are numbered in flattened order."""

    leaf: str
    output: BoundarySpec  # the result, and the values that hooks collected inside the module
    written: tuple[int, ...]  # the leaves of the output that later code writes into
    writes: tuple[int, ...]  # the leaves of its arguments that the module writes into
    changes: tuple[str, ...]  # the buffers and attributes of its own that it changes
    _: KW_ONLY
    needs: frozenset[ValueRef] = frozenset()  # the provenance of its arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTrace:
    """A trace of the whole model's forward."""

    inputs: BoundarySpec  # the model's arguments, ((args, kwargs),)
    calls: tuple[LeafCall, ...]
    written: tuple[int, ...]  # the leaves of the inputs that the model writes into
    draws: bool  # True if the top-level forward draws random numbers
    # The provenance of the output, and all inputs that are not floating point: every stage
    # receives these, since masks derive from them, and control flow may depend on them.
    needs: frozenset[ValueRef] = frozenset()
    loss: bool = False  # True if the output has a scalar named loss
    changes: frozenset[str] = frozenset()  # parameters and buffers written by top-level code

    def meta_of(self, ref: ValueRef) -> TensorMeta | None:
        """The description of an input or an output; None for other values."""
        if ref.kind not in (ValueKind.INPUT, ValueKind.OUTPUT):
            return None
        spec = self.inputs if ref.kind is ValueKind.INPUT else self.calls[ref.call].output
        meta = spec.leaves[ref.leaf]
        assert isinstance(meta, TensorMeta), f"{ref} is a tensor"
        return meta

    def first_calls(self) -> dict[str, int]:
        """The first call of each leaf module that was called."""
        return {call.leaf: i for i, call in reversed(list(enumerate(self.calls)))}


class CollectsOutputs(PartitionError):
    """The model collects outputs of its layers, and has no hooks for that (see ``huggingface``)."""


class ForwardTracer:
    """Trace one model, for one or several shapes of inputs.

    ``hooked`` says whether the hooks that collect values are installed (see ``huggingface``).
    """

    def __init__(self, leaves: LeafModules, device: torch.device, hooked: bool) -> None:
        self._device, self._hooked = device, hooked
        floats = {p.dtype for p in leaves.model.parameters() if p.is_floating_point()}
        self._dtype = next(iter(floats)) if len(floats) == 1 else None
        self._tree = StageTree(leaves, (), self._call, device)
        for container in self._tree.containers.values():
            for name, value in vars(container).items():
                if isinstance(value, Tensor):  # the model's own, which must not be written
                    vars(container)[name] = value.detach().clone()
        self._copies = {
            name: copy_with_tensors(leaf, self._placeholder) for name, leaf in leaves.leaves.items()
        }
        self._needs_values = False
        self._foreign = ForeignParameters(leaves.model)
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
        return trace

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> ForwardTrace:
        self._calls: list[LeafCall] = []
        self._outputs: list[TensorVersions] = []
        for name, tensor in self._replaced.items():
            path, _, last = name.rpartition(".")
            stale = self._placeholder(tensor, ValueRef(ValueKind.STATE, 0, 0, name))
            vars(self._tree.containers[path])[last] = stale
        for module in (self._tree.root, *self._copies.values()):
            module.train(training)
        given, tree = flatten((args, kwargs))
        everywhere: set[ValueRef] = set()
        for i, (where, leaf) in enumerate(zip(tree.paths(), given, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            name = f"argument {where[1]}" if where[0] == 0 else ".".join(map(str, where[1:]))
            ref = ValueRef(ValueKind.INPUT, 0, i, name)
            if leaf.is_floating_point() or leaf.is_meta:
                # Stages may have been cast since; the copies have the model's dtype.
                is_cast = leaf.is_floating_point() and self._dtype
                meta = on_meta(leaf).to(self._dtype if is_cast else leaf.dtype)
                given[i] = self._placeholder(meta, ref)
            else:
                given[i] = leaf.detach().to(self._device, copy=True)
                everywhere.add(ref)
        inputs = TensorVersions(given)
        output, changes = self._run_top_level(*unflatten(tree, given))
        loss = own_loss(output)
        return ForwardTrace(
            inputs=_describe(((args, kwargs),), "the model is called with"),
            calls=tuple(
                replace(call, written=versions.written())
                for call, versions in zip(self._calls, self._outputs, strict=True)
            ),
            needs=frozenset().union(
                everywhere, refs_of(flatten(output)[0]), *(r.refs for r in self._ops.reads)
            ),
            written=inputs.written(),
            loss=isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point(),
            changes=changes,
            draws=self._ops.num_draws > 0,
        )

    def _run_top_level(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, frozenset[str]]:
        """The model's output, and the containers' parameters and buffers that it writes."""
        with torch.no_grad(), preserve_rng_state(self._device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stages issue these warnings themselves
            snapshot = ModuleSnapshot(self._tree.root)
            snapshot.watch_writes()
            self._ops, self._foreign.running = TopLevelOps(self._calls), ""
            host = host_random_states()
            try:
                with self._foreign, self._ops:
                    output = self._tree.root(*args, **kwargs)
                if host_random_states() != host:
                    raise PartitionError(
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
        """The parameters and buffers that the top-level forward writes; others it may not."""
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
        tensors = [tensors_in(each) for each in leaves]
        marked = mark()
        if marked and not self._hooked:
            raise CollectsOutputs(
                "this call collects outputs of layers (as output_hidden_states=True does), which "
                "the example does not; pass an example= with the same arguments"
            )
        self._foreign.running = leaf
        with self._ops.paused(), preserve_rng_state(self._device):
            result, changes, writes, fills = self._run_leaf(leaf, leaves, tree, marked)
        self._foreign.running = ""
        filled = [
            type(each).__name__
            for each, before in zip(leaves, tensors, strict=True)
            if not are_same(tensors_in(each), before)
        ]
        _refuse_filled(leaf, filled + ["list or dict"] * fills, changes)
        output: Any = map_tensors(on_meta, ((result, capture_since(marked)),))
        index = len(self._calls)
        self._calls.append(
            LeafCall(
                leaf=leaf,
                needs=frozenset(refs_of(leaves)),
                output=_describe(output, f"{leaf} returns"),
                written=(),  # known at the end of the trace
                writes=writes,
                changes=(*changes.replaced, *changes.written, *changes.attributes),
            )
        )
        made, shape = flatten(output)
        for i, each in enumerate(made):
            if isinstance(each, Tensor):
                made[i] = self._placeholder(each, ValueRef(ValueKind.OUTPUT, index, i, leaf))
        self._outputs.append(TensorVersions(made))
        for i in writes:
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
                message = (
                    f"the top-level forward reads {leaf}.{name}, which {leaf} sets when it is "
                    "called: on other stages that would be an older value, or none; have the "
                    "module return it, or keep its users in one module"
                )
                refuse_reads(self._tree.stubs[leaf], name, message)
        ((result, captured),) = unflatten(shape, made)
        replay(captured, marked)
        return result

    def _run_leaf(
        self, leaf: str, leaves: Sequence[Any], tree: PyTreeSpec, marked: Mapping[str, int]
    ) -> tuple[Any, StateChanges, tuple[int, ...], bool]:
        """Run a leaf module on shapes, or on values where it needs them; see ``_call_copy``."""
        copy = self._copies[leaf]
        try:
            return _call_copy(copy, leaves, tree)
        except Exception as error:
            if not self._needs_values:
                logger.info("traced on values: %s can't run on shapes alone (%r)", leaf, error)
        self._needs_values = True
        replay({key: [] for key in marked}, marked)  # drops what hooks have collected
        # Any values like those at initialization will do: only the result's shape matters.
        values = partial(with_values, device=self._device)
        # Released after the call: a single module fits in memory if the model does not.
        module = copy_with_tensors(copy, values).train(copy.training)
        return _call_copy(module, [values(each) for each in leaves], tree)

    def _placeholder(self, tensor: Tensor, *refs: ValueRef) -> Tensor:
        """A placeholder for a tensor; a parameter for a parameter."""
        made = PlaceholderTensor.of(on_meta(tensor), self._device, *refs)
        is_param = isinstance(tensor, nn.Parameter)
        return nn.Parameter(made, requires_grad=False) if is_param else made


def _refuse_filled(leaf: str, filled: Sequence[str], changes: StateChanges) -> None:
    """Refuse a leaf module that puts tensors into containers: its arguments, by the names of their
    classes, or its attributes."""
    if filled:
        raise PartitionError(
            f"{leaf} writes tensors into the {filled[0]} that it is called with, which its other "
            "users, on other stages, would not see; have it return them, or leave it out "
            "(use_cache=False, for instance)"
        )
    for name in changes.filled:
        raise PartitionError(
            f"{leaf} puts tensors into its attribute {name}, a container that modules on other "
            "stages may hold too, where they would not see it; have it return them"
        )


def _call_copy(
    module: nn.Module, leaves: Sequence[Any], tree: PyTreeSpec
) -> tuple[Any, StateChanges, tuple[int, ...], bool]:
    """The result of a copied leaf module, and its side effects, undone since.

    These are the changes of its own state, the leaves of its arguments that it wrote into, and
    whether it changed a list or dict among them.
    """
    versions = TensorVersions(leaves)
    given = unflatten(tree, leaves)
    snapshot = ModuleSnapshot(module)
    try:
        snapshot.watch_writes()
        result = module(*given[0], **given[1])
        changes = snapshot.changes()
    finally:
        snapshot.restore()
    after, tree_after = flatten(given)
    return result, changes, versions.written(), tree_after != tree or not are_same(after, leaves)


def replaced_message(name: str) -> str:
    """The message for an attribute of a container that each forward replaces after its use."""
    return (
        f"the top-level forward assigns a new tensor to {name}, and uses the one of the microbatch "
        "before: every stage would do that for itself, and some could not; keep it within a module "
        "that runs whole"
    )


def _describe(value: Any, what: str) -> BoundarySpec:
    try:
        return describe(value)
    except BoundaryError as error:
        raise PartitionError(
            f"{what} a value that can't be sent to other stages: {error}; or cut the model by "
            "other modules, so that this stays within one"
        ) from error
