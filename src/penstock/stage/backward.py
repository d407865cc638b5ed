"""Backwards through a graph that exists already, whole or split in two: for stages driven by hand.

    stage_backward           one pass: weight gradients into ``.grad``, input gradients returned
    stage_backward_input     I: a pass to the inputs alone; the graph is kept
    stage_backward_weight    W: a pass to the weights alone, which walks to the outputs again

The split costs half a backward more than a whole one. Stages that run their forward in
``weight_grad.DeferredGrads`` split at no cost.
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

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]

Grads: TypeAlias = tuple[Tensor | None, ...]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> Grads:
    """Run the full backward of a stage.

    Args:
        stage_output: a tensor, or a tuple, list or dict of outputs, nested in any depth; values
            that are no tensors, or require no grad, are skipped.
        output_grads: gradients in the same structure. None stands for no gradient, or, for a
            scalar tensor, for one.
        input_values: the stage's inputs.
        outputs_with_grads_idxs: the indices of the outputs and gradients to use; None for all.

    Returns:
        For each input its gradient, or None. The inputs' ``.grad`` is None again.

    Raises:
        StageError: gradients and outputs differ in structure, or the backward failed.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> stage_backward((x * 3, "note"), (torch.ones(2), None), [x])
        (tensor([3., 3.]),)
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = list(_paired(stage_output, output_grads))
    try:
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    except Exception as error:
        raise _failed("backward", pairs, input_values) from error
    leaves = [v if isinstance(v, Tensor) and v.is_leaf else None for v in input_values]
    found = tuple(None if leaf is None else leaf.grad for leaf in leaves)
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None  # the gradient is sent, and freed after that
    return found


def stage_backward_input(
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
        weights: the parameters that ``stage_backward_weight`` is called with.

    Returns:
        For each input its gradient or None, and the groups for ``stage_backward_weight``.

    Raises:
        StageError: there is not one gradient, or None, for each output, or the backward failed.

    Example:
        >>> linear = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> grads, groups = stage_backward_input([linear(x)], None, [x], linear.parameters())
        >>> linear.weight.grad is None
        True
        >>> _ = stage_backward_weight(linear.parameters(), groups)
        >>> linear.weight.grad
        tensor([[1., 1.]])
    """
    outputs = stage_outputs_or_loss
    if output_grads is None:
        pairs = [(out, torch.ones_like(out)) for out in outputs if out.requires_grad]
    elif len(output_grads) != len(outputs):
        raise _mismatch(outputs, output_grads)
    else:
        pairs = list(_paired(list(outputs), list(output_grads)))
    leaves = {id(v): v for v in input_values if isinstance(v, Tensor) and v.requires_grad}
    grads: Grads = (None,) * len(leaves)
    try:
        if pairs and leaves:
            roots, received = [out for out, _ in pairs], [grad for _, grad in pairs]
            inputs = list(leaves.values())
            grads = torch.autograd.grad(
                roots, inputs, received, retain_graph=True, allow_unused=True
            )
    except Exception as error:
        raise _failed("input gradient", pairs, input_values) from error
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


def stage_backward_weight(
    weights: Iterable[Parameter], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> Grads:
    """Run W: accumulate the weight gradients that ``stage_backward_input`` left.

    Hooks on the weights run once, here.

    Args:
        weights: the parameters given to ``stage_backward_input``.
        param_groups: the groups that it returned; their graph is freed.
        retain_graph: keep the graph's saved tensors for another backward.

    Returns:
        The ``.grad`` of each weight.

    Raises:
        StageError: the backward failed, or the groups have been used already.
    """
    weights = list(weights)
    wanted = set(map(id, weights))
    for group in param_groups:
        if "roots" not in group:
            raise StageError(
                "these weight gradients have been computed already: run stage_backward_input "
                "again before stage_backward_weight"
            )
        roots, params = group.pop("roots"), [p for p in group["params"] if id(p) in wanted]
        if not roots or not params:
            continue
        edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
        try:
            torch.autograd.backward(edges, grads, retain_graph, inputs=params)
        except Exception as error:
            raise _failed("weight gradient", [], []) from error
    return tuple(weight.grad for weight in weights)


def _paired(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of ``output`` that get a gradient, each with it."""
    if isinstance(output, Tensor):
        if not output.requires_grad:
            return
        if grad is None:
            if output.numel() == 1:
                yield output, torch.ones_like(output)
        elif isinstance(grad, Tensor):
            yield output, grad
        else:
            raise _mismatch(output, grad)
    elif grad is None or not isinstance(output, (Mapping, tuple, list)):
        return
    elif isinstance(output, Mapping):
        if not isinstance(grad, Mapping) or output.keys() != grad.keys():
            raise _mismatch(output, grad)
        for key, item in output.items():
            yield from _paired(item, grad[key])
    else:
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


def _failed(what: str, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Any]) -> StageError:
    outputs = ", ".join(f"{_described(out)} with {_described(grad)}" for out, grad in pairs)
    return StageError(
        f"the stage's {what} failed; outputs with their gradients: {outputs or 'none'}; inputs: "
        f"{', '.join(map(_described, inputs)) or 'none'}; the cause stands above"
    )
