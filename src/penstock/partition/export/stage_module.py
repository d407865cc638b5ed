"""The module of a captured stage: its subgraph, over the model's own parameters.

    model                   stage 1's module          names and objects are the model's own, so
    ├─ embed.weight         └─ layers                 that state_dicts fit both, and an optimizer
    └─ layers                  └─ 1                   of either trains both
       ├─ 0.weight                └─ weight
       └─ 1.weight

Training and evaluation are two graphs; ``train()`` and ``eval()`` choose. This module neither
captures graphs nor chooses cuts.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from penstock._torch_compat import children_of
from penstock.errors import PartitionError, StageError
from penstock.partition.export.capture import CONSTANTS, Captured
from penstock.partition.export.graph_cut import Assignment, nodes_in, stages_that_write
from penstock.partition.export.regions import Region, leaving_all, weave
from penstock.partition.ties import named_tensors, names_by_tensor

__all__ = ["CutGraph", "StageCode", "StageModule", "build_modules"]

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGraph:
    """A cut captured forward, for training or for evaluation."""

    captured: Captured
    assignment: Assignment

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.assignment.cuts) + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCode:
    """The code of one stage in one mode.

    Args:
        graph: the stage's subgraph.
        run: the graph as a function of the module and its inputs.
        take: on the first stage, the function from a call of the model to the graph's inputs.
        give: on the last stage, the function from the graph's outputs to the model's output.
        has_loss: True if the model's output has a loss.
    """

    graph: fx.Graph
    run: Callable[..., Any]
    take: Callable[..., Any] | None
    give: Callable[..., Any] | None
    has_loss: bool

    def __deepcopy__(self, memo: object) -> StageCode:
        """Return the code itself, since it holds no state."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickling: operations of torch can't be pickled."""
        raise TypeError(
            "a captured stage can't be pickled; save its state_dict(), and capture the model again "
            "where it is to be loaded, as every process of a pipeline does"
        )


