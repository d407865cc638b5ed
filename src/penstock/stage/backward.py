"""The backward of a stage, whole or split in two along the autograd graph.

    outputs ──► n1 ──► n2 ──► inputs        I runs n1 and n2 towards the inputs only, and keeps
                │      │                    the gradients that reach them
                ▼      ▼
                w1     w2                   W runs n1 towards w1, n2 towards w2

The nodes where the way to a weight leaves the ways to the inputs (n1, n2) are its *meeting
points*. W starts one short backward pass at each, which stops short of every other one. Three kinds
of weights need more care:

- off the inputs' path: their pass starts at the outputs;
- with meeting points one behind the other, as when a layer is applied twice: a pass from the first
  would run through the second, so that their gradients are computed in I and handed over in W;
- with hooks: their hooks run once, on the sum, when W hands it over.

This is the general way to split a backward, for graphs that exist already. What a stage does by
default (`penstock.stage.weight_grad`) is faster: it builds no graph to the weights in the first
place.
Functions and results are those that users of torch.distributed.pipelining know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from penstock._torch_compat import run_backward, without_hooks
from penstock.errors import StageError
from penstock.stage.full_backward import Grads, failed, mismatch, stage_backward
from penstock.stage.reverse_graph import (
    ReverseEdges,
    construct_reverse_graph,
    get_param_groups,
    meeting_points,
    reverse_closure,
)

__all__ = [
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]

Group: TypeAlias = dict[str, Any]


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Grads, list[Group]]:
    """I: the gradients of the inputs alone, and what is needed to compute the weights' later.

    The outputs are detached in place where they can be, so that the graph lives no longer than
    the groups do.

    Args:
        stage_outputs_or_loss: the stage's outputs, or its loss.
        output_grads: for each output its gradient or None; None as a whole stands for ones.
        input_values: the stage's inputs; their ``.grad`` is added to as well.
        weights: the parameters that ``stage_backward_weight`` will be asked for.

    Returns:
        For each input its gradient or None, and the groups of weights that share meeting points.

    Raises:
        StageError: there is not one gradient, or None, for each output, or the backward failed.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> grads, groups = stage_backward_input([linear(x)], None, [x], linear.parameters())
        >>> linear.weight.grad is None
        True
        >>> _ = stage_backward_weight(linear.parameters(), groups)
        >>> linear.weight.grad
        tensor([[1., 1.]])
    """
    if output_grads is not None and len(output_grads) != len(stage_outputs_or_loss):
        raise mismatch(stage_outputs_or_loss, output_grads)
    outputs = [(i, out) for i, out in enumerate(stage_outputs_or_loss) if out.requires_grad]
    pairs: list[tuple[Tensor, Tensor]] = []
    for i, out in outputs:
        grad = torch.ones_like(out) if output_grads is None else output_grads[i]
        if grad is not None:
            pairs.append((out, grad))
        elif out.numel() == 1:
            pairs.append((out, torch.ones_like(out)))
    leaves = {id(v): v for v in input_values if isinstance(v, Tensor) and v.requires_grad}
    owners = {get_gradient_edge(w).node: w for w in weights if w.requires_grad}
    try:
        plan, groups = split_plan(pairs, list(leaves.values()), list(owners))
        grads = run_input_pass(pairs, list(leaves.values()), plan, owners)
    except Exception as error:
        raise failed("input gradient", pairs, input_values) from error
    by_id = dict(zip(leaves, grads, strict=True))
    for key, leaf in leaves.items():
        grad = by_id[key]
        if grad is not None and leaf.is_leaf:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    for out in stage_outputs_or_loss:
        if out.grad_fn is not None and not out._is_view():
            out.detach_()
    return tuple(by_id.get(id(value)) for value in input_values), groups


def split_plan(
    pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor], params: Sequence[Node]
) -> tuple[list[Group], list[Group]]:
    """The groups of weights on the inputs' path, and all groups with the one off it."""
    edges = [get_gradient_edge(out) for out, _ in pairs]
    reverse_edges = construct_reverse_graph([edge.node for edge in edges])
    inputs = [get_gradient_edge(leaf).node for leaf in leaves]
    groups: list[Group] = [dict(group) for group in get_param_groups(inputs, params, reverse_edges)]
    on_path, _ = reverse_closure(inputs, set(), reverse_edges)
    early: set[Node] = set()
    for group in groups:
        points = {p: meeting_points(p, on_path, reverse_edges) for p in group["params"]}
        behind = {p for p, nodes in points.items() if one_behind_another(nodes, reverse_edges)}
        early |= behind
        group["intermediates"] = list(group["intermediates"])
        group["wanted"] = [
            [p for p in group["params"] if node in points[p] and p not in behind]
            for node in group["intermediates"]
        ]
        group["early"] = dict.fromkeys(behind)
    aside = [i for i, edge in enumerate(edges) if edge.node not in on_path]
    starts = {edges[i].node for i in aside}
    wanted = [p for p in params if p not in early and leads_up_to(p, starts, reverse_edges)]
    if not wanted:
        return groups, groups
    roots: Group = {
        "params": set(wanted),
        "intermediates": [],
        "wanted": [],
        "grads": [],
        "early": {},
        "roots": ([edges[i] for i in aside], [pairs[i][1] for i in aside], wanted),
    }
    return groups, [*groups, roots]


