"""Operations that take a weight and have no formula of their own: four ways, all right.

    only weights in, weights out          p.T, p * scale        itself a weight, gradient in W
    a Python function of torch            F.layer_norm          looked into, by running its twin
    a weight changed in place             w[0] = x              left to autograd, in I
    all else                              F.prelu(x, p)         a proxy of the weight: its gradient
                                                                comes in I and is delivered in W

It knows no operation by its meaning: those that it would treat badly stand in `ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock._torch_compat import (
    deferrable_now,
    saved_tensor_hooks_active,
    without_override_check,
)
from penstock.stage.weight_grad.ledger import Ledger
from penstock.stage.weight_grad.rules import Weight

__all__ = [
    "Args",
    "Func",
    "Handler",
    "Interception",
    "Kwargs",
    "intercept_any",
    "may_hold_weight",
    "run",
    "substitute",
    "twin_of",
]

Func: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Handler: TypeAlias = Callable[[Any, Func, Args, Kwargs], Any]
"""Runs one call of an operation under the active mode."""

# What captured graphs call in place of torch's functions.
aten: Any = torch.ops.aten


class Interception(AbstractContextManager[Any], Protocol):
    """The active mode, as far as the handlers of operations need to know it."""

    ledger: Ledger
    forwarded: bool
    looked_into: set[Func]


# They save no tensors, so that their graph is never recomputed with a checkpointed region.
VIEWS = frozenset(
    {
        Tensor.T.__get__,  # type: ignore[attr-defined]
        Tensor.mT.__get__,  # type: ignore[attr-defined]
        Tensor.t,
        Tensor.transpose,
        Tensor.permute,
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.unflatten,
        Tensor.expand,
        Tensor.squeeze,
        Tensor.unsqueeze,
        Tensor.split,
        Tensor.chunk,
        Tensor.unbind,
        Tensor.narrow,
        Tensor.__getitem__,
        torch.t,
        torch.transpose,
        torch.permute,
        torch.reshape,
        torch.split,
        torch.chunk,
        torch.unbind,
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default),
        *(aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.expand.default),
        *(aten.squeeze.dim, aten.unsqueeze.default, aten.split.Tensor, aten.chunk.default),
        *(aten.unbind.int, aten.narrow.default, aten.slice.Tensor, aten.select.int),
    }
)

# Weights looked up by whole numbers or masks stay weights: no activation takes part.
LOOKUPS = frozenset(
    {
        Tensor.__getitem__,
        Tensor.index_select,
        torch.index_select,
        Tensor.gather,
        torch.gather,
        Tensor.masked_fill,
        torch.masked_fill,
        *(aten.index.Tensor, aten.index_select.default, aten.gather.default),
        *(aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    }
)

# Constants that scale or shift a weight itself, as a pruning mask does, leave it a weight.
ELEMENTWISE = frozenset(
    {
        *(torch.add, torch.sub, torch.mul, torch.div),
        *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div),
        *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__mul__, Tensor.__rmul__),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    }
)

TWINS: dict[Func, Func | None] = {}


def may_hold_weight(ledger: Ledger, args: Iterable[Any]) -> bool:
    """Whether any of ``args`` could be, or contain, a weight; quick, and sure when it says no."""
    known, recalls = ledger.expressions, ledger.recalls
    for arg in args:
        kind = type(arg)
        if kind is Parameter or (known and id(arg) in known):
            return True
        if recalls and kind is Tensor and ledger.derived(arg) is not None:
            return True
        # Sizes and dimensions come in lists as well.
        if (kind is tuple or kind is list) and not (arg and type(arg[0]) is int):
            return True
        if kind is dict:
            return True
    return False


def operands(
    ledger: Ledger, values: Iterable[Any], found: list[Weight], rest: list[Tensor]
) -> None:
    """Collect the weights and the other tensors in ``values``, however deep in lists."""
    for value in values:
        if isinstance(value, Tensor):
            weight = ledger.weight(value)
            if weight is None:
                rest.append(value)
            else:
                found.append(weight)
        elif isinstance(value, (tuple, list)):
            operands(ledger, value, found, rest)
        elif isinstance(value, dict):
            operands(ledger, value.values(), found, rest)


def run(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``func`` on the arguments as they are."""
    return func(*args, **kwargs) if kwargs else func(*args)


def intercept_any(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` so that the gradient of every weight in its arguments is right.

    Args:
        mode: the active interception.
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What ``func`` returns.
    """
    ledger = mode.ledger
    weights: list[Weight] = []
    others: list[Tensor] = []
    operands(ledger, args, weights, others)
    if kwargs:
        operands(ledger, kwargs.values(), weights, others)
    if not weights or not deferrable_now():
        return run(func, args, kwargs)

    in_place = changes_in_place(func, kwargs)
    if in_place and ledger.weight(args[0] if args else None) is not None:
        result = run(func, args, kwargs)
        # Whatever shares memory with the changed weight may depend on activations now.
        ledger.forget_changed()
        return result
    if not others or weights_only(func, args, weights[0], others):
        if saved_tensor_hooks_active() and func not in VIEWS:
            return substitute(mode, func, args, kwargs)
        result = run(func, args, kwargs)
        ledger.express(result, weights)
        return result
    twin = twin_of(func)
    # A function may offer itself again from a helper, as torch.meshgrid does.
    if twin is None or func in mode.looked_into:
        return substitute(mode, func, args, kwargs)
    mode.looked_into.add(func)
    try:
        with mode:
            return twin(*args, **kwargs)
    finally:
        mode.looked_into.remove(func)


def weights_only(func: Func, args: Args, weight: Weight, others: list[Tensor]) -> bool:
    """Whether the result depends on the weights and constants of theirs alone."""
    if func in LOOKUPS:
        return not any(t.is_floating_point() or t.is_complex() for t in others)
    if func not in ELEMENTWISE or others[0].requires_grad or others[0].dim() > len(weight.shape):
        return False
    sizes = zip(reversed(others[0].shape), reversed(weight.shape), strict=False)
    return all(size in (1, wanted) for size, wanted in sizes)


def changes_in_place(func: Func, kwargs: Kwargs) -> bool:
    """Whether ``func`` writes into its first argument or into ``out=``, going by its name."""
    name: str = getattr(func, "__name__", "").partition(".")[0]  # overloads: add_.Tensor
    if name.startswith("__"):
        # Setting an attribute, such as ``weight.data``, is a change too.
        return name in ("__setitem__", "__set__") or name.startswith("__i")
    return name.endswith("_") or kwargs.get("out") is not None


def twin_of(func: Func) -> Func | None:
    """The twin of a Python function that runs its body under the mode, made once."""
    if func not in TWINS:
        TWINS[func] = without_override_check(func)
    return TWINS[func]


def substitute(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` with proxies in place of the weights."""
    ledger = mode.ledger

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            weight = ledger.weight(value)
            return value if weight is None else ledger.proxy(weight, value)
        if type(value) is tuple or type(value) is list:
            return type(value)(map(swap, value))
        return value

    swapped = {name: swap(value) for name, value in kwargs.items()}
    return func(*map(swap, args), **swapped)
