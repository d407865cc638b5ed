"""Full and split backwards through an existing autograd graph, for manually driven stages.

    full_backward      one pass: accumulates weight gradients, returns input gradients
    input_backward     I: the same pass; returns input gradients, holds back the weights'
    weight_backward    W: accumulates these

A graph has no cheap way to the inputs alone and later to the weights alone: two passes would cost
half a backward more. Stages whose forward runs in ``DeferredGrads`` compute the weights' in W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock._torch_compat import is_view, without_hooks
from penstock.errors import StageError

__all__ = ["full_backward", "input_backward", "weight_backward"]

Grads: TypeAlias = tuple[Tensor | None, ...]


def full_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> Grads:
    """Run the full backward of a stage; returns the gradient of each input, or None.

    The outputs are a tensor, or tuples, lists and dicts of any values, and the gradients have the
    same structure. None means no gradient, or 1.0 for a scalar tensor.
    """
    pairs = list(_paired(stage_output, output_grads))
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    leaves = [v if isinstance(v, Tensor) and v.is_leaf else None for v in input_values]
    found = tuple(None if leaf is None else leaf.grad for leaf in leaves)
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None  # the caller sends the gradient, and then frees it
    return found


def input_backward(
    stage_outputs_or_loss: Tensor | Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Grads, list[dict[str, Any]]]:
    """Run I: compute all gradients, and accumulate those of the inputs.

    Detaches the outputs in place where possible, so that the graph is freed. Without
    ``output_grads`` they are ones. Returns the gradient of each input, or None, and the groups for
    ``weight_backward``.
    """
    given = stage_outputs_or_loss
    outputs = [given] if isinstance(given, Tensor) else list(given)
    if output_grads is None:
        output_grads = [torch.ones_like(out) for out in outputs]
    pairs = list(_paired(outputs, output_grads))
    leaves = {id(v): v for v in input_values if isinstance(v, Tensor) and v.requires_grad}
    params = [weight for weight in weights if weight.requires_grad]
    wanted: list[Tensor] = [*leaves.values(), *params]
    found: Grads = (None,) * len(wanted)
    if pairs and wanted:
        roots, received = [out for out, _ in pairs], [grad for _, grad in pairs]
        with without_hooks(*params):  # they run in W
            found = torch.autograd.grad(roots, wanted, received, allow_unused=True)
    for leaf, grad in zip(leaves.values(), found, strict=False):
        if grad is not None and leaf.is_leaf:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    for out in outputs:
        if out.grad_fn is not None and not is_view(out):
            out.detach_()
    by_id = dict(zip(leaves, found, strict=False))
    group = {"params": params, "grads": found[len(leaves) :]}
    return tuple(by_id.get(id(value)) for value in input_values), [group]


def weight_backward(weights: Iterable[Parameter], param_groups: list[dict[str, Any]]) -> Grads:
    """Run W: accumulate the gradients in the groups of ``input_backward``; returns each ``.grad``.

    Hooks on the weights run once, here.
    """
    for group in param_groups:
        if "grads" not in group:
            raise StageError(
                "these weight gradients have been computed already: run the input backward again "
                "before the weight backward"
            )
        pairs = [
            (param, grad)
            for param, grad in zip(group["params"], group.pop("grads"), strict=True)
            if grad is not None and param.requires_grad
        ]
        if pairs:
            torch.autograd.backward([param for param, _ in pairs], [grad for _, grad in pairs])
    return tuple(weight.grad for weight in weights)


def _paired(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the tensors of ``output`` with their gradients; tensors without one are left out."""
    if isinstance(output, Tensor):
        if output.requires_grad and grad is None and output.numel() == 1:
            yield output, torch.ones_like(output)
        elif output.requires_grad and isinstance(grad, Tensor):
            yield output, grad
        keys: Sequence[Any] | None = () if isinstance(grad, Tensor) else None
    elif isinstance(output, Mapping):
        same = isinstance(grad, Mapping) and output.keys() == grad.keys()
        keys = list(output) if same else None
    elif isinstance(output, (tuple, list)):
        same = isinstance(grad, (tuple, list)) and len(grad) == len(output)
        keys = range(len(output)) if same else None
    else:
        return
    if grad is None:
        return
    if keys is None:
        raise StageError(
            "the gradients of the outputs must have the outputs' structure: for "
            f"{_described(output)} expected as much or None, got {_described(grad)}; pass one "
            "gradient or None per output"
        )
    for key in keys:
        yield from _paired(output[key], grad[key])


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
