"""Backwards through a graph that exists already, whole or in two: for stages driven by hand.

    full_backward      one pass: weight gradients into ``.grad``, input gradients returned
    input_backward     I: a pass to the inputs alone; the graph is kept
    weight_backward    W: a pass to the weights alone, which walks from the outputs again

The split costs half a backward more than a whole one. Stages whose forward runs in
``stage.weight_grad.DeferredGrads`` split at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from penstock._torch_compat import is_view
from penstock.errors import StageError

__all__ = ["full_backward", "input_backward", "weight_backward"]

Grads: TypeAlias = tuple[Tensor | None, ...]


def full_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> Grads:
    """Run the full backward of a stage.

    Args:
        stage_output: a tensor, or a tuple, list or dict of outputs, nested in any depth; values
            that are no tensors, or require no grad, are skipped.
        output_grads: gradients in the same structure. None stands for no gradient, or, for a
            scalar tensor, for one.
        input_values: the stage's inputs.

    Returns:
        For each input its gradient, or None. The inputs' ``.grad`` is None again.

    Raises:
        StageError: gradients and outputs differ in structure.
    """
    pairs = list(_paired(stage_output, output_grads))
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    leaves = [v if isinstance(v, Tensor) and v.is_leaf else None for v in input_values]
    found = tuple(None if leaf is None else leaf.grad for leaf in leaves)
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None  # the gradient is sent, and freed after that
    return found


def input_backward(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Grads, list[dict[str, Any]]]:
    """Run I: compute the gradients of the inputs alone.

    The outputs are detached in place where possible, so that the graph lives no longer than the
    groups do.

    Args:
        stage_outputs_or_loss: the stage's outputs, or its loss.
        output_grads: for each output its gradient or None; None as a whole stands for ones.
        input_values: the stage's inputs; their ``.grad`` is added to as well.
        weights: the parameters that W computes the gradients of.

    Returns:
        For each input its gradient or None, and the groups for ``weight_backward``.

    Raises:
        StageError: there is not one gradient, or None, for each output.
    """
    outputs = stage_outputs_or_loss
    if output_grads is None:
        pairs = [(out, torch.ones_like(out)) for out in outputs if out.requires_grad]
    else:
        pairs = list(_paired(list(outputs), output_grads))
    leaves = {id(v): v for v in input_values if isinstance(v, Tensor) and v.requires_grad}
    grads: Grads = (None,) * len(leaves)
    if pairs and leaves:
        roots, received = [out for out, _ in pairs], [grad for _, grad in pairs]
        grads = torch.autograd.grad(
            roots, list(leaves.values()), received, retain_graph=True, allow_unused=True
        )
    by_id = dict(zip(leaves, grads, strict=True))
    for key, leaf in leaves.items():
        grad = by_id[key]
        if grad is not None and leaf.is_leaf:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    group = {
        "params": [weight for weight in weights if weight.requires_grad],
        "roots": [(get_gradient_edge(out), grad) for out, grad in pairs],
    }
    for out in outputs:
        if out.grad_fn is not None and not is_view(out):
            out.detach_()
    return tuple(by_id.get(id(value)) for value in input_values), [group]


def weight_backward(weights: Iterable[Parameter], param_groups: list[dict[str, Any]]) -> Grads:
    """Run W: accumulate the weight gradients that ``input_backward`` left.

    Hooks on the weights run once, here.

    Args:
        weights: the parameters given to ``input_backward``.
        param_groups: the groups that it returned; their graph is freed.

    Returns:
        The ``.grad`` of each weight.

    Raises:
        StageError: the groups have been used already.
    """
    for group in param_groups:
        if "roots" not in group:
            raise StageError(
                "these weight gradients have been computed already: run the input backward again "
                "before the weight backward"
            )
        roots = group.pop("roots")
        if roots and group["params"]:
            edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
            torch.autograd.backward(edges, grads, inputs=group["params"])
    return tuple(weight.grad for weight in weights)


def _paired(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of ``output`` that get a gradient, each with it."""
    if isinstance(output, Tensor):
        if output.requires_grad and grad is None and output.numel() == 1:
            yield output, torch.ones_like(output)
        elif output.requires_grad and grad is not None:
            if not isinstance(grad, Tensor):
                raise _mismatch(output, grad)
            yield output, grad
    elif grad is None:
        return
    elif isinstance(output, Mapping):
        if not isinstance(grad, Mapping) or output.keys() != grad.keys():
            raise _mismatch(output, grad)
        for key, item in output.items():
            yield from _paired(item, grad[key])
    elif isinstance(output, (tuple, list)):
        if not isinstance(grad, (tuple, list)) or len(output) != len(grad):
            raise _mismatch(output, grad)
        for item, item_grad in zip(output, grad, strict=True):
            yield from _paired(item, item_grad)


def _mismatch(output: Any, grad: Any) -> StageError:
    return StageError(
        f"the gradients of the outputs must have the outputs' structure: for {_described(output)} "
        f"expected as much or None, got {_described(grad)}; pass one gradient or None per output"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
