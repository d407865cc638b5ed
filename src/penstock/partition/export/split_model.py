"""pipeline(): from a model to a Pipe.

    model ──capture──► one graph ──cut at marks──► graphs ──► stage modules ──► Pipe
            twice: as it trains, and as it evaluates, over the same parameters

    split points         each is one mark, and each mark is a cut
    names per stage      each named module is marked; a stage begins at the first of its marks
    counts of blocks     each block is marked; a stage begins at the first of its blocks to run

This module knows neither schedules nor ranks.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from penstock._torch_compat import children_of, has_no_forward
from penstock.errors import PartitionError
from penstock.partition.export.call_form import CallForm
from penstock.partition.export.capture import CONSTANTS, Captured, capture
from penstock.partition.export.graph_cut import Cut, assign, boundaries, take_marks
from penstock.partition.export.markers import HERE, SplitPoint, label_of, marked
from penstock.partition.export.pipe import Pipe, SplitPolicy
from penstock.partition.export.stage_module import CutGraph, StageModule, build_modules
from penstock.partition.huggingface import install_hooks
from penstock.partition.plan import Plan, abbreviate
from penstock.partition.spec import SplitSpec, describe
from penstock.partition.ties import named_tensors

__all__ = ["pipeline", "pipeline_of"]

logger = logging.getLogger(__name__)

Choose: TypeAlias = Callable[[Sequence[Cut]], tuple[Cut, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places to cut a graph.

    Args:
        spec: the split points to mark.
        policy: a function that puts further marks into the graph.
        choose: the choice of cuts among the marks; if None, every mark is a cut, and every split
            point has to leave exactly one.
    """

    spec: Mapping[str, SplitPoint]
    policy: SplitPolicy | None = None
    choose: Choose | None = None


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
) -> Pipe:
    """Capture a model and cut it into stages.

    Args:
        module: the model. It stays as it is; the stages hold its own parameters and buffers.
        mb_args: positional arguments of one example microbatch.
        mb_kwargs: its keyword arguments.
        split_spec: for names of modules, the side on which to cut. The forward may mark further
            cuts with ``pipe_split()``.
        split_policy: instead, a function that puts calls of ``pipe_split`` into the captured
            graph: given a ``torch.fx.GraphModule``, it returns one.

    Returns:
        The stages.

    Raises:
        PartitionError: the model can't be captured, or not be cut there.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.END})
        >>> pipe
        Pipe of 2 stages
          stage 0: 40 parameters in 0; hands on relu float32[*,8]
          stage 1: 18 parameters in 2
        >>> [name for name, _ in pipe.get_stage_module(1).named_parameters()]
        ['2.weight', '2.bias']
    """
    if split_spec and split_policy:
        raise PartitionError("split_spec and split_policy are both given; use either")
    return _pipe_at(Places(spec=split_spec or {}, policy=split_policy), module, mb_args, mb_kwargs)


def pipeline_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], split: SplitSpec | None
) -> Pipe:
    """Capture a model and cut it as a spec says; at its own marks if None.

    Names may be given in any order: a stage is all that runs from the first of its modules on.

    Raises:
        PartitionError: the model can't be captured, or a module runs in another stage than its.
    """
    if split is None:
        return _pipe_at(Places(spec={}), model, args, kwargs)
    split = split.resolve(model)
    if split.starts:
        points = dict.fromkeys(split.starts, SplitPoint.BEGINNING)
        return _pipe_at(Places(spec=points), model, args, kwargs)
    if split.counts:
        return _pipe_at(_places_of_counts(model, split), model, args, kwargs)
    Plan(stages=split.stages).check(model)
    pipe = _pipe_at(_places_of_names(model, split.stages), model, args, kwargs)
    _check_stages(model, pipe, split.stages)
    return pipe


# --- where to cut -------------------------------------------------------------------------------


