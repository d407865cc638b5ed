"""The backward of a stage in one piece, from outputs and gradients nested at will.

It knows the outputs, their gradients and the inputs; of parameters it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import StageError

__all__ = ["Grads", "failed", "mismatch", "stage_backward"]

Grads: TypeAlias = tuple[Tensor | None, ...]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> Grads:
    """The full backward of a stage: accumulates into the weights, returns the inputs' gradients.

    Args:
        stage_output: a tensor, or a tuple, list or dict of outputs, nested at will; what is no
            tensor, or needs no gradient, is passed over.
        output_grads: gradients in the same structure. None stands for no gradient at all, or, of
            a scalar tensor, for one.
        input_values: the stage's inputs.
        outputs_with_grads_idxs: take part only these of the outputs and gradients.

    Returns:
        For each input its gradient, or None. The inputs' ``.grad`` is None again.

    Raises:
        StageError: gradients and outputs differ in structure, or the backward failed.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> stage_backward((x * 3, "note"), (torch.ones(2), None), [x])
        (tensor([3., 3.]),)
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = list(paired(stage_output, output_grads))
    try:
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    except Exception as error:
        raise failed("backward", pairs, input_values) from error
    leaves = [v if isinstance(v, Tensor) and v.is_leaf else None for v in input_values]
    found = tuple(None if leaf is None else leaf.grad for leaf in leaves)
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None  # it travels on; whoever sends it alone decides how long it lives
    return found


def paired(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor]]:
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
            raise mismatch(output, grad)
    elif isinstance(output, Mapping):
        if grad is None:
            return
        if not isinstance(grad, Mapping) or output.keys() != grad.keys():
            raise mismatch(output, grad)
        for key, item in output.items():
            yield from paired(item, grad[key])
    elif isinstance(output, (tuple, list)):
        if grad is None:
            return
        if not isinstance(grad, (tuple, list)) or len(output) != len(grad):
            raise mismatch(output, grad)
        for item, item_grad in zip(output, grad, strict=True):
            yield from paired(item, item_grad)


def mismatch(output: Any, grad: Any) -> StageError:
    """The error of gradients that are not arranged like the outputs."""
    return StageError(
        f"the gradients of the outputs must have the outputs' structure: for {described(output)} "
        f"expected as much or None, got {described(grad)}; pass one gradient or None per output"
    )


def described(value: Any) -> str:
    """What ``value`` is, for a message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def failed(what: str, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Any]) -> StageError:
    """The error of a backward that raised."""
    outputs = ", ".join(f"{described(out)} with {described(grad)}" for out, grad in pairs)
    return StageError(
        f"the stage's {what} failed; outputs with their gradients: {outputs or 'none'}; inputs: "
        f"{', '.join(map(described, inputs)) or 'none'}; the cause stands above"
    )
