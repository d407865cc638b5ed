"""pipeline(): from a model to a Pipe.

    model ──capture──► one graph ──cut at marks──► graphs ──► stage modules ──► Pipe
            twice: as it trains, and as it evaluates, over the same parameters

It knows neither schedules nor ranks.
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

from penstock._torch_compat import shape_text
from penstock.errors import PartitionError
from penstock.partition.export.call_form import CallForm
from penstock.partition.export.capture import capture
from penstock.partition.export.capture_fx import capture_modules
from penstock.partition.export.captured import CONSTANTS, Captured
from penstock.partition.export.graph_cut import Cut, assign, nearest_to, take_marks
from penstock.partition.export.markers import HERE, SplitPoint, label_of, marked
from penstock.partition.export.not_captured import LostInGraph, NotCaptured
from penstock.partition.export.pipe import Pipe, SplitPolicy
from penstock.partition.export.stage_build import Mode, build_modules
from penstock.partition.huggingface import install_hooks
from penstock.partition.ties import named_tensors

__all__ = ["Places", "pipe_at", "pipeline"]

logger = logging.getLogger(__name__)

# Of all cuts that are marked in a graph, those to make.
Choose: TypeAlias = Callable[[Sequence[Cut]], tuple[Cut, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a model is to be cut.

    Args:
        spec: the split points to be marked.
        policy: what puts further marks into the graph.
        choose: of all marks, those to cut at; if None, all, and each split point has to be one.
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
        split_spec: for names of modules, on which side of them to cut. Cuts that the forward
            itself marks with ``pipe_split()`` count too.
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
          stage 0: 40 parameters in 0; hands on relu float32[*, 8]
          stage 1: 18 parameters in 2
        >>> [name for name, _ in pipe.get_stage_module(1).named_parameters()]
        ['2.weight', '2.bias']
    """
    if split_spec and split_policy:
        raise PartitionError("split_spec and split_policy are both given; use either")
    places = Places(spec=split_spec or {}, policy=split_policy)
    return pipe_at(places, module, mb_args, mb_kwargs)


def pipe_at(
    places: Places,
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None,
) -> Pipe:
    """Capture a model and cut it at these places; the other arguments are ``pipeline``'s.

    Args:
        places: where to cut.
        module: the model.
        mb_args: positional arguments of one example microbatch.
        mb_kwargs: its keyword arguments.
    """
    form = CallForm(module, mb_args, mb_kwargs)
    if _device_of(module, form).type == "meta":  # then shapes are all that there is
        form.examples = tuple(example.to("meta") for example in form.examples)
    install_hooks(module)  # or the first call would, in the midst of the capture
    modes = {module.training: _mode(module, form, places, by_modules=None)}
    (mode,) = modes.values()
    if mode.captured.output.dropped:
        logger.warning(
            "the output of %s holds %s, which no stage can pass on: None takes their place",
            type(module).__name__,
            ", ".join(mode.captured.output.dropped),
        )
    missing = ""
    try:
        with _switched(module):
            by_modules = mode.captured.by_modules
            other = _mode(module, form, places, by_modules=by_modules)
        if other.num_stages != mode.num_stages:
            raise PartitionError(f"{other.num_stages} instead of {mode.num_stages} stages there")
        modes[not module.training] = other
    except PartitionError as error:
        was, wanted = ("train", "eval") if module.training else ("eval", "train")
        missing = f"the model was captured in {was} mode, and can't be in {wanted} mode: {error}"
        logger.warning("%s", missing)
    modules = build_modules(module, modes, missing, _device_of(module, form))
    pipe = Pipe(_split_gm(form, modules), len(modules))
    pipe.crossing = tuple(
        tuple(_shown(node) for node in nodes) for nodes in mode.assignment.crossing
    )
    form.forget_example()
    return pipe


def _mode(
    model: nn.Module,
    form: CallForm,
    places: Places,
    *,
    by_modules: bool | None,
) -> Mode:
    """The forward captured and cut, in the mode in which the model is now."""
    captured = _captured(model, form, places.spec, by_modules)
    if places.policy is not None:
        captured = _apply_policy(model, captured, places.policy)
    cuts = take_marks(captured.graph)
    if places.choose is None:
        _check_labels(model, captured, places.spec, cuts)
    else:
        cuts = places.choose(cuts)
    return Mode(captured=captured, assignment=assign(captured.graph, cuts))


