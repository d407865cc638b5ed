"""The operations whose weight gradient is put off: how each is called, with its weights detached.

A handler runs the operation itself, on ``weight.detach()``, so that autograd knows the way to the
input and nothing else, and leaves the rest to a rule through ``ledger.tap``. What it does not
recognise it hands to the general way (`generic`), which is right for any operation.

Handlers run for every call of their operation inside a stage, thousands of times per step: they
test what is cheap first. `norms` and `convs` hold the ones with more arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
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
)
from penstock.stage.weight_grad.convs import CONVS, conv
from penstock.stage.weight_grad.generic import (
    Args,
    Func,
    Handler,
    Interception,
    Kwargs,
    intercept_any,
    run,
    twin_of,
)
from penstock.stage.weight_grad.ledger import refuse
from penstock.stage.weight_grad.norms import NORMS, embedding, norm
from penstock.stage.weight_grad.rules import (
    batched_matmul_grads,
    einsum_grads,
    left_matmul_grads,
    linear_grads,
    matmul_grads,
)

__all__ = ["HANDLERS", "PASS"]


def PASS(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Operations that never touch a gradient: run as they are."""
    return run(func, args, kwargs)


def plain_activation(value: object) -> bool:
    """Whether ``value`` is what the rules are written for: a dense real tensor, no subclass."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_complex()
    )


def lowered(x: Tensor) -> Tensor:
    """``x`` as autocast would hand it to a matrix product: what autograd would save."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


