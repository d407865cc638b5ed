"""Cut a model by the names of its modules, without tracing it.

    split_by_module(model, [["embed", "layers.0"], ["layers.1", "norm", "head"]])
                           [2, 2]                   two of the repeated blocks per stage
                           ["layers.2"]             a new stage begins with layers.2

    stage 0    embed   layers.0      .         .      .          each stage runs the model's own
    stage 1      .        .       layers.1   norm   head         forward; a dot is absent there

What lies between the modules (masks, rotary tables, residual sums, the loss) is the model's own
code, and runs on every stage that needs it. What crosses is found by one dry run for each shape
of inputs. This module decides which module goes where; it moves no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock._torch_compat import has_backward_hooks
from penstock.errors import PartitionError
from penstock.partition.forward.crossings import Crossings
from penstock.partition.forward.dry_run import DryRunner
from penstock.partition.forward.find_crossings import find_crossings
from penstock.partition.forward.homes import find_homes
from penstock.partition.forward.module_stage import ModuleStage
from penstock.partition.forward.other_cuts import around_more, between_the_same
from penstock.partition.forward.recorded import DryRun
from penstock.partition.forward.units import NotByModule, Units, find_units
from penstock.partition.huggingface import install_hooks
from penstock.partition.spec import Example, Split, SplitSpec, as_call
from penstock.partition.ties import record_ties

__all__ = [
    "ModuleSplit",
    "NotByModule",
    "computes_loss",
    "run_first",
    "split_by_module",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSplit:
    """A model cut by module.

    Args:
        stages: one module per stage.
        names: per stage the names of its parts, and of parameters by themselves.
        dry_run: what the example showed; None without one.
        crossings: what crosses between the stages for the example; None without one.
    """

    stages: tuple[ModuleStage, ...]
    names: tuple[tuple[str, ...], ...]
    dry_run: DryRun | None
    crossings: Crossings | None


def split_by_module(
    model: nn.Module,
    cuts: SplitSpec | Split,
    example: Example | None = None,
    *,
    device: torch.device | str = "cpu",
) -> ModuleSplit:
    """Cut a model by the names of its modules.

    Stages hold the model's own modules and ``Parameter`` objects under their names in the model.
    The first stage is called with the model's arguments, each later one with what the stage
    before returned, and the last returns what the model returns.

    Args:
        model: any module, on any device; on the meta device, each rank materializes its stages.
        cuts: per stage the names of its modules (a ``Plan`` or lists of names); or per stage the
            number of its repeated blocks; or the names of the modules with which stages after the
            first begin. Modules that are not named go with what runs before them.
        example: one microbatch: a tuple of positional, or a dict of keyword arguments. With one,
            what can't be cut is found here, and modules run in the order of their calls; without
            one, in that of their definition, and the first microbatch is the example.
        device: where the stages will live.

    Raises:
        PartitionError: a name is unknown, a stage empty, or a parameter left over.
        NotByModule: the model does what can't run on several stages so cut.

    Example:
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
    parts = find_units(model, spec.places)
    _refuse_backward_hooks(parts)
    dry, seen = _first_run(parts, device, example)
    num_stages = spec.num_stages
    try:
        homes = find_homes(parts, spec, seen)
    except PartitionError as error:
        if spec.stages:  # whose modules are named one by one: the error tells which name is wrong
            raise
        raise PartitionError(_with_advice(error, parts, spec, seen)) from error
    try:
        crossings = None if seen is None else find_crossings(seen, homes, num_stages, parts.shared)
    except PartitionError as error:
        raise NotByModule(_with_advice(error, parts, spec, seen)) from error

    shared = parts.shared  # the parts themselves a rank shall not hold

    def find(args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Crossings:
        fresh = dry.run(args, kwargs, training=training)
        return find_crossings(fresh, homes, num_stages, shared)

    names = tuple(
        tuple(name for name, home in homes.items() if home == stage) for stage in range(num_stages)
    )
    # What has nothing to be stored is everywhere, and runs where its inputs are first.
    light = [name for name, home in homes.items() if home is None]
    own = [frozenset([*each, *light]) for each in names]
    stages = tuple(
        # The first stage alone meets inputs of a new shape; a dry run may hold the whole model.
        ModuleStage(parts, own[i], i, num_stages, None if i else find, device)
        for i in range(num_stages)
    )
    record_ties(stages)
    if example is not None and crossings is not None:
        stages[0].prepare(*as_call(example), crossings)
    return ModuleSplit(stages=stages, names=names, dry_run=seen, crossings=crossings)


def computes_loss(model: nn.Module, example: Example) -> bool:
    """Whether what a model returns for an example has a ``loss``, a scalar.

    Args:
        model: the model.
        example: one microbatch.

    Raises:
        NotByModule: the model can't be run on shapes.
    """
    parts = find_units(model, ())
    return _run_dry(DryRunner(parts, torch.device("cpu")), model, example).loss


def _refuse_backward_hooks(parts: Units) -> None:
    for name, module in parts.opened.items():
        if has_backward_hooks(module):
            raise NotByModule(
                f"{name or 'the model'} has a backward hook, but runs on several stages, each of "
                "which would call it; register it on a module that runs whole"
            )


def _with_advice(error: PartitionError, parts: Units, spec: SplitSpec, seen: DryRun | None) -> str:
    """What is wrong, and the nearest place that works, where an example has shown the calls."""
    return str(error) if seen is None else f"{error}; {between_the_same(parts, spec, seen)}"


def _first_run(
    parts: Units, device: torch.device, example: Example | None
) -> tuple[DryRunner, DryRun | None]:
    """A runner, and what it saw of the example; see ``around_more`` for what it can't see."""
    try:
        return run_first(parts, device, example)
    except NotByModule as error:
        if example is None:
            raise

        def run(outer: Units) -> DryRun:
            seen = run_first(outer, device, example)[1]
            assert seen is not None
            return seen

        raise NotByModule(f"{error}; {around_more(parts, run)}") from error


def run_first(
    parts: Units, device: torch.device, example: Example | None
) -> tuple[DryRunner, DryRun | None]:
    """Run a model dry; hooks that collect from within its parts are installed if need be.

    Args:
        parts: the model's units.
        device: where the stages will live.
        example: one microbatch; None to run it later.

    Returns:
        A runner, and what it saw of the example.

    Raises:
        NotByModule: the model can't be run so.
    """
    if example is not None:
        dry = DryRunner(parts, device)
        try:
            seen = _run_dry(dry, parts.model, example)
        except NotByModule:
            if not dry.captures:
                raise
        if not dry.captures:
            return dry, seen
    install_hooks(parts.model)
    dry = DryRunner(parts, device)
    return dry, None if example is None else _run_dry(dry, parts.model, example)


def _run_dry(dry: DryRunner, model: nn.Module, example: Example) -> DryRun:
    args, kwargs = as_call(example)
    try:
        return dry.run(args, kwargs, training=model.training)
    except PartitionError as error:
        raise NotByModule(str(error)) from error
    except Exception as error:
        raise NotByModule(
            f"the forward of {type(model).__name__} failed on the example, in a run in which its "
            f"modules compute shapes alone: {type(error).__name__}: {error}"
        ) from error
