"""``pipeline``: capture a model and cut it into the stages of a ``Pipe``.

model ──capture──► one graph ──cut at marks──► graphs ──► stage modules ──► Pipe
        twice: as it trains, and as it evaluates, over the same parameters
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx, nn

from penstock._torch_compat import children_of, has_no_forward
from penstock.compat.stage import TracedStage, build_stage
from penstock.errors import PartitionError
from penstock.partition.export import graph_cut
from penstock.partition.export.capture import CONSTANTS, Captured, capture
from penstock.partition.export.markers import SplitPoint, marked
from penstock.partition.export.stage_module import StageModule, build_modules
from penstock.partition.huggingface import install_hooks
from penstock.partition.plan import split_by_counts
from penstock.partition.spec import SplitSpec
from penstock.partition.ties import Tie, named_tensors, record_ties
from penstock.stage.pytree import leaves_in_order

__all__ = ["Pipe", "PipeInfo", "pipeline", "pipeline_of"]

logger = logging.getLogger(__name__)

# A function from the captured graph to one with calls of ``pipe_split``.
SplitPolicy: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True, slots=True)
class PipeInfo:
    """Facts of a ``Pipe`` for its stages; these are the ``call_module`` nodes of ``graph``."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool
    shared: Sequence[Tie] = ()


class Pipe(nn.Module):
    """A captured model, cut into stages; made by ``pipeline``.

    Args:
        split_gm: a graph that runs the stages ``submod_pp_0``, ``submod_pp_1``, … in turn.
        num_stages: the number of stages.
        has_loss_and_backward, loss_spec: accepted for compatibility.

    Attributes:
        shared: for each parameter shared by several stages (such as embedding and head), its name
            by stage, as for ``Pipeline(shared=)``.
    """

    def __init__(
        self,
        split_gm: fx.GraphModule,
        num_stages: int,
        has_loss_and_backward: bool = False,
        loss_spec: Any = None,
    ) -> None:
        super().__init__()
        self.split_gm = split_gm
        self.num_stages = num_stages
        self.has_loss_and_backward = has_loss_and_backward
        self.loss_spec = loss_spec
        self.shared = record_ties([self.get_stage_module(i) for i in range(num_stages)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in turn; returns the leaves of the original model's output in a tuple."""
        first, *later = (self.get_stage_module(i) for i in range(self.num_stages))
        values = first(*args, **kwargs)
        for module in later:
            values = module(*values)
        return tuple(leaves_in_order(values))

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of one stage, with the model's own parameters under their names.

        Raises:
            PartitionError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise PartitionError(
                f"stage {stage_idx}: the pipe has stages 0 to {self.num_stages - 1}"
            )
        return self.split_gm.get_submodule(f"submod_pp_{stage_idx}")

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> TracedStage:
        """Make one stage for a schedule, on a device, in a process group (the default if None)."""
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), torch.device(device), group)

    def info(self) -> PipeInfo:
        """Facts of the pipe for its stages, without parameters."""
        has_backward = self.has_loss_and_backward
        return PipeInfo(self.split_gm.graph, self.num_stages, has_backward, self.shared)

    def print_readable(self) -> None:
        """Print the stages' code."""
        for stage in range(self.num_stages):
            module: Any = self.get_stage_module(stage)
            module.graph_module.print_readable()

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
    ) -> Pipe:
        """``pipeline`` without a ``split_spec``, under torch's name."""
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
) -> Pipe:
    """Capture a model and cut it into stages.

    Args:
        module: the model. It stays unchanged; the stages hold its own parameters and buffers.
        mb_args: positional arguments of one example microbatch.
        mb_kwargs: its keyword arguments.
        split_spec: for names of modules, the side on which to cut. The forward may mark further
            cuts with ``pipe_split()``.
        split_policy: a function that inserts calls of ``pipe_split`` into the captured graph, from
            ``torch.fx.GraphModule`` to ``torch.fx.GraphModule``; excludes ``split_spec``.

    Returns:
        The stages.

    Raises:
        PartitionError: the model can't be captured, or can't be cut at these places.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.END})
        >>> pipe.num_stages
        2
        >>> [name for name, _ in pipe.get_stage_module(1).named_parameters()]
        ['2.weight', '2.bias']
    """
    if split_spec and split_policy:
        raise PartitionError("split_spec and split_policy are both given; use either")
    return _pipe_at(split_spec or {}, (), module, mb_args, mb_kwargs, split_policy)


