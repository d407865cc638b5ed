"""The autograd graph read backwards: from inputs and weights up to the outputs.

    edges of autograd     output ──► ... ──► input, weight
    reverse edges         input, weight ──► ... ──► output

Nodes only; this module runs no backward and touches no tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from torch.autograd.graph import Node

__all__ = [
    "ReverseEdges",
    "construct_reverse_graph",
    "get_param_groups",
    "meeting_points",
    "reverse_closure",
]

ReverseEdges: TypeAlias = Mapping[Node, Sequence[Node]]


def construct_reverse_graph(roots: Iterable[Node | None]) -> dict[Node, list[Node]]:
    """For every node that can be reached from ``roots``, the nodes that lead straight to it.

    Args:
        roots: nodes to start from; None is passed over.

    Returns:
        node → the nodes whose gradients flow into it, once per edge.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x.exp()
        >>> parents = construct_reverse_graph([y.grad_fn])
        >>> parents[torch.autograd.graph.get_gradient_edge(x).node] == [y.grad_fn]
        True
    """
    parents: dict[Node, list[Node]] = defaultdict(list)
    stack = list(dict.fromkeys(node for node in roots if node is not None))
    seen = set(stack)
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            parents[following].append(node)
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return parents


def reverse_closure(
    roots: Iterable[Node | None], target_nodes: set[Node], reverse_edges_dict: ReverseEdges
) -> tuple[set[Node], set[Node]]:
    """All nodes upwards of ``roots``, as far as the first of ``target_nodes`` on each way.

    Args:
        roots: nodes to start from, themselves part of the closure; None is passed over.
        target_nodes: nodes at which to stop.
        reverse_edges_dict: from ``construct_reverse_graph``.

    Returns:
        The closure without the targets, and the targets that were met.
    """
    closure = {node for node in roots if node is not None}
    met: set[Node] = set()
    stack = list(closure)
    while stack:
        for above in reverse_edges_dict.get(stack.pop(), ()):
            if above in target_nodes:
                met.add(above)
            elif above not in closure:
                closure.add(above)
                stack.append(above)
    return closure, met


def meeting_points(param: Node, on_path: set[Node], reverse_edges_dict: ReverseEdges) -> set[Node]:
    """The nodes of ``on_path`` at which the ways down to ``param`` leave it."""
    _, met = reverse_closure([param], on_path, reverse_edges_dict)
    return met


def get_param_groups(
    inputs: Iterable[Node | None],
    params: Iterable[Node],
    reverse_edges_dict: ReverseEdges,
) -> list[dict[str, set[Node]]]:
    """Parameters with the nodes at which their ways leave the ways to the inputs.

    Parameters that have such a node in common, directly or through others, share a group.

    Args:
        inputs: the nodes of the inputs; None is passed over.
        params: the nodes of the parameters.
        reverse_edges_dict: from ``construct_reverse_graph``.

    Returns:
        Groups with their ``"params"`` and ``"intermediates"``. Parameters that are off the
        inputs' path altogether are in none.
    """
    on_path, _ = reverse_closure(inputs, set(), reverse_edges_dict)
    groups: list[dict[str, set[Node]]] = []
    for param in dict.fromkeys(params):
        points = meeting_points(param, on_path, reverse_edges_dict)
        if not points:
            continue
        merged = {"params": {param}, "intermediates": points}
        apart: list[dict[str, set[Node]]] = []
        for group in groups:
            if group["intermediates"].isdisjoint(points):
                apart.append(group)
            else:
                merged["params"] |= group["params"]
                merged["intermediates"] = merged["intermediates"] | group["intermediates"]
        groups = [*apart, merged]
    return groups
