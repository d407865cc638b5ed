"""The module of a captured stage: its subgraph, over the model's own parameters.

Names and objects are the model's own, so that state_dicts fit both, and an optimizer of either
trains both. Training and evaluation are two graphs; ``train()`` and ``eval()`` choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn

from penstock._torch_compat import children_of
from penstock.errors import StageError
from penstock.partition.export.call_form import CallForm
from penstock.partition.export.capture import CONSTANTS, Captured
from penstock.partition.export.graph_cut import GraphCut
from penstock.partition.spec import with_remote_kwargs
from penstock.partition.ties import named_tensors, names_by_tensor
from penstock.stage.pytree import flatten

__all__ = ["StageModule", "build_modules"]

F = TypeVar("F")


def _plain(function: F) -> F:
    """Hide a function from torch.compile, which has pytrees of its own."""
    hidden: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return hidden


@dataclass(frozen=True, slots=True, eq=False)
class StageCode:
    """The code of one stage in one mode; holds no state, so that copies of a stage share it."""

    graph: fx.GraphModule  # its class's ``forward`` runs on any module with its attributes
    read: Callable[..., Any] | None  # on the first stage, from the model's call to graph inputs
    assemble: Callable[..., Any] | None  # on the last, from graph outputs to the model's output
    form: CallForm
    # Of what it is called with, the position and name of each input of the model, and whether the
    # stage computes with it.
    inputs: tuple[tuple[int, str, bool], ...]

    def __deepcopy__(self, memo: object) -> StageCode:
        """Return the code itself."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickling: operations of torch can't be pickled."""
        raise TypeError(
            "a captured stage can't be pickled; save its state_dict(), and capture the model again "
            "where it is to be loaded, as every process of a pipeline does"
        )


class StageModule(nn.Module):
    """One stage of a captured model, with code for training (True) and for evaluation (False).

    ``missing`` is the reason why one of the two is missing. Casts in the model (``x.float()``) are
    fixed at capture: convert the model before.
    """

    # Stages read this attribute as on a layer: a graph may write into its inputs.
    inplace = True

    def __init__(
        self, codes: Mapping[bool, StageCode], missing: str, constants: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._codes = dict(codes)
        self._missing = missing
        self.has_loss = False  # True if the stage returns the model's output with a loss
        # An empty tensor that ``_apply`` moves along, to detect the target device.
        self._place = torch.empty(0, dtype=torch.uint8, device=constants["device"])
        targets = self.names_used()
        used = {n: c for n, c in constants.items() if f"{CONSTANTS}.{n}" in targets}
        setattr(self, CONSTANTS, SimpleNamespace(**used))

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        """Run the stage: from the model's inputs, or the previous stage's outputs, to its own.

        Keyword arguments are the model's inputs. Later stages take those that the first one lacks.
        """
        code = self._codes.get(self.training)
        if code is None:
            raise StageError(self._missing)
        if code.read is not None:
            values = tuple(code.read(values, kwargs))
        if any(values[place] is None for place, *_ in code.inputs):
            values = _completed(code, values, kwargs)
        with ExitStack() as regions:
            results = type(code.graph).forward(self, regions, *values)
        return results if code.assemble is None else code.assemble(results)

    def complete_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], others: Any
    ) -> dict[str, Any]:
        """The first stage's keyword arguments, with those of other ranks that the call lacks."""
        code = self._codes.get(self.training)
        if code is None:
            return dict(kwargs)
        return with_remote_kwargs(code.form.signature, args, kwargs, others)

    def names_used(self) -> set[str]:
        """The names of the parameters, buffers and constants that its graphs use."""
        nodes = (node for code in self._codes.values() for node in code.graph.graph.nodes)
        return {str(node.target) for node in nodes if node.op == "get_attr"}

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph and code of the current mode, or of the only one."""
        return (self._codes.get(self.training) or next(iter(self._codes.values()))).graph

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StageModule:
        """Also move constants."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            self._place = fn(self._place)
        except NotImplementedError:  # the meta device has no data to copy
            self._place = fn(torch.empty_like(self._place, device="cpu"))
        constants = vars(getattr(self, CONSTANTS))
        for name, value in constants.items():
            if isinstance(value, Tensor):
                constants[name] = value.to(self._place.device)
            elif isinstance(value, torch.device):
                constants[name] = self._place.device
        return self