def one_behind_another(nodes: set[Node], reverse_edges: ReverseEdges) -> bool:
    """Whether any of ``nodes`` can be reached from another of them."""
    if len(nodes) < 2:
        return False
    for node in nodes:
        above, _ = reverse_closure([node], set(), reverse_edges)
        if any(other in above for other in nodes if other is not node):
            return True
    return False


def leads_up_to(param: Node, starts: set[Node], reverse_edges: ReverseEdges) -> bool:
    """Whether ``param`` can be reached from any of ``starts``."""
    if not starts:
        return False
    above, _ = reverse_closure([param], set(), reverse_edges)
    return not starts.isdisjoint(above)


def run_input_pass(
    pairs: Sequence[tuple[Tensor, Tensor]],
    leaves: Sequence[Tensor],
    groups: Sequence[Group],
    owners: Mapping[Node, Parameter],
) -> Grads:
    """One pass to the inputs that also notes what reaches the meeting points."""
    early = [(group, p) for group in groups for p in group["early"]]
    targets = [*leaves, *(owners[p] for _, p in early)]
    if not pairs or not targets:
        return (None,) * len(leaves)
    handles = []
    for group in groups:
        group["grads"] = [None] * len(group["intermediates"])
        for index, node in enumerate(group["intermediates"]):
            handles.append(node.register_prehook(notes(group["grads"], index)))
    try:
        with without_hooks(*owners.values()):
            grads = torch.autograd.grad(
                [out for out, _ in pairs],
                targets,
                [grad for _, grad in pairs],
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for handle in handles:
            handle.remove()
    for (group, param), grad in zip(early, grads[len(leaves) :], strict=True):
        group["early"][param] = grad
    return grads[: len(leaves)]


def notes(grads: list[Any], index: int) -> Any:
    """A hook that notes the gradients that reach a node."""

    def note(received: tuple[Tensor | None, ...]) -> None:
        grads[index] = received

    return note


def stage_backward_weight(
    weights: Iterable[Parameter], param_groups: list[Group], retain_graph: bool = False
) -> Grads:
    """W: accumulate the weight gradients that ``stage_backward_input`` left over.

    Args:
        weights: the same parameters as there.
        param_groups: what it returned; what they hold is let go.
        retain_graph: keep the graph's saved tensors for another backward.

    Returns:
        The ``.grad`` of each weight.

    Raises:
        StageError: the backward failed, or the groups have been used up already.
    """
    weights = list(weights)
    owners = {get_gradient_edge(w).node: w for w in weights if w.requires_grad}
    sums: dict[Node, Tensor] = {}
    with without_hooks(*owners.values()):
        for group in param_groups:
            if "intermediates" not in group:
                raise StageError(
                    "these weight gradients have been computed already: run "
                    "stage_backward_input again before stage_backward_weight"
                )
            try:
                for node, grad in group_grads(group, retain_graph):
                    if grad is not None and node in owners:
                        sums[node] = sums[node] + grad if node in sums else grad
            except Exception as error:
                raise failed("weight gradient", [], []) from error
            for key in ("intermediates", "grads", "wanted", "early", "roots"):
                group.pop(key, None)  # the hooks and the nodes refer to each other
    if sums:
        run_backward(tuple(owners[node] for node in sums), tuple(sums.values()))
    return tuple(weight.grad for weight in weights)


def group_grads(group: Group, retain_graph: bool) -> Iterator[tuple[Node, Tensor | None]]:
    """Every contribution to the weights of ``group``."""
    yield from group["early"].items()
    if "roots" in group:
        edges, grads, wanted = group["roots"]
        targets = [GradientEdge(p, 0) for p in wanted]
        found = torch.autograd.grad(edges, targets, grads, True, allow_unused=True)
        yield from zip(wanted, found, strict=True)
    # Meeting points that share a way down to a weight run it once each.
    retain = retain_graph or len(group["intermediates"]) > 1
    for node, received, wanted in zip(
        group["intermediates"], group["grads"], group["wanted"], strict=True
    ):
        if received is None or not wanted:
            continue
        noted = [(i, grad) for i, grad in enumerate(received) if grad is not None]
        if not noted:
            continue
        # What was noted has been through the hooks of the node's results; they run again now.
        handle = node.register_prehook(lambda _, kept=received: kept)
        try:
            found = torch.autograd.grad(
                [GradientEdge(node, i) for i, _ in noted],
                [GradientEdge(p, 0) for p in wanted],
                [grad for _, grad in noted],
                retain_graph=retain,
                allow_unused=True,
            )
        finally:
            handle.remove()
        yield from zip(wanted, found, strict=True)
