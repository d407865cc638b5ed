"""Compiled modules whose backward is split into input gradients, I, and weight gradients, W.

    backward graph of AOTAutograd           saved tensors, grad_out ──► all gradients

    I: what input gradients need            saved tensors, grad_out ──► input gradients, carried
    W: the rest of the weight gradients     some saved tensors, carried ──► weight gradients

Both halves are graphs of their own, compiled once. ``carried`` are the values of I that W needs;
views of values are taken again in W. Gradients of parameters without a matrix product or
convolution of their own (of biases and norms) are computed in I, in the kernels that read the same
tensors, and handed over in W. So nothing is computed twice, and I + W costs what the whole backward
costs. Without deferral both halves run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from penstock import _torch_compat
from penstock.stage.weight_grad.accumulate import WeightGrads, Weights
from penstock.stage.weight_grad.deferred_grads import COMPILED_PART_OF, DeferredGrads

__all__ = ["Halves", "compile_stage", "split_backward"]


def compile_stage(
    module: nn.Module,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str = "inductor",
) -> nn.Module:
    """Compile a module in place, with a backward that schedules can split into I and W.

    Takes the place of ``module.compile()`` for a stage, or for each of its layers. A zero-bubble
    schedule runs the whole backward of a module compiled otherwise in I, and W is empty.

    Args:
        module: the module; its parameters must not be DTensors for the backward to be split.
        fullgraph, dynamic, options: as of ``torch.compile``.
        backend: ``"inductor"``, or ``"aot_eager"``, which compiles nothing, to find mistakes.

    Returns:
        The module.

    Examples:
        >>> layer = compile_stage(nn.Linear(4, 4), backend="aot_eager")
        >>> layer(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(_BACKENDS)}")
    _torch_compat.compile_in_place(
        module,
        backend=_BACKENDS[backend],
        fullgraph=fullgraph,
        dynamic=dynamic,
        options=None if options is None else dict(options),
    )
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A backward graph, split.

    ``input_grad`` takes what the whole graph takes. It returns a gradient per input of the forward,
    None for those in ``deferred``, then the carried values. ``weight_grad`` takes the inputs at
    ``saved`` of the whole graph and the carried values. It returns the gradients of ``deferred``.
    """

    input_grad: fx.GraphModule
    weight_grad: fx.GraphModule
    deferred: Sequence[int]
    saved: Sequence[int]
    examples: Sequence[Any]  # for the inputs of ``weight_grad``


def split_backward(module: fx.GraphModule, weights: Collection[int]) -> Halves | None:
    """Split a backward graph; ``weights`` are the places of parameters among its results.

    Returns None where no weight gradient can be left to W.
    """
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    grads: Sequence[fx.Node | None] = nodes[-1].args[0]
    impure = [node for node in nodes if node.op == "call_function" and node.is_impure()]
    needed = _ancestors([*impure, *(g for i, g in enumerate(grads) if i not in weights)])
    # Matrix products, convolutions and attention: the operations with known FLOPs.
    heavy = {n for n in nodes if getattr(n.target, "overloadpacket", None) in flop_registry}
    deferred = [i for i in sorted(weights) if heavy & _ancestors([grads[i]]) - needed]
    if not deferred:
        return None
    results = [grad for i, grad in enumerate(grads) if grad is not None and i in deferred]
    first = _ancestors([*impure, *(g for i, g in enumerate(grads) if i not in deferred)])
    later = {n for n in _ancestors(results) - first if n.op != "placeholder"}
    # W needs these values of I. A view is taken again, so that its base is carried, and that once.
    stack = [source for node in later for source in node.all_input_nodes] + results
    taken: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in later or node in taken:
            continue
        if getattr(node.target, "is_view", False) or node.op == "get_attr":
            later.add(node)
            stack += node.all_input_nodes
        else:
            taken.add(node)
    carried = [node for node in nodes if node in taken and node.op != "placeholder"]
    saved = [i for i, node in enumerate(inputs) if node in taken]
    kept = [*(inputs[i] for i in saved), *carried]
    shared = [None if i in deferred else grad for i, grad in enumerate(grads)]
    return Halves(
        input_grad=_part(module, inputs, first, [*shared, *carried]),
        weight_grad=_part(module, kept, later, results),
        deferred=deferred,
        saved=saved,
        examples=[node.meta["val"] for node in kept],
    )


def _ancestors(results: Iterable[fx.Node | None]) -> set[fx.Node]:
    """The nodes that results depend on, themselves included."""
    stack = [node for node in results if isinstance(node, fx.Node)]
    found = set(stack)
    while stack:
        more = [node for node in stack.pop().all_input_nodes if node not in found]
        found.update(more)
        stack += more
    return found


def _part(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Collection[fx.Node],
    results: Sequence[fx.Node | None],
) -> fx.GraphModule:
    """The graph of ``nodes``, from ``inputs`` to ``results``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    return fx.GraphModule(module, graph)


