"""Handlers of the operations whose weight gradient is deferred.

A handler runs the operation on ``weight.detach()``, so that autograd records the way to the input
alone, and records a rule for the weight. Calls that it does not recognise go to ``generic``, which
is right for any operation. Handlers run thousands of times per step: cheap tests come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from penstock.stage.weight_grad.accumulate import refuse
from penstock.stage.weight_grad.deferred_grads import (
    HANDLERS,
    Args,
    DeferredGrads,
    Func,
    Handler,
    Kwargs,
    passed,
)
from penstock.stage.weight_grad.generic import generic, substitute, twin_of
from penstock.stage.weight_grad.rules import (
    ConvConfig,
    batched_matmul_grads,
    conv_grads,
    einsum_grads,
    embedding_grads,
    left_matmul_grads,
    linear_grads,
    matmul_grads,
)

__all__: list[str] = []

# The names of torch's functions in captured graphs.
aten: Any = torch.ops.aten


def plain_activation(value: object) -> bool:
    """True if the rules apply to ``value``: a dense real tensor that is not a subclass."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_complex()
    )


def lowered(x: Tensor) -> Tensor:
    """Cast ``x`` to the dtype of autocast, as autograd would save it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x


# --- matrix products -----------------------------------------------------------------------------


def linear(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.linear(x, w, b)``."""
    if kwargs:
        args = (*args, *(kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :]))
    x, w = args[0], args[1]
    b = args[2] if len(args) > 2 else None
    w_ref = deferred.weight(w)
    b_ref = None if b is None else deferred.weight(b)
    if (
        w_ref is None
        or (b is not None and b_ref is None)
        or not plain_activation(x)
        or deferred.expression(x) is not None
        or not deferrable_now()
        or x.dim() < 2
    ):
        return generic(deferred, func, args, {})
    if autocast_enabled():
        x = lowered(x)
    detached = w.detach()
    row_major = detached.is_contiguous()
    if not x.is_contiguous() and x.dim() > 2:
        # With a weight that requires no grad, torch multiplies in batches instead of copying x to
        # one matrix: other rounding than that of an ordinary forward.
        copied = x.reshape(-1, x.shape[-1])
        y = deferred.record(func(copied, detached), linear_grads, (w_ref,), copied, row_major)
        y = y.view(*x.shape[:-1], w.shape[0])
        return y if b is None else generic(deferred, torch.add, (y, b), {})
    if b_ref is None:
        return deferred.record(func(x, detached), linear_grads, (w_ref,), x, row_major)
    y = func(x, detached, b.detach())  # type: ignore[union-attr]
    # With a bias, the result for a stack of matrices is a view of one matrix. In-place operations
    # on a view lead the graph around it, to its base.
    base = view_base(y)
    if base is None:
        return deferred.record(y, linear_grads, (w_ref, b_ref), x, row_major)
    recorded = deferred.record(base, linear_grads, (w_ref, b_ref), x, row_major)
    return y if recorded is base else recorded.view(y.shape)


