"""Cut a captured graph: choose cuts among its marks, assign nodes to stages, find what crosses.

a = f(x)          stage 0        a value that a later stage needs is handed on by every
── cut ──                        stage between, once per hop:
b = g(a)          stage 1
── cut ──                        crossing[0] = (a,)       b needs it, and so does c
c = h(a, b)       stage 2        crossing[1] = (a, b)
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from penstock._torch_compat import mutated_arguments
from penstock.errors import PartitionError
from penstock.partition.export.markers import HERE, MARK, SplitPoint, label_of, pipe_split
from penstock.partition.plan import abbreviate
from penstock.partition.spec import value_text

__all__ = ["Cut", "GraphCut", "all_cuts", "assign", "cuts_at_names", "take_marks"]

# The operations that write in place, each with the values that share the memory.
Writes: TypeAlias = Sequence[tuple[fx.Node, Sequence[fx.Node]]]

aten: Any = torch.ops.aten
# These return their input itself in evaluation, while their fake results have memory of their own.
MAY_RETURN_INPUT = frozenset(
    {aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default}
)
CAN_CROSS = (
    *(Tensor, int, float, complex, str, type(None)),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)
NO_WORK = frozenset({operator.getitem, aten.sym_size.int})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cut:
    """A place to cut: the number of operations before it, and its name for users."""

    position: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphCut:
    """A cut graph: the stage of every operation, and for each boundary the values that cross it."""

    graph: fx.Graph
    stage_of: Mapping[fx.Node, int]
    crossing: tuple[tuple[fx.Node, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.crossing) + 1

    def empty_stages(self) -> list[int]:
        """The stages without work; a view is no work."""
        working = (node for node in self.stage_of if not getattr(node.target, "is_view", False))
        busy = {self.stage_of[node] for node in working if node.target not in NO_WORK}
        return [stage for stage in range(self.num_stages) if stage not in busy]


# --- cuts among the marks -----------------------------------------------------------------------


def take_marks(graph: fx.Graph) -> list[Cut]:
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
    return cuts


def all_cuts(
    graph: fx.Graph, marks: Sequence[Cut], points: Mapping[str, SplitPoint]
) -> Sequence[Cut]:
    """Cut at every mark; each split point must have left exactly one."""
    counts = Counter(mark.label for mark in marks)
    for name, point in points.items():
        label = label_of(name, point)
        if counts[label] != 1:
            raise PartitionError(
                f"there is no one place {label!r}: the forward calls module {name} "
                f"{counts[label]} times outside of compiled or fused regions; take torch.compile "
                "off until the model is cut, call pipe_split() in the code where you mean, or cut "
                f"elsewhere: {_boundaries(graph)}"
            )
    return marks


def cuts_at_names(marks: Sequence[Cut], stages: Sequence[Sequence[str]]) -> Sequence[Cut]:
    """Start each stage at the first of its modules to run, of which none may run in another."""
    first = {mark.label: mark for mark in reversed(marks)}
    called = [{n: first[label_of(n)] for n in names if label_of(n) in first} for names in stages]
    if {} in called[1:]:
        stage = called.index({}, 1)
        raise PartitionError(
            f"stage {stage} has no beginning: the forward calls none of "
            f"{abbreviate(stages[stage])}; name modules that it calls"
        )
    starts = sorted(min(each.values()) for each in called[1:])
    positions = [start.position for start in starts]
    for stage, each in enumerate(called):
        for name, mark in each.items():
            if (runs_in := bisect_right(positions, mark.position)) != stage:
                raise PartitionError(
                    f"{name} is named in stage {stage}, but runs in stage {runs_in} of the "
                    "captured graph, which is cut where the first module of each stage runs; name "
                    "modules in the order in which they run"
                )
    return starts


# --- stages -------------------------------------------------------------------------------------


def assign(graph: fx.Graph, cuts: Sequence[Cut]) -> GraphCut:
    """Assign the nodes of ``graph`` to stages.

    Raises:
        PartitionError: a stage would be empty, or a value can't cross.
    """
    cut = _assign(graph, [cut.position for cut in cuts])
    for empty in cut.empty_stages():
        begin = f"{cuts[empty - 1].label!r}" if empty else "the model's beginning"
        end = f"{cuts[empty].label!r}" if empty < len(cuts) else "its end"
        raise PartitionError(
            f"stage {empty} of {cut.num_stages} is empty: nothing that the output needs runs "
            f"between {begin} and {end}; leave one of these cuts out, or move it"
        )
    for boundary, message in _problems(cut, _writes(graph)):
        raise PartitionError(
            f"the model can't be cut {cuts[boundary].label!r}: {message}; {_boundaries(graph)}"
        )
    return cut


def _assign(graph: fx.Graph, positions: Sequence[int]) -> GraphCut:
    stage_of: dict[fx.Node, int] = {}
    for position, node in enumerate(n for n in graph.nodes if n.op.startswith("call")):
        if node.target is operator.getitem and node.args[0] in stage_of:
            stage_of[node] = stage_of[node.args[0]]  # only one item crosses, not all
        else:
            stage_of[node] = bisect_right(positions, position)
    last = len(positions)
    crossing: list[list[fx.Node]] = [[] for _ in positions]
    for node in graph.nodes:
        if node.op == "placeholder" or node in stage_of:
            begin = stage_of.get(node, 0)
            end = max((stage_of.get(user, last) for user in node.users), default=begin)
            for boundary in range(begin, end):
                crossing[boundary].append(node)
    return GraphCut(graph=graph, stage_of=stage_of, crossing=tuple(map(tuple, crossing)))


def _boundaries(graph: fx.Graph) -> str:
    """Describe, for messages, the module boundaries at which a graph can be cut in two."""
    calls = defaultdict(list)
    for position, node in enumerate(n for n in graph.nodes if n.op.startswith("call")):
        for name in node.meta.get("modules", ()):
            calls[name].append(position)
    once = {name: at for name, at in calls.items() if at[-1] - at[0] < len(at)}
    labels = {at[-1] + 1: f"after {name}" for name, at in reversed(once.items())}
    labels |= {at[0]: f"before {name}" for name, at in reversed(once.items())}
    writes, valid = _writes(graph), []
    for position, label in sorted(labels.items()):
        cut = _assign(graph, [position])
        if not cut.empty_stages() and not any(_problems(cut, writes)):
            valid.append(repr(label))
    return f"it can be cut {abbreviate(valid, most=12) or 'at no boundary of a module'}"


# --- values that can't cross --------------------------------------------------------------------


def _problems(cut: GraphCut, writes: Writes) -> Iterator[tuple[int, str]]:
    """The boundaries that can't be crossed, and the reason of each."""
    for boundary, nodes in enumerate(cut.crossing):
        for node in nodes:
            for leaf in _leaves(node.meta.get("val")):
                layout = getattr(leaf, "layout", torch.strided)
                if layout is not torch.strided or not isinstance(leaf, CAN_CROSS):
                    kind = f"{layout} tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
                    yield boundary, f"{_described(node)} would cross, and a {kind} can't"
    for writer, aliases in writes:
        stage = cut.stage_of[writer]
        for state in (node for node in aliases if node.op == "get_attr"):
            for alias in aliases:
                for other in {cut.stage_of.get(user, cut.num_stages - 1) for user in alias.users}:
                    if other != stage:
                        yield (
                            max(stage, other) - 1,
                            f"the forward changes {state.target} in stage {stage} "
                            f"({writer.name}), and uses {alias.name}, which shares its memory, in "
                            f"stage {other} too, where it would be a copy, and other microbatches "
                            "may have changed it (x.clone() is a value that stays)",
                        )
        received = cut.crossing[stage - 1] if stage else ()
        sharing = [_described(node) for node in received if node in aliases]
        if len(sharing) > 1:
            yield (
                stage - 1,
                f"{sharing[0]} and {sharing[1]} share memory, and {writer.name} writes into it "
                "after the cut, where they would be copies",
            )


def _writes(graph: fx.Graph) -> Writes:
    sharing = defaultdict(list)
    for node in graph.nodes:
        for storage in _memory(node):
            sharing[storage].append(node)
    return [
        (node, [alias for storage in _memory(target) for alias in sharing[storage]])
        for node in graph.nodes
        if node.op == "call_function"
        for target in mutated_arguments(node.target, node.args, node.kwargs)
        if isinstance(target, fx.Node)
    ]


def _memory(node: fx.Node) -> set[int]:
    """The storages of a value, by id; values that share one may alias each other."""
    if node.target in MAY_RETURN_INPUT:
        return _memory(node.all_input_nodes[0])
    tensors = (leaf for leaf in _leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    return {id(tensor.untyped_storage()) for tensor in tensors if tensor.layout is torch.strided}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _described(node: fx.Node) -> str:
    """A value of the graph for messages, such as ``relu (float32[*,8]) of layers.0``."""
    modules = node.meta.get("modules", ())
    of = f" of {modules[-1]}" if modules else ""
    return f"{node.name} ({value_text(node.meta.get('val'))}){of}"