@_plain
def _completed(
    code: StageCode, values: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The values with which a stage is called, with this rank's in place of remote ones."""
    leaves, tree = flatten(dict(kwargs))
    here = {".".join(map(str, path)): leaf for path, leaf in zip(tree.paths(), leaves, strict=True)}
    found = list(values)
    for place, name, is_used in code.inputs:
        if values[place] is None:
            leaf = here.get(name)
            found[place] = leaf if isinstance(leaf, Tensor) else None
            if is_used and found[place] is None:
                raise StageError(
                    f"the model's input {name} is neither passed on the rank of the first stage "
                    "nor on this one, which computes with it"
                )
    return tuple(found)


# --- from cut graphs to modules -----------------------------------------------------------------


def build_modules(
    model: nn.Module, modes: Mapping[bool, tuple[Captured, GraphCut]], missing: str
) -> list[StageModule]:
    """Build the modules of all stages from the cut forwards of training (True) and evaluation."""
    [num_stages] = {cut.num_stages for _, cut in modes.values()}
    constants = {n: c for captured, _ in modes.values() for n, c in captured.constants.items()}
    modules = []
    for index in range(num_stages):
        codes = {mode: _stage_code(*modes[mode], index) for mode in modes}
        modules.append(StageModule(codes, missing, constants).train(model.training))
    outputs = [captured.form.output for captured, _ in modes.values()]
    modules[-1].has_loss = any(output.has_loss for output in outputs)
    _attach_state(model, modules)
    return modules


def _stage_code(captured: Captured, cut: GraphCut, index: int) -> StageCode:
    graph, form = _stage_graph(cut, index), captured.form
    inputs = cut.graph.find_nodes(op="placeholder")
    names_of = dict(zip(inputs, form.names, strict=True))
    received = cut.crossing[index - 1] if index else inputs
    mine = {node for node, stage in cut.stage_of.items() if stage == index}
    places = tuple(
        (place, names_of[node], not mine.isdisjoint(node.users))
        for place, node in enumerate(received)
        if node in names_of
    )
    names = (node.target for node in graph.nodes if node.op == "get_attr")
    return StageCode(
        graph=fx.GraphModule(dict.fromkeys(names), graph, f"Stage{index}"),
        read=_plain(form.tensors) if index == 0 else None,
        assemble=_plain(form.output.assemble) if index == cut.num_stages - 1 else None,
        form=form,
        inputs=places,
    )


def _stage_graph(cut: GraphCut, index: int) -> fx.Graph:
    """The subgraph of one stage, from its inputs to its outputs.

    Its first input is an ``ExitStack``, in which it enters the grad modes and autocast of its
    nodes: a cut may lie inside such a region.
    """
    graph = fx.Graph()
    stack = graph.placeholder("regions")
    received = cut.crossing[index - 1] if index else cut.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, fx.Node] = {}
    for node in received:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)

    def here(node: fx.Node) -> fx.Node:
        if node not in env:
            assert node.op == "get_attr", node
            env[node] = graph.create_node("get_attr", node.target)
        return env[node]

    entered: Any = ()
    for node in (node for node, stage in cut.stage_of.items() if stage == index):
        regions = node.meta.get("regions", ())
        if regions != entered:
            graph.call_method("close", (stack,))
            for context, args in regions:
                entering = graph.call_function(context, args)
                graph.call_method("enter_context", (stack, entering))
            entered = regions
        env[node] = graph.node_copy(node, here)
    if index == cut.num_stages - 1:
        graph.output(fx.node.map_arg(cut.graph.output_node().args[0], here))
    else:
        graph.output(tuple(env[node] for node in cut.crossing[index]))
    return graph


def _attach_state(model: nn.Module, modules: Sequence[StageModule]) -> None:
    """Attach every parameter and buffer to the stages that use it, under its name in the model.

    An unused name goes with its tensor's used names, if any, else with the name before it.
    """
    used = [module.names_used() for module in modules]
    persistent = set(model.state_dict(keep_vars=True))
    tensors, aliases = named_tensors(model), names_by_tensor(model)
    stages_of = {name: [i for i, own in enumerate(used) if name in own] for name in tensors}
    stages = [0]
    for name, tensor in tensors.items():
        elsewhere = [i for alias in aliases[id(tensor)] for i in stages_of[alias]]
        stages = stages_of[name] or elsewhere[:1] or stages[:1]
        for module in (modules[i] for i in stages):
            *path, last = name.split(".")
            owner: nn.Module = module
            for part in path:
                if part not in children_of(owner):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor, persistent=name in persistent)
