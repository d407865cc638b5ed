"""Cut a captured graph at its marks: which node runs in which stage, and what crosses.

    a = f(x)          stage 0        a value that a later stage needs is handed on by every
    ── mark ──                       stage between, once per hop:
    b = g(a)          stage 1
    ── mark ──                       crossing[0] = (a,)       b needs it, and so does c
    c = h(a, b)       stage 2        crossing[1] = (a, b)

It changes no model and knows no modules of stages.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from penstock._torch_compat import argument_effects, shape_text
from penstock.errors import PartitionError
from penstock.partition.export.markers import HERE, MARK, pipe_split
from penstock.partition.export.not_captured import NotCaptured
from penstock.partition.forward.nearest import Cut, nearest_place

__all__ = [
    "Assignment",
    "Cut",
    "assign",
    "nearest_to",
    "nodes_in",
    "stages_that_write",
    "take_marks",
]

aten: Any = torch.ops.aten
# They return their input itself where there is nothing to do, and don't say so in their schema.
MAY_RETURN_INPUT = frozenset(
    {aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default}
)
NO_WORK = frozenset({operator.getitem, aten.sym_size.int})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A graph, cut.

    Args:
        cuts: where.
        stage_of: for every node that does something its stage.
        crossing: for each boundary what crosses it, in the order of the graph.
    """

    cuts: tuple[Cut, ...]
    stage_of: Mapping[fx.Node, int]
    crossing: tuple[tuple[fx.Node, ...], ...]


def take_marks(graph: fx.Graph) -> tuple[Cut, ...]:
    """The cuts that are marked in ``graph``; the marks themselves are taken out of it."""
    cuts = []
    position = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (MARK, pipe_split):
            label = str(node.args[0]) if node.args else HERE
            cuts.append(Cut(label=label, position=position))
            graph.erase_node(node)
        elif node.op.startswith("call"):
            position += 1
    return tuple(cuts)


def assign(graph: fx.Graph, cuts: Sequence[Cut]) -> Assignment:
    """Cut ``graph``.

    Raises:
        PartitionError: a stage would be empty, or something can't cross where it is cut. The
            message names the value, and the nearest place that works.
    """
    memory = _Memory(graph)
    assignment = _assign(graph, cuts)
    empty = _empty_stage(assignment)
    if empty is not None:
        around = [b for b in (empty - 1, empty) if 0 <= b < len(cuts)]
        raise _refused(_told_empty(assignment, empty), graph, cuts, around)
    problem = _problem(assignment, memory)
    if problem is not None:
        boundary, told = problem
        what = f"the model can't be cut {cuts[boundary].label!r}: {told}"
        raise _refused(what, graph, cuts, [boundary])
    return assignment


def nodes_in(assignment: Assignment, stage: int) -> Iterator[fx.Node]:
    """The nodes that run in ``stage``, in order."""
    return (node for node, at in assignment.stage_of.items() if at == stage)


def _assign(graph: fx.Graph, cuts: Sequence[Cut]) -> Assignment:
    positions = [cut.position for cut in cuts]
    stage_of: dict[fx.Node, int] = {}
    position = 0
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        if node.target is operator.getitem and node.args[0] in stage_of:
            stage_of[node] = stage_of[node.args[0]]  # one item crosses rather than all
        else:
            stage_of[node] = bisect_right(positions, position)
        position += 1
    crossing: list[list[fx.Node]] = [[] for _ in cuts]
    for node in graph.nodes:
        if node.op == "placeholder" or node in stage_of:
            begin = stage_of.get(node, 0)
            end = max((stage_of.get(user, len(cuts)) for user in node.users), default=begin)
            for boundary in range(begin, end):
                crossing[boundary].append(node)
    return Assignment(
        cuts=tuple(cuts), stage_of=stage_of, crossing=tuple(tuple(each) for each in crossing)
    )


def _empty_stage(assignment: Assignment) -> int | None:
    busy = {s for node, s in assignment.stage_of.items() if _does_work(node)}
    return next((stage for stage in range(len(assignment.cuts) + 1) if stage not in busy), None)


