"""From a cut graph to the modules of its stages, with the model's own parameters in them.

It knows neither how graphs are captured nor where they are cut best.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from penstock.partition.export.captured import CONSTANTS, Captured
from penstock.partition.export.graph_cut import Assignment, nodes_in, stages_that_write
from penstock.partition.export.regions import Region, weave
from penstock.partition.export.stage_module import StageCode, StageModule, compile_graph
from penstock.partition.ties import named_tensors, names_by_tensor

__all__ = ["Mode", "build_modules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A captured forward, cut: that of training, or that of evaluation."""

    captured: Captured
    assignment: Assignment

    @property
    def num_stages(self) -> int:
        """Into how many stages."""
        return len(self.assignment.cuts) + 1


def build_modules(
    model: nn.Module, modes: Mapping[bool, Mode], missing: str, device: torch.device
) -> list[StageModule]:
    """The stages' modules.

    Args:
        model: the model whose parameters and buffers they take.
        modes: what to run in training (True) and in evaluation (False).
        missing: why there is no code for the mode that has none.
        device: where the model is.
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
        modules.append(
            StageModule(
                index=index,
                codes=codes,
                missing=missing,
                device=device,
                constants={n: constants[n] for n in _used(codes, constants)},
                inplace=index in writing,
            ).train(model.training)
        )
    _attach_all(model, modules, {each for mode in modes.values() for each in mode.captured.read})
    return modules


# --- graphs --------------------------------------------------------------------------------------


def _stage_code(mode: Mode, index: int) -> StageCode:
    is_last, captured = index == mode.num_stages - 1, mode.captured
    graph = _stage_graph(mode, index)
    return StageCode(
        graph=graph,
        run=compile_graph(graph),
        take=_uncompiled(captured.form.tensors) if index == 0 else None,
        give=_uncompiled(captured.output.assemble) if is_last else None,
        has_loss=is_last and captured.output.has_loss,
    )


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stays as it is where a stage is compiled: the compiler has its own trees."""
    left_alone: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left_alone


def _stage_graph(mode: Mode, index: int) -> fx.Graph:
    """The part of the graph that runs in one stage: from what comes in to what goes out."""
    whole, cut = mode.captured.graph, mode.assignment
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    arriving = (
        [node for node in whole.nodes if node.op == "placeholder"]
        if index == 0
        else cut.crossing[index - 1]
    )
    for node in arriving:
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
        (output,) = (node for node in whole.nodes if node.op == "output")
        graph.output(fx.node.map_arg(output.args[0], here))
    else:
        graph.output(tuple(env[node] for node in cut.crossing[index]))
    return graph


# --- parameters and buffers ----------------------------------------------------------------------


def _used(codes: Mapping[bool, StageCode], constants: Mapping[str, Any]) -> set[str]:
    targets = {str(n.target) for code in codes.values() for n in code.graph.nodes}
    return {name for name in constants if f"{CONSTANTS}.{name}" in targets}


def _attach_all(
    model: nn.Module, modules: Sequence[StageModule], read: Collection[tuple[str, str, Any]]
) -> None:
    """Give every parameter and buffer to the stages that use it, or stand nearest to it."""
    used = [module.names_used() for module in modules]
    wholes = _whole_modules(model, used)
    for stage, names in enumerate(wholes):
        for name in names:
            modules[stage].attach_module(name, model.get_submodule(name))
            modules[stage].hold_to(each for each in read if f"{each[0]}.".startswith(f"{name}."))
    inside = [name for names in wholes for name in names]
    state = set(model.state_dict(keep_vars=True))
    home: dict[str, int] = {}
    known = names_by_tensor(model)
    for name in (name for names in known.values() for name in names):
        for stage, mine in enumerate(used):
            if name in mine:
                home.setdefault(name, stage)
    for name, tensor in named_tensors(model).items():
        if any(name.startswith(f"{whole}.") for whole in inside):
            continue
        stages = [s for s, mine in enumerate(used) if name in mine]
        if not stages:
            stages = [_resting_place(name, known[id(tensor)], home)]
        for stage in stages:
            modules[stage].attach(name, tensor, persistent=name in state)


def _whole_modules(model: nn.Module, used: Sequence[set[str]]) -> list[list[str]]:
    """The names of modules that run as a whole, by stage (of captures that see modules)."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    return [sorted(name for name in names if name in known) for names in used]


def _resting_place(name: str, names: Sequence[str], home: Mapping[str, int]) -> int:
    """The stage for a name that no stage uses: with its tensor, or with what is named alike."""
    for alias in names:
        if alias in home:
            return home[alias]
    path = name.split(".")

    def likeness(other: str) -> int:
        pairs = zip(path, other.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(path))

    return home[max(home, key=likeness)] if home else 0
