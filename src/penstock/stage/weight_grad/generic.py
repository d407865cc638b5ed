"""Operations on a weight without a rule of their own.

only weights in, weights out          p.T, p * scale        itself a weight, gradient in W
a Python function of torch            F.mha_forward         its body runs in the mode
a weight changed in place             w[0] = x              left to autograd, in I
all else                              F.prelu(x, p)         a proxy of the weight: its gradient
                                                            comes in I, W hands it over
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock._torch_compat import (
    deferrable_now,
    saved_tensor_hooks_active,
    without_override_check,
)
from penstock.stage.weight_grad.deferred_grads import (
    ANY,
    HANDLERS,
    Args,
    DeferredGrads,
    Func,
    Kwargs,
    passed,
)
from penstock.stage.weight_grad.rules import Weight

__all__ = ["generic", "substitute", "twin_of"]

# The names of torch's functions in captured graphs.
aten: Any = torch.ops.aten

# They save no tensors, so that their graph is never recomputed with a checkpointed region.
VIEWS = frozenset(
    {
        Tensor.T.__get__,  # type: ignore[attr-defined]
        Tensor.mT.__get__,  # type: ignore[attr-defined]
        *(Tensor.t, Tensor.transpose, Tensor.permute, Tensor.view, Tensor.reshape),
        *(Tensor.flatten, Tensor.unflatten, Tensor.expand, Tensor.squeeze, Tensor.unsqueeze),
        *(Tensor.split, Tensor.chunk, Tensor.unbind, Tensor.narrow, Tensor.__getitem__),
        *(torch.t, torch.transpose, torch.permute, torch.reshape),
        *(torch.split, torch.chunk, torch.unbind),
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default),
        *(aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.expand.default),
        *(aten.squeeze.dim, aten.unsqueeze.default, aten.split.Tensor, aten.chunk.default),
        *(aten.unbind.int, aten.narrow.default, aten.slice.Tensor, aten.select.int),
    }
)

# Weights indexed by integers or masks stay weights: no activation takes part.
LOOKUPS = frozenset(
    {
        *(Tensor.__getitem__, Tensor.index_select, torch.index_select),
        *(Tensor.gather, torch.gather, Tensor.masked_fill, torch.masked_fill),
        *(aten.index.Tensor, aten.index_select.default, aten.gather.default),
        *(aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    }
)

# A weight scaled or shifted by constants, as by a pruning mask, stays a weight.
ELEMENTWISE = frozenset(
    {
        *(torch.add, torch.sub, torch.mul, torch.div),
        *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div),
        *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__mul__, Tensor.__rmul__),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    }
)

_twins: dict[Func, Func | None] = {}


def generic(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run any operation so that the gradient of every weight in its arguments is right."""
    weights: list[Weight] = []
    others: list[Tensor] = []
    _collect(deferred, args, weights, others)
    if kwargs:
        _collect(deferred, kwargs.values(), weights, others)
    if not weights or not deferrable_now():
        return passed(deferred, func, args, kwargs)
    in_place = _changes_in_place(func, kwargs)
    if in_place and deferred.weight(args[0] if args else None) is not None:
        result = passed(deferred, func, args, kwargs)
        # Tensors that share memory with the changed weight may depend on activations now.
        deferred.forget_changed()
        return result
    if not others or _weights_only(func, weights[0], others):
        if saved_tensor_hooks_active() and func not in VIEWS:
            return substitute(deferred, func, args, kwargs)
        result = passed(deferred, func, args, kwargs)
        deferred.express(result, weights)
        return result
    twin = twin_of(func)
    # A function may dispatch to the mode again from a helper, as torch.meshgrid does.
    if twin is None or func in deferred.looked_into:
        return substitute(deferred, func, args, kwargs)
    deferred.looked_into.add(func)
    try:
        with deferred:
            return twin(*args, **kwargs)
    finally:
        deferred.looked_into.remove(func)


def _collect(
    deferred: DeferredGrads, values: Iterable[Any], weights: list[Weight], others: list[Tensor]
) -> None:
    """Collect the weights and the other tensors in ``values``, nested in any depth."""
    for value in values:
        if isinstance(value, Tensor):
            weight = deferred.weight(value)
            if weight is None:
                others.append(value)
            else:
                weights.append(weight)
        elif isinstance(value, (tuple, list)):
            _collect(deferred, value, weights, others)
        elif isinstance(value, dict):
            _collect(deferred, value.values(), weights, others)


def _weights_only(func: Func, weight: Weight, others: list[Tensor]) -> bool:
    """True if the result depends on weights, and on constants shaped like them, alone."""
    if func in LOOKUPS:
        return not any(t.is_floating_point() or t.is_complex() for t in others)
    if func not in ELEMENTWISE or others[0].requires_grad or others[0].dim() > len(weight.shape):
        return False
    sizes = zip(reversed(others[0].shape), reversed(weight.shape), strict=False)
    return all(size in (1, wanted) for size, wanted in sizes)


def _changes_in_place(func: Func, kwargs: Kwargs) -> bool:
    """True if ``func`` writes into its first argument or into ``out=``, going by its name."""
    name: str = getattr(func, "__name__", "").partition(".")[0]  # overloads: add_.Tensor
    if name.startswith("__"):
        # Setting an attribute, such as ``weight.data``, is a change too.
        return name in ("__setitem__", "__set__") or name.startswith("__i")
    return name.endswith("_") or kwargs.get("out") is not None


def twin_of(func: Func) -> Func | None:
    """A Python function's copy that runs its body in the mode; None for other functions."""
    if func not in _twins:
        _twins[func] = without_override_check(func)
    return _twins[func]


def substitute(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` with proxies in place of the weights."""

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            weight = deferred.weight(value)
            return value if weight is None else deferred.proxy(weight, value)
        if type(value) is tuple or type(value) is list:
            return type(value)(map(swap, value))
        return value

    swapped = {name: swap(value) for name, value in kwargs.items()}
    return func(*map(swap, args), **swapped)


HANDLERS[ANY] = generic
