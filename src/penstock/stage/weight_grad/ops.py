"""Handlers of the operations whose weight gradient is deferred.

A handler runs the operation on ``weight.detach()``, so that autograd records the way to the input
alone, and records a formula for the weight. Calls that it does not recognise go to ``generic``,
which is right for any operation. Handlers run thousands of times per step: cheap tests come first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock._torch_compat import (
    autocast_enabled,
    deferrable_now,
    in_transform,
    observe_at_node,
    observed,
    view_base,
)
from penstock.stage.pytree import Args, Kwargs
from penstock.stage.weight_grad import accumulate as formulas
from penstock.stage.weight_grad.accumulate import Weight, refuse
from penstock.stage.weight_grad.deferred_grads import (
    HANDLERS,
    DeferredGrads,
    Func,
    Handler,
    generic,
    is_dense,
    substitute,
    twin_of,
)

__all__: list[str] = []

# The names of torch's functions in captured graphs.
aten: Any = torch.ops.aten


def weights_of(
    deferred: DeferredGrads, x: object, w: object, b: object = None
) -> tuple[Weight, ...] | None:
    """The weight, and the bias if there is one; None unless ``x`` is a dense activation."""
    weight = deferred.weight(w)
    if (
        weight is None
        or not is_dense(x)
        or x.layout is not torch.strided
        or x.is_nested
        or x.is_complex()
        or deferred.weight(x) is not None
        or not deferrable_now()
    ):
        return None
    if b is None:
        return (weight,)
    bias = deferred.weight(b)
    return None if bias is None else (weight, bias)


def cast_by_autocast(x: Tensor) -> Tensor:
    """Cast ``x`` to the dtype of autocast, as autograd would save it."""
    if not autocast_enabled():
        return x
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


# --- matrix products -----------------------------------------------------------------------------


def as_matrix(x: Tensor) -> Tensor:
    """A strided stack as one matrix, as if the weight required grad: the rounding differs."""
    return x.reshape(-1, x.shape[-1]) if x.dim() > 2 and not x.is_contiguous() else x


def linear(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.linear(x, w, b)``."""
    if kwargs:
        args = (*args, *(kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :]))
    x, w = args[0], args[1]
    b = args[2] if len(args) > 2 else None
    weights = weights_of(deferred, x, w, b)
    if weights is None or x.dim() < 2:
        return generic(deferred, func, args, {})
    x = cast_by_autocast(x)
    detached = w.detach()
    row_major = detached.is_contiguous()
    rows = as_matrix(x)
    if rows is not x:
        y = deferred.record(func(rows, detached), formulas.linear, weights[:1], rows, row_major)
        y = y.view(*x.shape[:-1], w.shape[0])
        return y if b is None else generic(deferred, torch.add, (y, b), {})
    if b is None:
        return deferred.record(func(x, detached), formulas.linear, weights, x, row_major)
    y = func(x, detached, b.detach())
    # With a bias, the result for a stack of matrices is a view of one matrix. In-place operations
    # on a view lead the graph around it, to its base.
    base = view_base(y)
    if base is None:
        return deferred.record(y, formulas.linear, weights, x, row_major)
    recorded = deferred.record(base, formulas.linear, weights, x, row_major)
    return y if recorded is base else recorded.view(y.shape)