def _captured(
    model: nn.Module,
    form: CallForm,
    spec: Mapping[str, SplitPoint] | None,
    by_modules: bool | None,
) -> Captured:
    if by_modules:
        return capture_modules(model, form, spec)
    with marked(model, spec):
        try:
            return capture(model, form)
        except PartitionError as error:
            if by_modules is not None:
                raise
            exported = error
    try:
        captured = capture_modules(model, form, spec)
    except PartitionError as error:
        if not isinstance(exported, LostInGraph):
            logger.debug("torch.fx can't capture it either: %s", error)
            raise exported from exported.__cause__
        # It may be inside of one module already: then what stands in the way is elsewhere.
        raise NotCaptured.of(
            f"{exported.without_by_module}; torch.fx, which would leave modules whole, fails too: "
            f"{error}",
            by_module=exported.by_module,
        ) from exported.__cause__
    logger.info("captured by torch.fx, modules as they are: %s", exported)
    return captured


def _apply_policy(model: nn.Module, captured: Captured, policy: SplitPolicy) -> Captured:
    attributes: dict[str, Any] = {**named_tensors(model)}
    attributes |= dict(model.named_modules(remove_duplicate=False))
    attributes |= {f"{CONSTANTS}.{name}": value for name, value in captured.constants.items()}
    nodes = [n for n in captured.graph.nodes if n.op in ("get_attr", "call_module")]
    root = {str(node.target): attributes[str(node.target)] for node in nodes}
    split = policy(fx.GraphModule(root, captured.graph))
    if not isinstance(split, fx.GraphModule):
        raise PartitionError(
            f"the split_policy returned a {type(split).__name__}, expected the GraphModule that it "
            "was given, with calls of pipe_split in its graph"
        )
    return replace(captured, graph=split.graph)


def _check_labels(
    model: nn.Module,
    captured: Captured,
    spec: Mapping[str, SplitPoint],
    cuts: Sequence[Cut],
) -> None:
    """Every split point has left one mark."""
    counts = Counter(cut.label for cut in cuts if cut.label != HERE)
    for name, point in spec.items():
        label = label_of(name, point)
        if counts[label] > 1:
            raise PartitionError(
                f"module {name} runs {counts[label]} times in the forward, so {label!r} is no one "
                "place; call pipe_split() in the code at the one that you mean; "
                f"{nearest_to(captured.graph, cuts, name)}"
            )
        if not counts[label]:
            kind = type(model.get_submodule(name)).__name__
            raise NotCaptured.of(
                f"there is no place {label!r}: the forward does not call module {name} (a {kind}), "
                "or does so inside of a compiled or fused region, which can't be cut; "
                f"{nearest_to(captured.graph, cuts, name)}",
                "take torch.compile off until the model is cut",
            )


@contextmanager
def _switched(model: nn.Module) -> Iterator[None]:
    """The model in the other mode; afterwards every module is in its own again."""
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


def _split_gm(form: CallForm, modules: Sequence[nn.Module]) -> fx.GraphModule:
    """A graph that runs the stages in turn."""
    graph = fx.Graph()
    positional, named = form.argument_names()
    args: Any = tuple(graph.placeholder(name) for name in positional)
    kwargs: dict[str, Any] = {name: graph.placeholder(name) for name in named}
    for stage in range(len(modules)):
        result = graph.call_module(f"submod_pp_{stage}", args, kwargs)
        if stage < len(modules) - 1:
            # Opened here as the runtime does it between stages.
            count = len(modules[stage].graph.output_node().args[0])  # type: ignore
            args = tuple(graph.call_function(operator.getitem, (result, i)) for i in range(count))
            kwargs = {}
    graph.output(result)
    root = {f"submod_pp_{i}": module for i, module in enumerate(modules)}
    return fx.GraphModule(root, graph, "SplitModel")


def _shown(node: fx.Node) -> str:
    value = node.meta.get("val")
    return node.name if value is None else f"{node.name} {shape_text(value)}"