# Of a node of the autograd graph: the place of its record among those of the forward.
_PLACE = "penstock record"


def _compile(
    backend: str, graph: fx.GraphModule, inputs: Sequence[Any], options: Any = None
) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that splits the backward."""
    weights = [i for i, value in enumerate(inputs) if type(value) is nn.Parameter]
    # A node of the autograd graph has an edge per tensor, and none for an int.
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    edges = {i: edge for edge, i in enumerate(tensors)}

    def backward(whole: fx.GraphModule, examples: Sequence[Any], compile: Any) -> Any:
        num_grads = len(next(iter(reversed(whole.graph.nodes))).args[0])
        halves = split_backward(whole, weights) if num_grads == len(inputs) else None
        if halves is None:
            return compile(whole, examples)
        first = compile(halves.input_grad, examples)
        later = compile(halves.weight_grad, halves.examples)
        return _runner(halves, first, later, [edges[i] for i in halves.deferred])

    compiled = _torch_compat.compile_graphs(backend, graph, inputs, options, backward=backward)

    def call(*args: Any) -> Any:
        deferring = COMPILED_PART_OF.get()
        if deferring is None or not _torch_compat.deferrable_now():
            return compiled(*args)
        given = list(args)
        for i in weights:
            if (weight := deferring.weight(given[i])) is not None:
                given[i] = deferring.proxy(weight, given[i])
        results = compiled(*given)
        for result in results:
            if isinstance(result, Tensor) and result.grad_fn is not None:
                cast(Any, result.grad_fn).metadata[_PLACE] = len(deferring.records)
                deferring.records.append(None)
                break
        return results

    return call


_BACKENDS = {name: partial(_compile, name) for name in ("inductor", "aot_eager")}


def _runner(
    halves: Halves, input_grad: Any, weight_grad: Any, edges: Sequence[int]
) -> Callable[[list[Any]], list[Tensor | None]]:
    """The callable that autograd runs: I, then W unless the weights are proxies of a deferral.

    ``edges`` are those of the weights of ``halves.deferred`` in the autograd graph.
    """
    num_carried = len(halves.examples) - len(halves.saved)

    def run(args: list[Any]) -> list[Tensor | None]:
        kept = [args[i] for i in halves.saved]
        deferring = _torch_compat.active_mode(DeferredGrads)
        with _torch_compat.without_modes(DeferredGrads) if deferring else nullcontext():
            results = list(input_grad(args))
        grads = results[: len(results) - num_carried]
        kept += results[len(grads) :]
        del results
        proxies = deferring.proxies if deferring else {}
        node = _torch_compat.current_node()
        leaves = [id(getattr(node.next_functions[edge][0], "variable", None)) for edge in edges]
        if all(leaf in proxies for leaf in leaves):
            weights = tuple(proxies[leaf][0] for leaf in leaves)
            place = node.metadata.pop(_PLACE, None)
            if place is None:
                place = len(deferring.records)
                deferring.records.append(None)
            deferring.records[place] = compiled_half, weights, None, 0, weight_grad, [kept]
        else:
            for i, grad in zip(halves.deferred, weight_grad(kept), strict=True):
                grads[i] = grad
        return grads

    run._boxed_call = True  # type: ignore[attr-defined]  # takes a list, which it may empty
    return run


def compiled_half(saved: None, run: Any, weights: Weights, kept: list[Tensor]) -> WeightGrads:
    """A formula: the half of a compiled backward that is W, from what I has kept."""
    with torch.no_grad():  # tensors of the forward require grad
        return tuple(run(kept))