def product(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x @ w``, ``mm``, ``bmm``; ``addmm`` and ``baddbmm`` without scale factors."""
    if kwargs or not 2 <= len(args) <= 3:
        return generic(deferred, func, args, kwargs)
    *added, x, w = args
    weights = weights_of(deferred, x, w, *added)
    if weights is None:
        return generic(deferred, func, args, kwargs)
    x = cast_by_autocast(x)
    detached = w.detach()
    row_major = detached.is_contiguous()
    biases = [b.detach() for b in added]
    if w.dim() == 2 and x.dim() >= 2:
        rows = as_matrix(x)
        y = deferred.record(
            func(*biases, rows, detached), formulas.matmul, weights, rows, row_major
        )
        return y if rows is x else y.view(*x.shape[:-1], w.shape[1])
    if w.dim() == x.dim() == 3 and w.shape[0] == x.shape[0]:
        return deferred.record(func(*biases, x, detached), formulas.batched_matmul, weights, x)
    return generic(deferred, func, args, kwargs)


# --- convolutions --------------------------------------------------------------------------------

# Function → spatial dimensions. Transposed convolutions take proxies.
CONVS: dict[Func, int] = {
    **{getattr(torch, f"conv{dims}d"): dims for dims in (1, 2, 3)},
    **{getattr(aten, f"conv{dims}d").default: dims for dims in (1, 2, 3)},
}
PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def conv(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.conv2d(x, w, b, ...)`` and the like, of a batch, with padding in numbers."""
    dims = CONVS[func]
    given = dict(zip(PARAMETERS, args, strict=False), **kwargs)
    x, w, b = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    weights = weights_of(deferred, x, w, b)
    options = DEFAULTS | given
    if (
        weights is None
        or isinstance(options["padding"], str)
        or x.dim() != dims + 2
        or autocast_enabled()
    ):
        return generic(deferred, func, args, kwargs)
    sizes = {
        name: [value] * dims if isinstance(value, int) else [*value] * (dims // len(value))
        for name, value in options.items()
        if name != "groups"
    }
    detached = w.detach()
    backward_options = (
        detached,
        None if b is None else list(b.shape),
        *(sizes[name] for name in ("stride", "padding", "dilation")),
        False,
        [0] * dims,
        options["groups"],
        [False, True, b is not None],
    )
    y = func(x, detached, None if b is None else b.detach(), **given)
    return deferred.record(y, formulas.conv, weights, x, backward_options)


def embedding(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.embedding``, which ``F.embedding`` calls, with dense gradients."""
    names = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args, strict=False), **kwargs)
    table, indices = given["weight"], given["indices"]
    weight = deferred.weight(table)
    if weight is None or given.get("sparse") or type(indices) is not Tensor or not deferrable_now():
        return generic(deferred, func, args, kwargs)
    options = (given.get("padding_idx", -1), given.get("scale_grad_by_freq", False))
    y = torch.embedding(table.detach(), indices, *options)
    return deferred.record(y, formulas.embedding, (weight,), indices, options)


# --- differentiation inside the forward ----------------------------------------------------------


def differentiate(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad`` in a module: refused, unless ``torch.func`` calls it."""
    outputs = args[0] if args else kwargs["outputs"]
    if not all(map(in_transform, [outputs] if isinstance(outputs, Tensor) else outputs)):
        refuse("autograd.grad inside the stage")
    return func(*args, **kwargs)


def backward(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.backward``: in I, the stage's own, or that of a checkpoint inside.

    Its body runs in the mode, so that regions are recomputed as they ran.
    """
    if not deferred.num_passes:
        refuse("backward() inside the forward")
    twin = twin_of(func)
    assert twin is not None
    with deferred:
        return twin(*args, **kwargs)


def grad_fn(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``tensor.grad_fn``: user code may hook the node; our hook must run after it."""
    tensor = args[0]
    if type(tensor) is Tensor and observed(tensor):
        observe_at_node(tensor)
    return func(*args)


# --- the table -----------------------------------------------------------------------------------

ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_cuda"),
    *("is_sparse", "is_nested", "is_quantized", "is_meta", "grad", "output_nr", "_version"),
)
METHODS = ("size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "is_complex")
# The engine itself sets hooks, while it holds the lock of a tensor's place in the graph.
SETTERS = ("grad", "requires_grad", "_backward_hooks")


def _register(handler: Handler | None, *funcs: Func) -> None:
    HANDLERS.update(dict.fromkeys(funcs, handler))


def _everywhere(*names: str) -> list[Func]:
    """The functions of these names of torch, of its tensors, and in captured graphs."""
    found = [getattr(owner, name, None) for owner in (torch, Tensor) for name in names]
    return [*filter(None, found), *(getattr(aten, name).default for name in names)]


_register(None, *(getattr(Tensor, name).__get__ for name in ATTRIBUTES))
_register(None, *(getattr(Tensor, name).__set__ for name in SETTERS))
_register(None, *(getattr(Tensor, n) for n in METHODS), Tensor.data_ptr, aten.sym_size.int)
_register(linear, F.linear, aten.linear.default)
_register(product, *_everywhere("matmul", "mm", "bmm", "addmm", "baddbmm"), Tensor.__matmul__)
_register(conv, *CONVS)
# The kernel of the input's gradient computes the weights' too. Deferred, they would read the same
# tensors again and keep these until W, to save I a small sum.
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")
_register(substitute, *_everywhere(*_NORMS), *(getattr(F, name) for name in _NORMS))
_register(embedding, torch.embedding, aten.embedding.default)
_register(differentiate, torch.autograd.grad)
_register(backward, torch.autograd.backward, Tensor.backward)
_register(grad_fn, Tensor.grad_fn.__get__)  # type: ignore[union-attr]