def pipeline_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], split: SplitSpec | None
) -> Pipe:
    """Capture a model and cut it at a spec's places, or at its own marks if None."""
    split = SplitSpec() if split is None else split.resolve(model)
    named = split.stages or split_by_counts(split.blocks, split.counts)
    stages = [[*_called(model, names)] for names in named]
    points = dict.fromkeys(itertools.chain(split.starts, *stages), SplitPoint.BEGINNING)
    return _pipe_at(points, stages, model, args, kwargs)


def _called(model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """The modules among ``names``; lists are never called, so their members replace them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        module = modules.get(name)
        if module is not None and has_no_forward(module):
            yield from _called(model, [f"{name}.{child}" for child in children_of(module)])
        elif module is not None:
            yield name


# --- capturing and cutting ----------------------------------------------------------------------


def _pipe_at(
    points: Mapping[str, SplitPoint],
    stages: Sequence[Sequence[str]],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    policy: SplitPolicy | None = None,
) -> Pipe:
    """Capture a model with marks at ``points``; cut it where ``stages`` begin, or at all marks."""

    def capture_and_cut() -> tuple[Captured, graph_cut.GraphCut]:
        with marked(model, points):
            captured = capture(model, args, kwargs)
        graph = captured.graph if policy is None else _apply_policy(model, captured, policy)
        marks = graph_cut.take_marks(graph)
        if stages:
            cuts = graph_cut.cuts_at_names(marks, stages)
        else:
            cuts = graph_cut.all_cuts(graph, marks, points)
        return captured, graph_cut.assign(graph, cuts)

    install_hooks(model)  # otherwise the first call would do it in the middle of the capture
    captured, cut = capture_and_cut()
    mode = model.training
    modes, missing = {mode: (captured, cut)}, ""
    if dropped := captured.form.output.dropped:
        logger.warning(
            "the output of %s holds %s, which no stage can pass on: None takes their place",
            type(model).__name__,
            ", ".join(dropped),
        )
    before = {module: module.training for module in model.modules()}
    try:
        model.train(not mode)
        other = capture_and_cut()
        if other[1].num_stages != cut.num_stages:
            raise PartitionError(f"{other[1].num_stages} instead of {cut.num_stages} stages there")
        modes[not mode] = other
    except PartitionError as error:
        was, wanted = ("train", "eval") if mode else ("eval", "train")
        missing = f"the model was captured in {was} mode, and can't be in {wanted} mode: {error}"
        logger.warning("%s", missing)
    finally:
        for module, training in before.items():
            module.training = training
    modules = build_modules(model, modes, missing)
    return Pipe(_split_gm(len(args), list(kwargs or {}), modules, cut), len(modules))


def _apply_policy(model: nn.Module, captured: Captured, policy: SplitPolicy) -> fx.Graph:
    constants = {f"{CONSTANTS}.{name}": value for name, value in captured.constants.items()}
    split = policy(fx.GraphModule({**named_tensors(model), **constants}, captured.graph))
    if not isinstance(split, fx.GraphModule):
        raise PartitionError(
            f"the split_policy returned a {type(split).__name__}, expected the GraphModule that it "
            "was given, with calls of pipe_split in its graph"
        )
    return split.graph


def _split_gm(
    num_args: int, names: Sequence[str], modules: Sequence[StageModule], cut: graph_cut.GraphCut
) -> fx.GraphModule:
    """A graph that runs the stages in turn."""
    graph = fx.Graph()
    args: Any = tuple(graph.placeholder(f"arg_{i}") for i in range(num_args))
    kwargs: dict[str, Any] = {name: graph.placeholder(name) for name in names}
    result = graph.call_module("submod_pp_0", args, kwargs)
    for stage, received in enumerate(cut.crossing, start=1):
        places = range(len(received))
        args = tuple(graph.call_function(operator.getitem, (result, i)) for i in places)
        result = graph.call_module(f"submod_pp_{stage}", args)
    graph.output(result)
    root = {f"submod_pp_{i}": module for i, module in enumerate(modules)}
    return fx.GraphModule(root, graph, "SplitModel")