def _places_of_names(model: nn.Module, stages: Sequence[Sequence[str]]) -> Places:
    stage_of = {name: stage for stage, names in enumerate(stages) for name in _called(model, names)}
    labels = {label_of(name, SplitPoint.BEGINNING): stage for name, stage in stage_of.items()}

    def choose(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        first: dict[int, Cut] = {}
        for cut in cuts:
            if cut.label in labels:
                first.setdefault(labels[cut.label], cut)
        for stage in range(1, len(stages)):
            if stage not in first:
                raise PartitionError(
                    f"stage {stage} has no beginning: the forward calls none of "
                    f"{abbreviate(stages[stage])}; name modules that it calls"
                )
        return tuple(sorted(first.values(), key=lambda cut: cut.position))

    later = (name for name, stage in stage_of.items() if stage)
    return Places(spec=dict.fromkeys(later, SplitPoint.BEGINNING), choose=choose)


def _called(model: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """The modules among ``names``; of lists, which are never called, their members."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        module = modules.get(name)
        if module is not None and has_no_forward(module):
            yield from _called(model, [f"{name}.{child}" for child in children_of(module)])
        elif module is not None:
            yield name


def _places_of_counts(model: nn.Module, split: SplitSpec) -> Places:
    """Blocks count in the order of their first calls; one in several places of a list, as often."""
    blocks, counts = split.blocks, split.counts
    layers = [model.get_submodule(name) for name in blocks]
    first_name = {id(layer): name for name, layer in zip(blocks[::-1], layers[::-1], strict=True)}
    times = Counter(label_of(first_name[id(layer)], SplitPoint.BEGINNING) for layer in layers)

    def choose(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        left, calls = times.copy(), []
        for cut in cuts:
            if left[cut.label]:
                left[cut.label] -= 1
                calls.append(cut)
        starts = [sum(counts[:stage]) for stage in range(1, len(counts))]
        if starts and starts[-1] >= len(calls):
            raise PartitionError(
                f"the forward calls {len(calls)} of the {len(blocks)} blocks that {list(counts)} "
                "counts, so that the last stage has no beginning; name the modules of each stage"
            )
        return tuple(calls[start] for start in starts)

    return Places(spec=dict.fromkeys(first_name.values(), SplitPoint.BEGINNING), choose=choose)


def _check_stages(model: nn.Module, pipe: Pipe, stages: Sequence[Sequence[str]]) -> None:
    """Refuse names whose parameters are used in another stage."""

    def parameters(name: str) -> list[nn.Parameter]:
        named = model.named_parameters(remove_duplicate=False)
        return [param for each, param in named if f"{each}.".startswith(f"{name}.")]

    used: dict[int, set[int]] = {}
    for stage in range(pipe.num_stages):
        inside: Any = pipe.get_stage_module(stage)
        for name in inside.names_used():
            for tensor in parameters(name):
                used.setdefault(id(tensor), set()).add(stage)
    for stage, names in enumerate(stages):
        for name in names:
            for tensor in parameters(name):
                where = used.get(id(tensor), {stage})
                if stage not in where:
                    raise PartitionError(
                        f"{name} is named in stage {stage}, but runs in stage {min(where)} of the "
                        "captured graph, which is cut where the first module of each stage runs; "
                        "name modules in the order in which they run"
                    )


# --- capturing and cutting ----------------------------------------------------------------------


def _pipe_at(
    places: Places, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Pipe:
    form = CallForm(model, args, kwargs)
    device = _device_of(model, form)
    if device.type == "meta":  # then shapes are all that there is
        form.examples = tuple(example.to("meta") for example in form.examples)
    install_hooks(model)  # or the first call would, in the midst of the capture
    mode = _cut_graph(model, form, places)
    modes = {model.training: mode}
    if mode.captured.output.dropped:
        logger.warning(
            "the output of %s holds %s, which no stage can pass on: None takes their place",
            type(model).__name__,
            ", ".join(mode.captured.output.dropped),
        )
    missing = ""
    try:
        with _other_mode(model):
            other = _cut_graph(model, form, places)
        if other.num_stages != mode.num_stages:
            raise PartitionError(f"{other.num_stages} instead of {mode.num_stages} stages there")
        modes[not model.training] = other
    except PartitionError as error:
        was, wanted = ("train", "eval") if model.training else ("eval", "train")
        missing = f"the model was captured in {was} mode, and can't be in {wanted} mode: {error}"
        logger.warning("%s", missing)
    modules = build_modules(model, modes, missing, device)
    pipe = Pipe(_split_gm(form, modules), len(modules))
    pipe.crossing = tuple(
        tuple(_described(node) for node in nodes) for nodes in mode.assignment.crossing
    )
    form.forget_example()
    return pipe


def _cut_graph(model: nn.Module, form: CallForm, places: Places) -> CutGraph:
    """The forward in the model's current mode, captured and cut."""
    with marked(model, places.spec):
        captured = capture(model, form)
    if places.policy is not None:
        captured = _apply_policy(model, captured, places.policy)
    cuts = take_marks(captured.graph)
    if places.choose is None:
        _check_labels(model, captured.graph, places.spec, cuts)
    else:
        cuts = places.choose(cuts)
    return CutGraph(captured=captured, assignment=assign(captured.graph, cuts))


def _apply_policy(model: nn.Module, captured: Captured, policy: SplitPolicy) -> Captured:
    attributes: dict[str, Any] = {**named_tensors(model)}
    attributes |= {f"{CONSTANTS}.{name}": value for name, value in captured.constants.items()}
    names = (str(n.target) for n in captured.graph.nodes if n.op == "get_attr")
    split = policy(fx.GraphModule({name: attributes[name] for name in names}, captured.graph))
    if not isinstance(split, fx.GraphModule):
        raise PartitionError(
            f"the split_policy returned a {type(split).__name__}, expected the GraphModule that it "
            "was given, with calls of pipe_split in its graph"
        )
    return replace(captured, graph=split.graph)


def _check_labels(
    model: nn.Module, graph: fx.Graph, spec: Mapping[str, SplitPoint], cuts: Sequence[Cut]
) -> None:
    """Every split point has to leave exactly one mark."""
    counts = Counter(cut.label for cut in cuts if cut.label != HERE)
    for name, point in spec.items():
        label = label_of(name, point)
        if counts[label] > 1:
            raise PartitionError(
                f"module {name} runs {counts[label]} times in the forward, so {label!r} is no one "
                f"place; call pipe_split() in the code at the one that you mean; "
                f"{boundaries(graph)}"
            )
        if not counts[label]:
            kind = type(model.get_submodule(name)).__name__
            raise PartitionError(
                f"there is no place {label!r}: the forward does not call module {name} (a {kind}), "
                "or does so inside of a compiled or fused region; take torch.compile off until "
                f"the model is cut, or cut elsewhere: {boundaries(graph)}"
            )


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Switch the model to the other mode within this block."""
    before = {module: module.training for module in model.modules()}
    try:
        model.train(not model.training)
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _device_of(model: nn.Module, form: CallForm) -> torch.device:
    tensors = (*model.parameters(), *model.buffers(), *form.examples)
    return tensors[0].device if tensors else torch.device("cpu")


def _split_gm(form: CallForm, modules: Sequence[StageModule]) -> fx.GraphModule:
    """A graph that runs the stages in turn."""
    graph = fx.Graph()
    positional, named = form.argument_names()
    args: Any = tuple(graph.placeholder(name) for name in positional)
    kwargs: dict[str, Any] = {name: graph.placeholder(name) for name in named}
    for stage, module in enumerate(modules):
        result = graph.call_module(f"submod_pp_{stage}", args, kwargs)
        if stage < len(modules) - 1:
            count = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            args = tuple(graph.call_function(operator.getitem, (result, i)) for i in range(count))
            kwargs = {}
    graph.output(result)
    root = {f"submod_pp_{i}": module for i, module in enumerate(modules)}
    return fx.GraphModule(root, graph, "SplitModel")


def _described(node: fx.Node) -> str:
    value = node.meta.get("val")
    return node.name if value is None else f"{node.name} {describe(value)}"