def _does_work(node: fx.Node) -> bool:
    """Whether ``node`` computes something, rather than only look at a value in another way."""
    return node.target not in NO_WORK and not getattr(node.target, "is_view", False)


def _told_empty(assignment: Assignment, stage: int) -> str:
    cuts = assignment.cuts
    begin = f"{cuts[stage - 1].label!r}" if stage else "the model's beginning"
    end = f"{cuts[stage].label!r}" if stage < len(cuts) else "its end"
    return (
        f"stage {stage} of {len(cuts) + 1} is empty: nothing that the output needs runs "
        f"between {begin} and {end}; leave one of these cuts out, or move it"
    )


def nearest_to(graph: fx.Graph, cuts: Sequence[Cut], name: str) -> str:
    """For messages: the nearest place to a module that can be cut at, where it itself is none.

    Args:
        graph: the graph.
        cuts: those that its marks make; of the module there may be several or none.
        name: the module.
    """
    places = [place for place in _module_boundaries(graph) if place.label.split()[1] != name]
    wrong = [cut for cut in cuts if cut.label.endswith(f" {name}")]
    others = [cut for cut in cuts if cut not in wrong]
    around = [p for p in places if name.startswith(f"{p.label.split()[1]}.")]
    start = next(iter((*wrong, *around)), None)
    if start is None:
        return "cut around a module that it calls"
    memory = _Memory(graph)
    now = sorted([*others, replace(start, label="")], key=lambda cut: cut.position)
    at = [i for i, cut in enumerate(now) if not cut.label]
    move = nearest_place(now, places, lambda c: _works(graph, c, memory), at)
    return str(move) if move is not None else "cut around a module that it calls"


def _refused(
    what: str, graph: fx.Graph, cuts: Sequence[Cut], boundaries: Sequence[int]
) -> PartitionError:
    """The error of cuts that don't work, with the nearest place that does."""
    memory = _Memory(graph)
    places = _module_boundaries(graph)
    move = nearest_place(cuts, places, lambda c: _works(graph, c, memory), boundaries)
    if move is not None:
        return PartitionError(f"{what}; {move}")
    return NotCaptured.of(
        f"{what}; moving this cut alone to another module does not help", "cut elsewhere"
    )


def stages_that_write(graph: fx.Graph, assignment: Assignment) -> set[int]:
    """The stages that write into something that comes from the stage before."""
    memory = _Memory(graph)
    found = set()
    for writer, target in memory.writes:
        stage = assignment.stage_of[writer]
        if stage and any(memory.same(n, target) for n in assignment.crossing[stage - 1]):
            found.add(stage)
    return found


# --- what can't cross ----------------------------------------------------------------------------


class _Memory:
    """Which values share memory, and which operations write into it."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self.writes: list[tuple[fx.Node, fx.Node]] = []
        for node in graph.nodes:
            if node.op.startswith("call"):
                self._note(node)

    def _note(self, node: fx.Node) -> None:
        effects = argument_effects(node.target)
        if node.target is operator.getitem:
            self._join(node, node.args[0])
        elif effects is None or node.target in MAY_RETURN_INPUT:
            for source in node.all_input_nodes:  # it may be anything: think the worst
                if not node.meta.get("fresh"):
                    self._join(node, source)
            if effects is None and (node.meta.get("writes") or _writes_by_name(node)):
                self.writes.append((node, node.all_input_nodes[0]))
        else:
            for place, (name, shares, written) in enumerate(effects):
                value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
                for source in _nodes(value):
                    if shares:
                        self._join(node, source)
                    if written:
                        self.writes.append((node, source))

    def _root(self, node: fx.Node) -> fx.Node:
        while (above := self._parent.get(node, node)) is not node:
            node = above
        return node

    def _join(self, left: Any, right: Any) -> None:
        if isinstance(right, fx.Node):
            self._parent[self._root(left)] = self._root(right)

    def same(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether two values may share memory."""
        return self._root(left) is self._root(right)


