"""Full and split backwards through an existing autograd graph, for manually driven stages.

    stage_backward           one pass: accumulates weight gradients, returns input gradients
    stage_backward_input     I: the same pass; returns input gradients, holds back the weights'
    stage_backward_weight    W: accumulates these

A graph has no cheap way to the inputs alone and later to the weights alone. Stages whose forward
runs in ``DeferredGrads`` compute the weights' in W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock._torch_compat import is_view
from penstock.errors import StageError
from penstock.stage.stage import holding_back

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]

Grads: TypeAlias = tuple[Tensor | None, ...]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: object = None,
) -> Grads:
    """Run the full backward of a stage; returns the gradient of each input, or None.

    The outputs are a tensor, or tuples, lists and dicts of any values, and the gradients have the
    same structure. None means no gradient, or 1.0 for a scalar tensor. The last argument has no
    effect, as in torch.
    """
    _backward(_paired(stage_output, output_grads))
    inputs = [v if isinstance(v, Tensor) and v.is_leaf else None for v in input_values]
    found = tuple(None if each is None else each.grad for each in inputs)
    for each in inputs:
        if each is not None:
            each.grad = None  # the caller sends the gradient, and then frees it
    return found


def stage_backward_input(
    stage_outputs_or_loss: Tensor | Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Grads, list[dict[str, Any]]]:
    """Run I: compute all gradients, and accumulate those of the inputs.

    Detaches the outputs in place where possible, so that the graph is freed. Without
    ``output_grads`` they are ones. Returns the gradient of each input, or None, and the groups for
    ``stage_backward_weight``.
    """
    given = stage_outputs_or_loss
    outputs = [given] if isinstance(given, Tensor) else list(given)
    if output_grads is None:
        output_grads = [torch.ones_like(out) for out in outputs]
    inputs = [v if isinstance(v, Tensor) and v.requires_grad else None for v in input_values]
    for each in inputs:
        if each is not None:
            each.retain_grad()
    with holding_back(weights) as held:
        _backward(_paired(outputs, output_grads))
    for out in outputs:
        if out.grad_fn is not None and not is_view(out):
            out.detach_()
    return tuple(None if each is None else each.grad for each in inputs), [{"held": held}]


def stage_backward_weight(
    weights: Iterable[Parameter], param_groups: list[dict[str, Any]], retain_graph: object = False
) -> Grads:
    """Run W: accumulate the gradients that ``stage_backward_input`` holds back; returns each
    ``.grad``.

    Hooks on the weights run once, here. ``retain_graph`` has no effect: I has run the graph.
    """
    for group in param_groups:
        if "held" not in group:
            raise StageError(
                "these weight gradients have been computed already: run the input backward again "
                "before the weight backward"
            )
        _backward((param, grad) for param, grad in group.pop("held") if param.requires_grad)
    return tuple(weight.grad for weight in weights)


def _backward(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Run one backward from roots with these gradients, if there are any."""
    roots = list(pairs)
    if roots:
        torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])


def _paired(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the tensors of ``output`` with their gradients; tensors without one are left out."""
    if isinstance(output, Tensor) and (grad is None or isinstance(grad, Tensor)):
        if output.requires_grad and (grad is not None or output.numel() == 1):
            yield output, torch.ones_like(output) if grad is None else grad
        return
    outputs, grads = _items(output), _items(grad)
    if grad is None or (outputs is None and not isinstance(output, Tensor)):
        return
    if outputs is None or grads is None or outputs.keys() != grads.keys():
        raise StageError(
            "the gradients of the outputs must have the outputs' structure, with one gradient or "
            f"None per output; of {_shown(output)}, got {_shown(grad)}"
        )
    for key, item in outputs.items():
        yield from _paired(item, grads[key])


def _items(container: Any) -> dict[Any, Any] | None:
    if isinstance(container, (tuple, list)):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, Mapping) else None


def _shown(value: Any) -> str:
    items = _items(value)
    name = type(value).__name__
    return f"a {name}" if items is None else f"a {name} with the items {list(items)}"
