"""Cut a captured graph at its marks: assign nodes to stages, and find the values that cross.

    a = f(x)          stage 0        a value that a later stage needs is handed on by every
    ── mark ──                       stage between, once per hop:
    b = g(a)          stage 1
    ── mark ──                       crossing[0] = (a,)       b needs it, and so does c
    c = h(a, b)       stage 2        crossing[1] = (a, b)

This module changes no model and knows no modules of stages.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from penstock._torch_compat import argument_effects
from penstock.errors import PartitionError
from penstock.partition.export.markers import HERE, MARK, pipe_split
from penstock.partition.plan import abbreviate
from penstock.partition.spec import describe

__all__ = [
    "Assignment",
    "Cut",
    "assign",
    "boundaries",
    "nodes_in",
    "stages_that_write",
    "take_marks",
]

aten: Any = torch.ops.aten
# These ops return their input itself if there is nothing to do, which their schema does not
# declare.
MAY_RETURN_INPUT = frozenset(
    {aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default}
)
NO_WORK = frozenset({operator.getitem, aten.sym_size.int})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place to cut.

    Args:
        label: its name for users, such as ``"before layers.2"``.
        position: the number of operations before it.
    """

    label: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A cut graph, with the stage of each operation.

    Args:
        cuts: the cuts, in order.
        stage_of: the stage of every operation.
        crossing: for each boundary the values that cross it, in the order of the graph.
    """

    cuts: tuple[Cut, ...]
    stage_of: Mapping[fx.Node, int]
    crossing: tuple[tuple[fx.Node, ...], ...]


def take_marks(graph: fx.Graph) -> tuple[Cut, ...]:
    """Collect the cuts marked in ``graph``, and remove the marks."""
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
    """Assign the nodes of ``graph`` to stages.

    Raises:
        PartitionError: a stage would be empty, or a value can't cross; the message names the
            value, and the module boundaries at which the graph can be cut.
    """
    memory = _Memory(graph)
    assignment = _assign(graph, cuts)
    busy = {stage for node, stage in assignment.stage_of.items() if _does_work(node)}
    empty = next((stage for stage in range(len(cuts) + 1) if stage not in busy), None)
    if empty is not None:
        begin = f"{cuts[empty - 1].label!r}" if empty else "the model's beginning"
        end = f"{cuts[empty].label!r}" if empty < len(cuts) else "its end"
        raise PartitionError(
            f"stage {empty} of {len(cuts) + 1} is empty: nothing that the output needs runs "
            f"between {begin} and {end}; leave one of these cuts out, or move it"
        )
    problem = _problem(assignment, memory)
    if problem is not None:
        boundary, message = problem
        raise PartitionError(
            f"the model can't be cut {cuts[boundary].label!r}: {message}; "
            f"{boundaries(graph, memory)}"
        )
    return assignment


def nodes_in(assignment: Assignment, stage: int) -> Iterator[fx.Node]:
    """The nodes that run in ``stage``, in order."""
    return (node for node, at in assignment.stage_of.items() if at == stage)


def stages_that_write(graph: fx.Graph, assignment: Assignment) -> set[int]:
    """The stages that write in place into a value from the previous stage."""
    memory = _Memory(graph)
    found = set()
    for writer, target in memory.writes:
        stage = assignment.stage_of[writer]
        if stage and any(memory.same(n, target) for n in assignment.crossing[stage - 1]):
            found.add(stage)
    return found


def boundaries(graph: fx.Graph, memory: _Memory | None = None) -> str:
    """Describe, for messages, the module boundaries at which a graph can be cut in two."""
    memory = memory if memory is not None else _Memory(graph)
    labels: dict[int, str] = {}
    for cut in _module_boundaries(graph):
        labels.setdefault(cut.position, cut.label)
    valid = [
        repr(label)
        for position, label in sorted(labels.items())
        if _works(graph, Cut(label=label, position=position), memory)
    ]
    if not valid:
        return "it can be cut at no boundary of a module"
    return f"it can be cut {abbreviate(valid, most=12)}"


def _works(graph: fx.Graph, cut: Cut, memory: _Memory) -> bool:
    assignment = _assign(graph, [cut])
    busy = {stage for node, stage in assignment.stage_of.items() if _does_work(node)}
    return len(busy) == 2 and _problem(assignment, memory) is None


def _module_boundaries(graph: fx.Graph) -> list[Cut]:
    """The cuts before and after modules that run once."""
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


def _assign(graph: fx.Graph, cuts: Sequence[Cut]) -> Assignment:
    positions = [cut.position for cut in cuts]
    stage_of: dict[fx.Node, int] = {}
    position = 0
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        if node.target is operator.getitem and node.args[0] in stage_of:
            stage_of[node] = stage_of[node.args[0]]  # only one item crosses, not all
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


def _does_work(node: fx.Node) -> bool:
    """True if ``node`` computes a value, not just a view."""
    return node.target not in NO_WORK and not getattr(node.target, "is_view", False)


# --- values that can't cross --------------------------------------------------------------------


class _Memory:
    """Aliases among values, and the operations that write into values."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self.writes: list[tuple[fx.Node, fx.Node]] = []
        for node in graph.nodes:
            if node.op.startswith("call"):
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        effects = argument_effects(node.target)
        if node.target is operator.getitem:
            self._join(node, node.args[0])
        elif effects is None or node.target in MAY_RETURN_INPUT:
            for source in node.all_input_nodes:  # unknown operation: assume a view
                self._join(node, source)
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
        """True if two values may share memory."""
        return self._root(left) is self._root(right)


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [n for item in value for n in _nodes(item)] if isinstance(value, (list, tuple)) else []


def _problem(assignment: Assignment, memory: _Memory) -> tuple[int, str] | None:
    """The first boundary with a value that can't cross, and the reason."""
    for boundary, values in enumerate(assignment.crossing):
        for node in values:
            value = node.meta.get("val")
            if not _can_cross(value):
                return boundary, f"{_described(node)} would cross, and a {_kind(value)} can't"
    for writer, target in memory.writes:
        found = _write_problem(assignment, memory, writer, target)
        if found is not None:
            return found
    return None


def _write_problem(
    assignment: Assignment, memory: _Memory, writer: fx.Node, target: fx.Node
) -> tuple[int, str] | None:
    """The boundary that an in-place write forbids, and the reason."""
    stage = assignment.stage_of[writer]
    for node in writer.graph.nodes:
        if node.op != "get_attr" or not memory.same(node, target):
            continue
        others = {assignment.stage_of.get(user, stage) for user in node.users} - {stage}
        changes = f"the forward changes {node.target} in stage {stage} ({writer.name})"
        if others:
            return max(0, min(stage, len(assignment.cuts) - 1)), (
                f"{changes}, and uses it in stage {min(others)} too, where it would be another copy"
            )
        for boundary, values in enumerate(assignment.crossing):
            for value in values:
                if memory.same(value, target):
                    return boundary, (
                        f"{changes}, and {_described(value)}, which shares its memory, would "
                        "cross: by the time that it is used, other microbatches may have changed "
                        "it (x.clone() is a value that stays)"
                    )
    arrived = assignment.crossing[stage - 1] if stage else ()
    sharing = [node for node in arrived if memory.same(node, target)]
    if len(sharing) > 1:
        return stage - 1, (
            f"{_described(sharing[0])} and {_described(sharing[1])} share memory, and "
            f"{writer.name} writes into it after the cut, where they would be copies"
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
    shape = f" ({describe(value)})" if value is not None else ""
    return f"{node.name}{shape}{f' of {modules[-1]}' if modules else ''}"
