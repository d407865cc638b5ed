"""The reference of every pipeline, one plain loop in one process, and comparisons with it.

    for mb in microbatches:
        (loss_fn(model(mb), target_mb) / n).backward()

``plain_step`` is that loop; ``snapshot`` copies the gradients and buffers of a model or a pipeline;
``assert_same`` compares two snapshots, exactly or within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.loss import needs_target
from penstock.runtime.microbatch import (
    Rows,
    num_with_rows,
    split_args_kwargs_into_chunks,
    split_tree,
)

__all__ = ["PlainResult", "Tolerance", "assert_same", "plain_step", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainResult:
    """The results of the plain loop, beside the gradients.

    Args:
        loss: the mean of the microbatches' losses, a scalar.
        losses: the losses by microbatch.
        outputs: the model's outputs by microbatch, detached where they are tensors.
        metrics: the loss function's metrics by microbatch; None without.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    outputs: tuple[Any, ...]
    metrics: tuple[Any, ...]


def plain_step(
    model: Callable[..., Any],
    loss_fn: Callable[..., Any],
    *args: Any,
    target: Any = None,
    n_microbatches: int | None = None,
    arg_mbs: Sequence[tuple[Any, ...]] | None = None,
    kwarg_mbs: Sequence[dict[str, Any]] | None = None,
    target_mbs: Sequence[Any] | None = None,
    loss_kwargs: Mapping[str, Any] | None = None,
    scale_grads: bool = True,
    **kwargs: Any,
) -> PlainResult:
    """Train on one batch as one device would: gradients are added to ``.grad``.

    Args:
        model: the model, uncut.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)``, gives a scalar tensor, or
            ``(scalar, metrics)``.
        args, kwargs, target: the model's inputs and the targets, a whole batch, split as the
            pipeline splits it.
        n_microbatches: the number of microbatches; not needed with ready microbatches.
        arg_mbs, kwarg_mbs, target_mbs: ready microbatches, instead of a batch to split.
        loss_kwargs: keyword arguments of the loss function.
        scale_grads: whether each loss is divided by the number of microbatches.

    Raises:
        ValueError: neither the number of microbatches nor a list of them is given.
    """
    ready = [len(mbs) for mbs in (arg_mbs, kwarg_mbs, target_mbs) if mbs is not None]
    num = next(iter(ready), n_microbatches)
    if num is None:
        raise ValueError("pass n_microbatches=, or lists of ready microbatches")
    rows: Rows = {}
    split_args, split_kwargs = split_args_kwargs_into_chunks(args, kwargs, num, seen=(rows, rows))
    targets = split_tree(target, num, seen=rows) if target_mbs is None else target_mbs
    num = num_with_rows(rows, num) or num
    losses, outputs, metrics = [], [], []
    for positional, named, wanted in zip(
        (arg_mbs or split_args)[:num],
        (kwarg_mbs or split_kwargs)[:num],
        targets[:num],
        strict=True,
    ):
        output = model(*positional, **named)
        against = () if wanted is None and not needs_target(loss_fn) else (wanted,)
        result = loss_fn(output, *against, **(loss_kwargs or {}))
        loss, metric = result if isinstance(result, tuple) else (result, None)
        with torch.autocast(loss.device.type, enabled=False):  # as torch's guide to it says
            (loss / num if scale_grads else loss).backward()
        losses.append(loss.detach())
        outputs.append(output.detach() if isinstance(output, Tensor) else output)
        metrics.append(metric)
    return PlainResult(
        loss=torch.stack(losses).mean(),
        losses=tuple(losses),
        outputs=tuple(outputs),
        metrics=tuple(metrics),
    )


def snapshot(source: Any) -> dict[str, Tensor | None]:
    """Copy the gradients and buffers of a model, a pipeline, or one rank's part of it.

    A gradient that is None is not the same as zeros: an optimizer skips a parameter without a
    gradient, and decays one with a zero gradient. ``assert_same`` compares two snapshots.

    Args:
        source: an object with ``named_parameters()`` and ``named_buffers()``.
    """
    params, buffers = source.named_parameters(), source.named_buffers()
    found = {f"gradient of {name}": param.grad for name, param in params}
    found |= {f"buffer {name}": buffer for name, buffer in buffers}
    return {name: None if t is None else t.detach().clone() for name, t in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The allowed difference of two values whose terms are summed in different orders.

    Args:
        relative: relative to the largest finite magnitude of the expected tensor, not to each
            element: a sum that cancels to almost nothing has the rounding of its terms.
        absolute: in the values' own unit.
    """

    relative: float
    absolute: float = 0.0


def assert_same(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    tolerance: Tolerance | None = None,
    partial: bool = False,
) -> None:
    """Compare two snapshots: names, None, shapes, dtypes and values.

    Args:
        actual: the snapshot to check.
        expected: the reference.
        tolerance: the allowed difference; None demands equal numbers (a NaN equals a NaN).
        partial: whether ``actual`` may be a part of ``expected``, as one rank's stages are.

    Raises:
        AssertionError: they differ; all differences are listed.
    """
    differences = []
    for name in dict.fromkeys([*actual, *(() if partial else expected)]):
        if name not in expected or name not in actual:
            found: str | None = "is missing" if name in expected else "is not expected at all"
        else:
            found = _difference(actual[name], expected[name], tolerance)
        if found is not None:
            differences.append(f"{name}: {found}")
    if differences:
        raise AssertionError(f"{len(differences)} differences:\n  " + "\n  ".join(differences))


def _difference(
    actual: Tensor | None, expected: Tensor | None, tolerance: Tolerance | None
) -> str | None:
    if actual is None or expected is None:
        kinds = [
            "None" if t is None else f"a tensor of shape {tuple(t.shape)}"
            for t in (actual, expected)
        ]
        return None if actual is expected else f"is {kinds[0]}, expected {kinds[1]}"
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        return (
            f"has shape {tuple(actual.shape)} and dtype {actual.dtype}, "
            f"expected {tuple(expected.shape)} and {expected.dtype}"
        )
    if type(actual) is type(expected) is Tensor and torch.equal(actual, expected):
        return None
    wide = torch.complex128 if actual.is_complex() else torch.float64
    left, right = actual.to(wide), expected.to(wide)
    allowed = 0.0
    if tolerance is not None:
        finite = right[right.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        allowed = tolerance.absolute + tolerance.relative * largest
    try:
        # Two equal infinities, or two NaN, do not differ.
        torch.testing.assert_close(
            left, right, rtol=0, atol=allowed, equal_nan=True, check_device=False
        )
    except AssertionError as error:
        return f"differs: {' '.join(str(error).split())}"
    return None