def matmul(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``x @ w``, ``w @ x``, ``torch.mm``, ``torch.bmm``."""
    if kwargs or len(args) != 2:
        return generic(deferred, func, args, kwargs)
    left, right = args
    l_ref, r_ref = deferred.weight(left), deferred.weight(right)
    if l_ref is None and r_ref is None:
        return func(left, right)
    x, w = (right, left) if r_ref is None else (left, right)
    if (l_ref is not None and r_ref is not None) or not plain_activation(x) or not deferrable_now():
        return generic(deferred, func, args, kwargs)
    detached = w.detach()
    if autocast_enabled():
        x = lowered(x)
    if r_ref is None:
        if x.dim() == w.dim() == 2:
            y = func(detached, x)
            row_major = detached.is_contiguous()
            return deferred.record(y, left_matmul_grads, (l_ref,), x, row_major)  # type: ignore[arg-type]
        return generic(deferred, func, args, kwargs)
    if w.dim() == 2 and x.dim() >= 2:
        if x.dim() > 2 and not x.is_contiguous():
            copied = x.reshape(-1, x.shape[-1])
            y = func(copied, detached)
            y = deferred.record(y, matmul_grads, (r_ref,), copied, detached.is_contiguous())
            return y.view(*x.shape[:-1], w.shape[1])
        y = func(x, detached)
        return deferred.record(y, matmul_grads, (r_ref,), x, detached.is_contiguous())
    if w.dim() == x.dim() == 3 and w.shape[0] == x.shape[0]:
        return deferred.record(func(x, detached), batched_matmul_grads, (r_ref,), x)
    return generic(deferred, func, args, kwargs)


def addmm(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.addmm(b, x, w)`` and ``torch.baddbmm(b, x, w)`` without scale factors."""
    if kwargs or len(args) != 3:
        return generic(deferred, func, args, kwargs)
    b, x, w = args
    w_ref, b_ref = deferred.weight(w), deferred.weight(b)
    if (
        w_ref is None
        or deferred.weight(x) is not None
        or not plain_activation(x)
        or not plain_activation(b.detach())
        or not deferrable_now()
    ):
        return generic(deferred, func, args, kwargs)
    if autocast_enabled():
        x = lowered(x)
    weights = (w_ref,) if b_ref is None else (w_ref, b_ref)
    detached = w.detach()
    y = func(b if b_ref is None else b.detach(), x, detached)
    if x.dim() == 3:
        return deferred.record(y, batched_matmul_grads, weights, x)
    return deferred.record(y, matmul_grads, weights, x, detached.is_contiguous())


def einsum(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.einsum("btk,nk->btn", x, w)``: two operands, each index in two of the three."""
    if kwargs or len(args) != 3 or not isinstance(args[0], str):
        return generic(deferred, func, args, kwargs)
    refs = [deferred.weight(operand) for operand in args[1:]]
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
        return generic(deferred, func, args, kwargs)
    detached = w.detach()
    operands = (x, detached) if position else (detached, x)
    backward = f"{terms[1 - position]},{terms[2]}->{terms[position]}"
    return deferred.record(func(args[0], *operands), einsum_grads, (weight,), x, backward)


def broadcast_free(terms: list[str], args: Args) -> bool:
    """True if every index has the same size in all operands, so that einsum broadcasts nothing."""
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, args[1:], strict=False):
        for index, size in zip(term, operand.shape, strict=False):
            if sizes.setdefault(index, size) != size:
                return False
    return True


def listed_einsum(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``aten.einsum(equation, [x, w])``."""
    if kwargs.get("path") is not None or len(args) != 2:
        return generic(deferred, func, args, kwargs)
    operands: list[Tensor] = args[1]
    return einsum(deferred, torch.einsum, (args[0], *operands), {})


# --- convolutions --------------------------------------------------------------------------------

# function → (spatial dimensions, transposed)
CONVS: dict[Func, tuple[int, bool]] = {
    torch.conv1d: (1, False),
    torch.conv2d: (2, False),
    torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True),
    torch.conv_transpose2d: (2, True),
    torch.conv_transpose3d: (3, True),
    # In captured graphs, strings as padding have overloads of their own.
    aten.conv1d.default: (1, False),
    aten.conv1d.padding: (1, False),
    aten.conv2d.default: (2, False),
    aten.conv2d.padding: (2, False),
    aten.conv3d.default: (3, False),
    aten.conv3d.padding: (3, False),
    aten.conv_transpose1d.default: (1, True),
    aten.conv_transpose2d.input: (2, True),
    aten.conv_transpose3d.input: (3, True),
}
FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = (*FORWARD[:5], "output_padding", "groups", "dilation")
DEFAULTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


def conv(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.conv2d(x, w, b, ...)`` and the like."""
    dims, transposed = CONVS[func]
    given = dict(zip(TRANSPOSED if transposed else FORWARD, args, strict=False)) | kwargs
    x, w, b = given["input"], given["weight"], given.get("bias")
    w_ref, b_ref = deferred.weight(w), None if b is None else deferred.weight(b)
    if (
        w_ref is None
        or (b is not None and b_ref is None and b.requires_grad)
        or type(x) is not Tensor
        or deferred.weight(x) is not None
        or x.is_complex()
        or autocast_enabled()
        or not deferrable_now()
    ):
        return generic(deferred, func, args, kwargs)
    options = DEFAULTS | {k: v for k, v in given.items() if k in DEFAULTS}
    dilation = per_dimension(options["dilation"], dims)
    padding = padding_sizes(options["padding"], w, dilation)
    if padding is None:
        return generic(deferred, func, args, kwargs)
    detached = w.detach()
    config = ConvConfig(
        weight=detached,
        bias_shape=None if b is None else list(b.shape),
        stride=per_dimension(options["stride"], dims),
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=per_dimension(options["output_padding"], dims),
        groups=options["groups"],
        wanted=(True, b_ref is not None),
        batched=x.dim() == dims + 2,
    )
    rest = {k: v for k, v in given.items() if k not in ("input", "weight", "bias")}
    y = func(x, detached, None if b is None else b.detach(), **rest)
    weights = (w_ref,) if b_ref is None else (w_ref, b_ref)
    return deferred.record(y, conv_grads, weights, x, config)


def per_dimension(value: int | list[int] | tuple[int, ...], dims: int) -> list[int]:
    """One number per spatial dimension."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * dims if len(sizes) == 1 else sizes


def padding_sizes(padding: Any, weight: Tensor, dilation: list[int]) -> list[int] | None:
    """The padding per spatial dimension; None if it differs between the two sides."""
    if not isinstance(padding, str):
        return per_dimension(padding, len(dilation))
    if padding == "valid":
        return [0] * len(dilation)
    totals = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
    if padding != "same" or any(total % 2 for total in totals):
        return None
    return [total // 2 for total in totals]


# --- norms and embeddings ------------------------------------------------------------------------


def norm(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.layer_norm`` and the like, whose weight gradients are not deferred.

    The kernel of the input's gradient computes them too. Deferred, they would read the same tensors
    again and keep these until W, to save I a small sum. A proxy receives them in I.
    """
    if type(args[0]) is not Tensor or deferred.expression(args[0]) is not None:
        return generic(deferred, func, args, kwargs)
    if not deferrable_now():
        return passed(deferred, func, args, kwargs)
    return substitute(deferred, func, args, kwargs)


def embedding(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``F.embedding`` with dense gradients of a table that is not renormed."""
    return embed(deferred, lambda: generic(deferred, func, args, kwargs), *args, **kwargs)


def aten_embedding(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``aten.embedding(weight, indices)``; a padding index of -1 is none."""
    names = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
    renamed = {"input" if n == "indices" else n: value for n, value in kwargs.items()}
    given = dict(zip(names, args, strict=False)) | renamed
    padding = given.pop("padding_idx", -1)
    return embed(
        deferred,
        lambda: generic(deferred, func, args, kwargs),
        padding_idx=None if padding < 0 else padding,
        **given,
    )


def embed(
    deferred: DeferredGrads,
    otherwise: Callable[[], Any],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` by its own signature; ``otherwise`` is called if it can't be deferred."""
    w_ref = deferred.weight(weight)
    count = weight.shape[0]
    if (
        w_ref is None
        or max_norm is not None
        or sparse
        or type(input) is not Tensor
        or not deferrable_now()
        or (padding_idx is not None and not -count <= padding_idx < count)
    ):
        return otherwise()
    padding = -1 if padding_idx is None else padding_idx % count
    y = torch.embedding(weight.detach(), input, padding, scale_grad_by_freq, False)
    return deferred.record(y, embedding_grads, (w_ref,), input, (padding, scale_grad_by_freq))


# --- differentiation inside the forward ----------------------------------------------------------


def differentiate(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad`` inside a forward: right if it adds nothing to a graph.

    Also handles ``torch.func.grad`` and the like, in which nothing was deferred.
    """
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if all(map(in_transform, listed(given["outputs"]))):
        return passed(deferred, func, args, kwargs)
    wanted = listed(given["inputs"])
    if given.get("create_graph"):
        refuse("autograd.grad(create_graph=True) inside the forward")
    if any(deferred.weight(value) is not None for value in wanted):
        refuse("autograd.grad with respect to a parameter inside the forward")
    return deferred.unrecorded(lambda: in_mode(deferred, func, args, kwargs))


def listed(value: Any) -> Sequence[Any]:
    """A sequence as it is; another value as a sequence of one."""
    return value if isinstance(value, (tuple, list)) else (value,)


def backward(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.backward``: in I, the stage's own, or that of a checkpoint inside."""
    if not deferred.is_forwarded:
        refuse("backward() inside the forward")
    return in_mode(deferred, func, args, kwargs)


def in_mode(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run the body of ``func`` in the mode, so that regions are recomputed as they ran."""
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
# The engine itself sets hooks, while it holds the lock of a tensor's place in the graph.
SETTERS = ("grad", "requires_grad", "_backward_hooks")
METHODS = (
    *("size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "is_complex"),
    "data_ptr",
)


def _register(handler: Handler, *funcs: Func) -> None:
    HANDLERS.update(dict.fromkeys(funcs, handler))


_register(passed, *(getattr(Tensor, name).__get__ for name in ATTRIBUTES))
_register(passed, *(getattr(Tensor, name).__set__ for name in SETTERS))
_register(passed, *(getattr(Tensor, name) for name in METHODS), aten.sym_size.int)
_register(linear, F.linear, aten.linear.default)
_register(matmul, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_register(matmul, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
_register(matmul, aten.matmul.default, aten.mm.default, aten.bmm.default)
_register(addmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm)
_register(addmm, aten.addmm.default, aten.baddbmm.default)
_register(einsum, torch.einsum)
_register(listed_einsum, aten.einsum.default)
_register(conv, *CONVS)
_register(norm, F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm)
_register(norm, aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default)
_register(norm, aten.batch_norm.default, aten.instance_norm.default)
_register(embedding, F.embedding)
_register(aten_embedding, aten.embedding.default)
_register(differentiate, torch.autograd.grad)
_register(backward, torch.autograd.backward, Tensor.backward)
_register(grad_fn, Tensor.grad_fn.__get__)  # type: ignore[union-attr]