class StageModule(nn.Module):
    """One stage of a captured model.

    Explicit casts in the model (``x.float()``) are fixed at capture. To change dtypes, convert the
    model before it is captured.

    Args:
        index: the stage's number.
        codes: the code for training (True) and for evaluation (False).
        missing: the reason why one of the two codes is missing.
        device: the device of the model at capture.
        constants: the constant tensors of the graphs.
        inplace: True if the stage writes in place into its inputs.
    """

    def __init__(
        self,
        *,
        index: int,
        codes: Mapping[bool, StageCode],
        missing: str,
        device: torch.device,
        constants: Mapping[str, Any],
        inplace: bool,
    ) -> None:
        super().__init__()
        self.index = index
        # Stages read this attribute as on a layer: it means that inputs are aliased where written.
        self.inplace = inplace
        self._codes = dict(codes)
        self._missing = missing
        # An empty tensor that ``_apply`` moves along, to detect the target device.
        self._place = torch.empty(0, dtype=torch.uint8, device=device)
        setattr(self, CONSTANTS, SimpleNamespace(**constants))

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        """Run the stage.

        Args:
            values: on the first stage the model's inputs, else the outputs of the previous stage.
            kwargs: on the first stage the model's inputs; ignored by later stages.

        Returns:
            The values for the next stage; on the last stage, the model's output.
        """
        code = self._codes.get(self.training)
        if code is None:
            raise StageError(self._missing)
        if code.take is not None:
            values = tuple(code.take(values, kwargs))
        with leaving_all():
            results = code.run(self, *values)
        return results if code.give is None else code.give(results)

    def attach(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Register a parameter or buffer of the model under its name there.

        Args:
            name: the name.
            tensor: the parameter or buffer itself.
            persistent: True if a buffer is part of state_dicts.
        """
        path, _, last = name.rpartition(".")
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in children_of(owner):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent=persistent)

    def names_used(self) -> set[str]:
        """The names of the parameters and buffers that its graphs use."""
        nodes = (node for code in self._codes.values() for node in code.graph.nodes)
        return {str(node.target) for node in nodes if node.op == "get_attr"}

    @property
    def has_loss(self) -> bool:
        """True if the stage returns the model's output with a loss."""
        return any(code.has_loss for code in self._codes.values())

    @property
    def graph(self) -> fx.Graph:
        """The graph of the current mode."""
        return (self._codes.get(self.training) or next(iter(self._codes.values()))).graph

    @property
    def code(self) -> str:
        """The current mode's graph as Python code."""
        return self.graph.python_code("self").src

    def print_readable(self, print_output: bool = True) -> str:
        """Return the current mode's code, and print it if ``print_output``."""
        code = self.code.replace("\n", "\n    ")
        text = f"class Stage{self.index}(torch.nn.Module):{code}"
        if print_output:
            print(text)  # noqa: T201
        return text

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StageModule:
        """Also move constants, and replace devices named in the graphs."""
        before = self._place.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            self._place = fn(self._place)
        except NotImplementedError:  # the meta device has no data to copy
            self._place = fn(torch.empty_like(self._place, device="cpu"))
        now = self._place.device
        if now != before:
            constants = vars(getattr(self, CONSTANTS))
            for name, value in constants.items():
                if isinstance(value, Tensor):
                    constants[name] = _moved_constant(value, now)
            self._codes = {k: _moved(code, before, now) for k, code in self._codes.items()}
        return self


def _moved_constant(value: Tensor, device: torch.device) -> Tensor:
    if value.is_meta and device.type != "meta":
        raise PartitionError(
            f"the forward makes a tensor of fixed values ({tuple(value.shape)}, {value.dtype}) on "
            "the meta device, where it has none: hold it in a buffer, which is initialized or "
            "loaded, or build the model on another device"
        )
    return value.to(device)


def _moved(code: StageCode, before: torch.device, now: torch.device) -> StageCode:
    """``code`` with the devices in its graph replaced."""

    def replaced(value: Any) -> Any:
        is_device = isinstance(value, torch.device)
        # Shape tensors that a model on another device made on the meta device stay there.
        return now if is_device and (value.type != "meta" or before.type == "meta") else value

    graph = fx.Graph()
    graph.output(graph.graph_copy(code.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, replaced)
        node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)
    return replace(code, graph=graph, run=_compile(graph))


# --- from a cut graph to modules ----------------------------------------------------------------


def build_modules(
    model: nn.Module, modes: Mapping[bool, CutGraph], missing: str, device: torch.device
) -> list[StageModule]:
    """Build the modules of all stages.

    Args:
        model: the model; its parameters and buffers become the stages'.
        modes: the graphs of training (True) and evaluation (False).
        missing: the reason why one of the two graphs is missing.
        device: the model's device.
    """
    num_stages = next(iter(modes.values())).num_stages
    constants = {
        name: value for m in modes.values() for name, value in m.captured.constants.items()
    }
    writing = set[int]().union(
        *(stages_that_write(m.captured.graph, m.assignment) for m in modes.values())
    )
    modules = []
    for index in range(num_stages):
        codes = {training: _stage_code(mode, index) for training, mode in modes.items()}
        targets = {str(node.target) for code in codes.values() for node in code.graph.nodes}
        modules.append(
            StageModule(
                index=index,
                codes=codes,
                missing=missing,
                device=device,
                constants={n: c for n, c in constants.items() if f"{CONSTANTS}.{n}" in targets},
                inplace=index in writing,
            ).train(model.training)
        )
    _attach_state(model, modules)
    return modules


def _stage_code(mode: CutGraph, index: int) -> StageCode:
    is_last, captured = index == mode.num_stages - 1, mode.captured
    graph = _stage_graph(mode, index)
    return StageCode(
        graph=graph,
        run=_compile(graph),
        take=_uncompiled(captured.form.tensors) if index == 0 else None,
        give=_uncompiled(captured.output.assemble) if is_last else None,
        has_loss=is_last and captured.output.has_loss,
    )


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, excluded from torch.compile, which has pytrees of its own."""
    plain: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return plain


def _compile(graph: fx.Graph) -> Callable[..., Any]:
    """Compile a graph to a function of the module that holds its attributes, and of its inputs."""
    code = graph.python_code("self")
    filename = f"<penstock stage code {next(_numbers)}>"
    # So that tracebacks show the failing line.
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(True), filename)
    scope = dict(code.globals)
    exec(compile(code.src, filename, "exec"), scope)
    run: Callable[..., Any] = scope["forward"]
    return run


def _stage_graph(mode: CutGraph, index: int) -> fx.Graph:
    """The subgraph of one stage, from its inputs to its outputs."""
    whole, cut = mode.captured.graph, mode.assignment
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = (
        [node for node in whole.nodes if node.op == "placeholder"]
        if index == 0
        else cut.crossing[index - 1]
    )
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)

    def here(node: fx.Node) -> fx.Node:
        if node not in env:
            assert node.op == "get_attr", node
            env[node] = graph.create_node("get_attr", node.target)
        return env[node]

    regions: list[tuple[Region, Any]] = []
    for node in nodes_in(cut, index):
        weave(graph, regions, node.meta.get("regions") or ())
        env[node] = graph.node_copy(node, here)
    weave(graph, regions, ())
    if index == mode.num_stages - 1:
        graph.output(fx.node.map_arg(whole.output_node().args[0], here))
    else:
        graph.output(tuple(env[node] for node in cut.crossing[index]))
    return graph


def _attach_state(model: nn.Module, modules: Sequence[StageModule]) -> None:
    """Attach every parameter and buffer to the stages that use it.

    An unused name goes to the stages of its tensor's used names, if any, else to the stage of the
    name before it.
    """
    used = [module.names_used() for module in modules]
    state = set(model.state_dict(keep_vars=True))
    names = names_by_tensor(model)
    stages_of = {
        name: [stage for stage, mine in enumerate(used) if name in mine]
        for group in names.values()
        for name in group
    }
    last = 0
    for name, tensor in named_tensors(model).items():
        aliases = [stage for alias in names[id(tensor)] for stage in stages_of[alias]]
        stages = stages_of[name] or aliases[:1] or [last]
        for stage in stages:
            modules[stage].attach(name, tensor, persistent=name in state)
        last = stages[0]
