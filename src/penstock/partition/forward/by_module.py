"""Cut a model by the names of its modules.

    stage 0    embed   layers.0      .         .      .          each stage runs the model's own
    stage 1      .        .       layers.1   norm   head         forward; a dot is a placeholder

The code between the modules (masks, rotary tables, residual sums, the loss) is the model's own
top-level forward, and runs on every stage that needs it. One trace for each shape of inputs finds
the values that cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock._torch_compat import has_backward_hooks
from penstock.errors import PartitionError
from penstock.partition.forward.forward_plan import ForwardPlan, assign_stages, plan_forward
from penstock.partition.forward.forward_trace import CollectsOutputs, ForwardTrace, ForwardTracer
from penstock.partition.forward.leaf_modules import LeafModules, NotByModule, find_leaf_modules
from penstock.partition.forward.module_stage import ModuleStage
from penstock.partition.forward.placeholder import ValueRef
from penstock.partition.huggingface import install_hooks
from penstock.partition.plan import abbreviate
from penstock.partition.spec import Example, Split, SplitSpec, as_call, on_shapes
from penstock.partition.ties import named_tensors, record_ties
from penstock.stage.boundary import TensorMeta

__all__ = ["ModuleSplit", "NotByModule", "computes_loss", "split_by_module", "tensors_between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSplit:
    """A model cut by module.

    Args:
        stages: one module per stage.
        names: per stage the names of its leaf modules, and of direct parameters.
        plan: the plan for the example, which holds its trace; None without an example.
    """

    stages: tuple[ModuleStage, ...]
    names: tuple[tuple[str, ...], ...]
    plan: ForwardPlan | None


def split_by_module(
    model: nn.Module,
    cuts: SplitSpec | Split,
    example: Example | None = None,
    *,
    device: torch.device | str = "cpu",
) -> ModuleSplit:
    """Cut a model by the names of its modules.

    Stages hold the model's own modules and ``Parameter`` objects under their names in the model.
    The first stage takes the model's arguments, each later stage takes the previous stage's output,
    and the last stage returns the model's output.

    Args:
        model: any module, on any device; on the meta device, each rank materializes its stages.
        cuts: per stage the names of its modules (a ``Plan`` or lists of names); or per stage the
            number of its repeated blocks; or the names of the modules with which stages after the
            first begin. Unnamed modules join the stage of the module that runs before them.
        example: one microbatch: a tuple of positional arguments, or a dict of keyword arguments.
            With an example, models that can't be cut are refused here, and modules are ordered by
            their calls. Without one, they are ordered by definition, and the first microbatch
            serves as the example.
        device: the device of the stages.

    Raises:
        PartitionError: a name is unknown, a stage empty, or a parameter left over.
        NotByModule: the model's forward can't run on several stages cut this way.

    Examples:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = x + layer(x)
        ...         return x
        >>> net, x = Net(), torch.ones(2, 4)
        >>> split = split_by_module(net, ["layers.2"])
        >>> split.names
        (('layers.0', 'layers.1'), ('layers.2',))
        >>> first, second = split.stages
        >>> torch.equal(second(*first(x)), net(x))
        True
    """
    device = torch.device(device)
    spec = SplitSpec.parse(cuts).resolve(model)
    leaves = find_leaf_modules(model, spec.places)
    for name, module in leaves.containers.items():
        if has_backward_hooks(module):
            raise NotByModule(
                f"{name or 'the model'} has a backward hook, but runs on several stages, each of "
                "which would call it; register it on a module that runs whole"
            )
    tracer, trace = _trace(leaves, device, example)
    try:
        assignment = assign_stages(leaves, spec, trace)
        plan = None if trace is None else plan_forward(trace, assignment)
    except PartitionError as error:
        raise type(error)(_with_boundaries(error, leaves, trace)) from error

    def make_plan(args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> ForwardPlan:
        (args, kwargs), remote = on_shapes((args, dict(kwargs)))
        trace = tracer.run(args, kwargs, training=training)
        return plan_forward(trace, assignment, remote)

    places = assignment.stages.items()
    names = tuple(
        tuple(name for name, at in places if at == stage) for stage in range(spec.num_stages)
    )
    # Stateless leaf modules are on every stage, and run where their inputs are available first.
    stateless = [name for name, at in places if at is None]
    # Only the first stage sees inputs of new shapes: a rank keeps only its own leaf modules, but
    # its tracer may hold the whole model.
    stages = tuple(
        ModuleStage(leaves, frozenset([*own, *stateless]), i, None if i else make_plan, device)
        for i, own in enumerate(names)
    )
    record_ties(stages)
    if example is not None and plan is not None:
        stages[0].prepare(*as_call(example), plan)
    return ModuleSplit(stages=stages, names=names, plan=plan)


def computes_loss(model: nn.Module, example: Example) -> bool:
    """True if the model's output for an example has a scalar ``loss``; False if unknown."""
    with suppress(PartitionError):  # a model of one stage need not be traceable
        _, trace = _trace(find_leaf_modules(model, ()), torch.device("cpu"), example)
        return trace is not None and trace.loss
    return False


def tensors_between(
    model: nn.Module, blocks: Sequence[Sequence[str]], example: Example, device: torch.device
) -> list[tuple[TensorMeta, ...]] | None:
    """The tensors that cross each boundary between blocks, as stages cut by module send them.

    ``blocks`` has per block the names of its modules, in the order in which they run. None if the
    model can't be cut by module at one of the boundaries.
    """
    try:
        leaves = find_leaf_modules(model, [name for names in blocks for name in names])
        trace = _trace(leaves, device, example)[1]
        assert trace is not None, "there is an example"
        spec = SplitSpec(stages=tuple(map(tuple, blocks)))
        plan = plan_forward(trace, assign_stages(leaves, spec, trace))
    except PartitionError:
        return None
    params = named_tensors(model)

    def meta_of(ref: ValueRef) -> TensorMeta:
        meta = trace.meta_of(ref)
        return TensorMeta.of(params[ref.name]) if meta is None else meta

    return [tuple(map(meta_of, refs)) for refs in plan.boundary_values]


def _with_boundaries(error: PartitionError, leaves: LeafModules, trace: ForwardTrace | None) -> str:
    """Add to an error the boundaries at which the model can be cut, if a trace has found any."""
    if trace is None:
        return str(error)
    order, valid = trace.first_calls(), []
    for name in filter(leaves.has_state, sorted(order, key=order.__getitem__)):
        with suppress(PartitionError):
            plan_forward(trace, assign_stages(leaves, SplitSpec(starts=(name,)), trace))
            valid.append(name)
    where = f"valid boundaries are before {abbreviate(valid, most=12)}"
    return f"{error}; {where if valid else 'there is no valid boundary between these modules'}"


def _trace(
    leaves: LeafModules, device: torch.device, example: Example | None, hooked: bool = False
) -> tuple[ForwardTracer, ForwardTrace | None]:
    """A tracer and its trace of the example; installs collecting hooks if needed."""
    model, hooked = leaves.model, hooked or example is None
    if hooked:
        install_hooks(model)
    tracer = ForwardTracer(leaves, device, hooked)
    if example is None:
        return tracer, None
    try:
        return tracer, tracer.run(*as_call(example), training=model.training)
    except CollectsOutputs:
        return _trace(leaves, device, example, hooked=True)
    except PartitionError as error:
        raise NotByModule(str(error)) from error
    except Exception as error:
        raise NotByModule(
            f"the forward of {type(model).__name__} failed on the example, traced without values: "
            f"{type(error).__name__}: {error}"
        ) from error
