"""Cut a captured model into stages whose modules are named one by one, or its blocks counted.

    named       stage 0: embed, layers.0     stage 1: head, layers.2, layers.1
    the graph   embed  layers.0 │ layers.1  layers.2  head
                                └ the first of stage 1 to run, wherever it is named

    counted     2, 1
    the graph   embed  layers.2  layers.0 │ layers.1  head
                                          └ the third of the blocks to run

A captured stage is all that runs between two cuts: what is named for it and runs elsewhere, is
an error. It knows neither how models are captured nor schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from penstock._torch_compat import has_no_forward
from penstock.errors import PartitionError
from penstock.partition.export.graph_cut import Cut
from penstock.partition.export.markers import SplitPoint, label_of
from penstock.partition.export.not_captured import NotCaptured
from penstock.partition.export.pipe import Pipe
from penstock.partition.export.split_model import Places, pipe_at
from penstock.partition.plan import Plan, abbreviate
from penstock.partition.spec import SplitSpec

__all__ = ["pipeline_of_counts", "pipeline_of_names"]


def pipeline_of_names(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None,
    stages: Sequence[Sequence[str]],
) -> Pipe:
    """Capture a model and cut it so that each stage runs the modules that are named for it.

    A captured stage is all that runs between two cuts. So each stage begins where the first of
    its modules runs, in whatever order they are named.

    Args:
        module: the model.
        mb_args: positional arguments of one example microbatch.
        mb_kwargs: its keyword arguments.
        stages: per stage the names of its modules, and of parameters by themselves.

    Raises:
        PartitionError: the model can't be captured, or what is named for a stage runs in another.
    """
    named = {name: stage for stage, names in enumerate(stages) for name in _called(module, names)}
    spec = {name: SplitPoint.BEGINNING for name, stage in named.items() if stage}
    labels = {label_of(name, SplitPoint.BEGINNING): stage for name, stage in named.items()}

    def begin(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        first: dict[int, Cut] = {}
        for cut in cuts:
            if cut.label in labels:
                first.setdefault(labels[cut.label], cut)
        for stage in range(1, len(stages)):
            if stage not in first:
                raise NotCaptured.of(
                    f"stage {stage} has no beginning: the forward calls none of "
                    f"{abbreviate(stages[stage])}",
                    "name modules that it calls",
                )
        return tuple(sorted(first.values(), key=lambda cut: cut.position))

    pipe = pipe_at(Places(spec=spec, choose=begin), module, mb_args, mb_kwargs)
    _check_stages(module, pipe, stages)
    return pipe


def pipeline_of_counts(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None,
    blocks: Sequence[str],
    counts: Sequence[int],
) -> Pipe:
    """Capture a model and cut it so that each stage runs so many of its blocks.

    Blocks are counted in the order of their first calls, as they are where the model is cut by
    module; one that stands in several places of a list, with as many of its calls.

    Args:
        module: the model.
        mb_args: positional arguments of one example microbatch.
        mb_kwargs: its keyword arguments.
        blocks: the names of the blocks.
        counts: per stage how many of them it runs; all of them together.

    Raises:
        PartitionError: the model can't be captured, or calls too few of the blocks.
    """
    layers = [module.get_submodule(name) for name in blocks]
    first_name = {id(layer): name for name, layer in zip(blocks[::-1], layers[::-1], strict=True)}
    places = Counter(label_of(first_name[id(layer)], SplitPoint.BEGINNING) for layer in layers)

    def begin(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        left, calls = places.copy(), []
        for cut in cuts:
            if left[cut.label]:
                left[cut.label] -= 1
                calls.append(cut)
        starts = [sum(counts[:stage]) for stage in range(1, len(counts))]
        if starts and starts[-1] >= len(calls):
            raise NotCaptured.of(
                f"the forward calls {len(calls)} of the {len(blocks)} blocks that {list(counts)} "
                "counts, so that the last stage has no beginning",
                "name the modules of each stage",
            )
        return tuple(calls[start] for start in starts)

    spec = dict.fromkeys(first_name.values(), SplitPoint.BEGINNING)
    return pipe_at(Places(spec=spec, choose=begin), module, mb_args, mb_kwargs)


def _called(model: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """The modules among ``names``; of lists, which are never called, their members."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        module = modules.get(name)
        if module is not None and has_no_forward(module):
            yield from _called(model, [f"{name}.{child}" for child in module._modules])
        elif module is not None:
            yield name


def _check_stages(model: nn.Module, pipe: Pipe, stages: Sequence[Sequence[str]]) -> None:
    """What is named for a stage runs in it."""
    used: dict[int, set[int]] = {}
    for stage in range(pipe.num_stages):
        inside: Any = pipe.get_stage_module(stage)
        for name in inside.names_used():
            for tensor in _parameters_at(model, name):
                used.setdefault(id(tensor), set()).add(stage)
    for stage, names in enumerate(stages):
        for name in names:
            for tensor in _parameters_at(model, name):
                where = used.get(id(tensor), {stage})
                if stage not in where:
                    raise PartitionError(
                        f"{name} is named in stage {stage}, but runs in stage {min(where)} of the "
                        "captured graph, which is cut where the first module of each stage runs; "
                        "name modules in the order in which they run"
                    )


def _parameters_at(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters of the module of a name, or the parameter itself."""
    named = model.named_parameters(remove_duplicate=False)
    return [param for each, param in named if f"{each}.".startswith(f"{name}.")]


def pipeline_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, spec: SplitSpec
) -> Pipe:
    """Export a model and cut it as a spec says; at its own marks if the spec is empty."""
    spec = spec.resolve(model)
    if spec.stages:
        Plan(stages=spec.stages).check(model)
        return pipeline_of_names(model, args, kwargs, spec.stages)
    if spec.counts:
        return pipeline_of_counts(model, args, kwargs, spec.blocks, spec.counts)
    points = dict.fromkeys(spec.starts, SplitPoint.BEGINNING)
    return pipe_at(Places(spec=points), model, args, kwargs)