def linear(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.linear(x, w, b)``."""
    if kwargs:
        args = (*args, *(kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :]))
    ledger = mode.ledger
    x, w = args[0], args[1]
    b = args[2] if len(args) > 2 else None
    w_ref = ledger.weight(w)
    b_ref = None if b is None else ledger.weight(b)
    if (
        w_ref is None
        or (b is not None and b_ref is None)
        or not plain_activation(x)
        or ledger.derived(x) is not None
        or not deferrable_now()
        or x.dim() < 2
    ):
        return intercept_any(mode, func, args, {})
    if autocast_enabled():
        x = lowered(x)
    detached = w.detach()
    row_major = detached.is_contiguous()
    if not x.is_contiguous() and x.dim() > 2:
        # Given a weight that needs no gradient, torch would multiply in batches instead of
        # copying x to one matrix: other rounding than that of an ordinary forward.
        copied = x.reshape(-1, x.shape[-1])
        y = ledger.tap(func(copied, detached), linear_grads, (w_ref,), copied, row_major)
        y = y.view(*x.shape[:-1], w.shape[0])
        return y if b is None else intercept_any(mode, torch.add, (y, b), {})
    if b_ref is None:
        return ledger.tap(func(x, detached), linear_grads, (w_ref,), x, row_major)
    y = func(x, detached, b.detach())  # type: ignore[union-attr]
    # With a bias, what comes back for a stack of matrices is a view of one matrix. Operations in
    # place on a view lead the graph around it, to its base.
    base = y._base
    if base is None:
        return ledger.tap(y, linear_grads, (w_ref, b_ref), x, row_major)
    tapped = ledger.tap(base, linear_grads, (w_ref, b_ref), x, row_major)
    return y if tapped is base else tapped.view(y.shape)


def matmul(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x @ w``, ``w @ x``, ``torch.mm``, ``torch.bmm``."""
    if kwargs or len(args) != 2:
        return intercept_any(mode, func, args, kwargs)
    ledger = mode.ledger
    left, right = args
    l_ref, r_ref = ledger.weight(left), ledger.weight(right)
    if l_ref is None and r_ref is None:
        return func(left, right)
    x, w = (right, left) if r_ref is None else (left, right)
    if (l_ref is not None and r_ref is not None) or not plain_activation(x) or not deferrable_now():
        return intercept_any(mode, func, args, kwargs)
    detached = w.detach()
    if autocast_enabled():
        x = lowered(x)
    if r_ref is None:
        if x.dim() == w.dim() == 2:
            y = func(detached, x)
            row_major = detached.is_contiguous()
            return ledger.tap(y, left_matmul_grads, (l_ref,), x, row_major)  # type: ignore[arg-type]
        return intercept_any(mode, func, args, kwargs)
    if w.dim() == 2 and x.dim() >= 2:
        if x.dim() > 2 and not x.is_contiguous():
            copied = x.reshape(-1, x.shape[-1])
            y = func(copied, detached)
            y = ledger.tap(y, matmul_grads, (r_ref,), copied, detached.is_contiguous())
            return y.view(*x.shape[:-1], w.shape[1])
        y = func(x, detached)
        return ledger.tap(y, matmul_grads, (r_ref,), x, detached.is_contiguous())
    if w.dim() == x.dim() == 3 and w.shape[0] == x.shape[0]:
        return ledger.tap(func(x, detached), batched_matmul_grads, (r_ref,), x)
    return intercept_any(mode, func, args, kwargs)


def addmm(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.addmm(b, x, w)`` and ``torch.baddbmm(b, x, w)`` without scale factors."""
    ledger = mode.ledger
    if kwargs or len(args) != 3:
        return intercept_any(mode, func, args, kwargs)
    b, x, w = args
    w_ref, b_ref = ledger.weight(w), ledger.weight(b)
    if (
        w_ref is None
        or ledger.weight(x) is not None
        or not plain_activation(x)
        or not plain_activation(b.detach())
        or not deferrable_now()
    ):
        return intercept_any(mode, func, args, kwargs)
    if autocast_enabled():
        x = lowered(x)
    weights = (w_ref,) if b_ref is None else (w_ref, b_ref)
    detached = w.detach()
    y = func(b if b_ref is None else b.detach(), x, detached)
    if x.dim() == 3:
        return ledger.tap(y, batched_matmul_grads, weights, x)
    return ledger.tap(y, matmul_grads, weights, x, detached.is_contiguous())


def einsum(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.einsum("btk,nk->btn", x, w)``: two operands, each index in two of the three."""
    ledger = mode.ledger
    if kwargs or len(args) != 3 or not isinstance(args[0], str):
        return intercept_any(mode, func, args, kwargs)
    refs = [ledger.weight(operand) for operand in args[1:]]
    position = 1 if refs[1] is not None else 0
    weight, x, w = refs[position], args[2 - position], args[1 + position]
    terms = args[0].replace(" ", "").replace("->", ",").split(",")
    if (
        weight is None
        or refs[1 - position] is not None
        or len(terms) != 3
        or not plain_activation(x)
        or "." in args[0]
        or any(len(set(term)) != len(term) for term in terms)
        or not set(terms[position]) <= set(terms[1 - position]) | set(terms[2])
        or not broadcast_free(terms, args)
        or autocast_enabled()
        or not deferrable_now()
    ):
        return intercept_any(mode, func, args, kwargs)
    detached = w.detach()
    operands = (x, detached) if position else (detached, x)
    backward = f"{terms[1 - position]},{terms[2]}->{terms[position]}"
    return ledger.tap(func(args[0], *operands), einsum_grads, (weight,), x, backward)


def broadcast_free(terms: list[str], args: Args) -> bool:
    """Whether every index has one size: einsum would stretch a size of one to another's."""
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, args[1:], strict=False):
        for index, size in zip(term, operand.shape, strict=False):
            if sizes.setdefault(index, size) != size:
                return False
    return True


def differentiate(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad`` inside a forward: right where nothing is kept of it.

    ``torch.func.grad`` and its kin come by here too: of what they differentiate nothing was put
    off, and the rest is autograd's.
    """
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if all(map(in_transform, listed(given["outputs"]))):
        return run(func, args, kwargs)
    wanted = listed(given["inputs"])
    if given.get("create_graph"):
        refuse("autograd.grad(create_graph=True) inside the forward")
    if any(mode.ledger.weight(value) is not None for value in wanted):
        refuse("autograd.grad with respect to a parameter inside the forward")
    return mode.ledger.unobserved(lambda: inside(mode, func, args, kwargs))


def listed(value: Any) -> Sequence[Any]:
    """What may be one or several, as several."""
    return value if isinstance(value, (tuple, list)) else (value,)


def backward(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.backward``: in I, our own, or that of a checkpoint within."""
    if not mode.forwarded:
        refuse("backward() inside the forward")
    return inside(mode, func, args, kwargs)


def inside(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` with the mode active: regions are recomputed in it as they were computed."""
    twin = twin_of(func)
    assert twin is not None
    with mode:
        return twin(*args, **kwargs)


def grad_fn(mode: Interception, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``tensor.grad_fn``: whoever asks may hook the node, after which our hook must come."""
    tensor = args[0]
    if type(tensor) is Tensor and observed(tensor):
        observe_at_node(tensor)
    return func(*args)


ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "is_cuda"),
    *("is_sparse", "is_nested", "is_quantized", "is_meta", "grad", "output_nr", "_version"),
)
# The engine itself sets hooks, while it holds the lock of a tensor's place in the graph.
SETTERS = ("grad", "requires_grad", "_backward_hooks")
METHODS = (
    *("size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "is_complex"),
    "data_ptr",
)


def getters() -> dict[Func, Handler]:
    """Attributes of tensors that are facts, not tensors."""
    facts: dict[Func, Handler] = {getattr(Tensor, name).__get__: PASS for name in ATTRIBUTES}
    facts |= {getattr(Tensor, name).__set__: PASS for name in SETTERS}
    return facts | {getattr(Tensor, name): PASS for name in METHODS}


HANDLERS: dict[Func, Handler] = {
    **getters(),
    F.linear: linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), addmm),
    torch.einsum: einsum,
    **dict.fromkeys(CONVS, conv),
    **dict.fromkeys(NORMS, norm),
    F.embedding: embedding,
    torch.autograd.grad: differentiate,
    torch.autograd.backward: backward,
    Tensor.backward: backward,
    Tensor.grad_fn.__get__: grad_fn,  # type: ignore[union-attr]
}