def _writes_by_name(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_function":
        in_place = name.startswith("i") and hasattr(operator, f"__{name}__")
        return (in_place and name not in ("inv", "invert", "index", "indexOf")) or bool(
            node.kwargs.get("inplace")
        )
    return bool(node.op == "call_method" and name.endswith("_") and not name.endswith("__"))


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [n for item in value for n in _nodes(item)] if isinstance(value, (list, tuple)) else []


def _problem(assignment: Assignment, memory: _Memory) -> tuple[int, str] | None:
    """The first boundary at which something can't cross, and why."""
    for boundary, values in enumerate(assignment.crossing):
        for node in values:
            if not _can_cross(node.meta.get("val")):
                kind = _kind(node.meta["val"])
                return boundary, f"{_described(node)} would cross, and a {kind} can't"
    for writer, target in memory.writes:
        stage = assignment.stage_of[writer]
        told = _attribute_elsewhere(assignment, memory, writer, target)
        if told is not None:
            return max(0, min(stage, len(assignment.cuts) - 1)), told
        crossed = _attribute_crosses(assignment, memory, writer, target)
        if crossed is not None:
            return crossed
        arrived = assignment.crossing[stage - 1] if stage else ()
        sharing = [node for node in arrived if memory.same(node, target)]
        if len(sharing) > 1:
            return stage - 1, (
                f"{_described(sharing[0])} and {_described(sharing[1])} share memory, and "
                f"{writer.name} writes into it after the cut, where they would be copies"
            )
    return None


def _attribute_elsewhere(
    assignment: Assignment, memory: _Memory, writer: fx.Node, target: fx.Node
) -> str | None:
    """Why a buffer that ``writer`` changes can't be in two stages, where it is."""
    stage = assignment.stage_of[writer]
    for node in writer.graph.nodes:
        if node.op == "get_attr" and memory.same(node, target):
            others = {assignment.stage_of.get(user, stage) for user in node.users} - {stage}
            if others:
                return (
                    f"the forward changes {node.target} in stage {stage} ({writer.name}), and "
                    f"uses it in stage {min(others)} too, where it would be another copy"
                )
    return None


def _attribute_crosses(
    assignment: Assignment, memory: _Memory, writer: fx.Node, target: fx.Node
) -> tuple[int, str] | None:
    """Where a buffer that ``writer`` changes would be sent on as it is, and why it can't."""
    sharing = (n for n in writer.graph.nodes if n.op == "get_attr" and memory.same(n, target))
    attribute = next(sharing, None)
    if attribute is None:
        return None
    for boundary, values in enumerate(assignment.crossing):
        for node in values:
            if memory.same(node, target):
                return boundary, (
                    f"the forward changes {attribute.target} in stage "
                    f"{assignment.stage_of[writer]} ({writer.name}), and {_described(node)}, which "
                    "shares its memory, would cross: by the time that it is used, other "
                    "microbatches may have changed it (x.clone() is a value that stays)"
                )
    return None


def _can_cross(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not value.is_nested
    if isinstance(value, (tuple, list)):
        return all(map(_can_cross, value))
    plain = (int, float, bool, complex, str, type(None))
    return isinstance(value, (*plain, torch.SymInt, torch.SymFloat, torch.SymBool))


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    return f"{layout} tensor"


def _described(node: fx.Node) -> str:
    modules = node.meta.get("modules") or ()
    value = node.meta.get("val")
    shape = f" ({shape_text(value)})" if value is not None else ""
    return f"{node.name}{shape}{f' of {modules[-1]}' if modules else ''}"


def _works(graph: fx.Graph, cuts: Sequence[Cut], memory: _Memory) -> bool:
    assignment = _assign(graph, cuts)
    return _empty_stage(assignment) is None and _problem(assignment, memory) is None


def _module_boundaries(graph: fx.Graph) -> list[Cut]:
    """The places before and after modules; of one that runs several times there are none."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    again: set[str] = set()
    work = [node for node in graph.nodes if node.op.startswith("call")]
    for position, node in enumerate(work):
        for name in node.meta.get("modules") or ():
            first.setdefault(name, position)
            if last.setdefault(name, position) != position:
                again.add(name)
            last[name] = position + 1
    once = [name for name in first if name not in again]
    return [Cut(label=f"before {name}", position=first[name]) for name in once] + [
        Cut(label=f"after {name}", position=last[name]) for name in once
    ]
