"""Weight gradients deferred from I to W by operation, on unmodified modules.

    deferred = DeferredGrads()                      one per stage and microbatch
    with deferred:                                  F: operations on parameters are recorded
        y = module(x)
    with deferred:                                  I: input gradients; the gradient of each
        torch.autograd.backward([y], [grad])           recorded operation's result is kept
    deferred.accumulate()                           W: a formula per record, latest operation first

In F, an operation on a weight runs as ``op(x, w.detach())``, and a record holds its formula, the
weight, and x. So W keeps and walks no graph: I + W costs what a full backward costs. ``ops.py``
registers the handlers of operations with formulas. Every other operation is run by ``generic``:

    only weights in, weights out       p.T, p * scale      itself a weight, gradient in W
    a Python function of torch         F.mha_forward       its body runs in the mode
    a weight changed in place          w[0] = x            left to autograd, in I
    all else                           F.prelu(x, p)       a proxy of the weight: its gradient
                                                           comes in I, W hands it over

Custom autograd functions and compiled regions are left to autograd, which adds to ``.grad`` in I:
``find_undeferred`` finds their parameters. Regions of ``compile_stage`` take proxies instead, and
split their backward (``compiled.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeGuard, cast

import optree
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from penstock._torch_compat import (
    CompiledCall,
    accumulator_of,
    active_mode,
    compiled_calls,
    deferrable_now,
    is_view,
    observe_grad,
    pop_mode,
    push_mode,
    saved_tensor_hooks_active,
    version_of,
    without_modes,
    without_override_check,
)
from penstock.stage.dtensor import is_dtensor
from penstock.stage.pytree import Args, Kwargs
from penstock.stage.weight_grad.accumulate import (
    Expression,
    Formula,
    Record,
    Weight,
    accumulate,
    proxy_grads,
    refuse,
)

__all__ = ["COMPILED_PART_OF", "HANDLERS", "DeferredGrads", "compiled_parts", "find_undeferred"]
__all__ += ["is_dense"]

Func: TypeAlias = Callable[..., Any]
# Runs one call of an operation in the active mode.
Handler: TypeAlias = "Callable[[DeferredGrads, Func, Args, Kwargs], Any]"
# By operation; None if it is irrelevant to gradients.
HANDLERS: dict[Any, Handler | None] = {}


class DeferredGrads(TorchFunctionMode):
    """The deferred weight gradients of one microbatch.

    Args:
        undeferred: parameters left to autograd, of ``find_undeferred``.
        compiled: the module's compiled parts, of ``compiled_parts``.

    Attributes:
        records: a record per operation; None until I has recomputed its checkpointed region.
        expressions: the tensors computed from weights alone, by their place in the graph.
        mixed: parameters with some uses deferred and some not: the gradients that I computes for
            them are held back, since hooks must see one gradient, that of all uses.

    Raises:
        CannotDeferError: the module calls ``torch.autograd.grad`` or ``backward()`` in its forward.
    """

    def __init__(
        self, undeferred: Iterable[Parameter] = (), compiled: Sequence[CompiledCall] = ()
    ) -> None:
        super().__init__()
        self.records: list[Record | None] = []
        # In-place changes move a tensor to another place, so that it is no weight any more.
        self.expressions: dict[tuple[Node, int], Expression] = {}
        self.proxies: dict[int, tuple[Weight, Tensor]] = {}  # by the proxy's id
        self._latest_proxies: dict[int, Tensor] = {}  # by the weight's id
        self.running: set[Func] = set()  # functions whose bodies are running in the mode
        self.num_passes = 0  # 1 after F, 2 after I
        self._depth = 0
        self._undeferred = frozenset(map(id, undeferred))
        self.mixed: Sequence[Parameter] = ()
        self._compiled = compiled

    def __torch_function__(
        self, func: Func, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run ``func``, deferring its weight gradients if it takes a weight."""
        if torch.compiler.is_dynamo_compiling():  # in a function that is compiled on its own
            return func(*args, **(kwargs or {}))
        handler = HANDLERS.get(func, generic)
        if handler is generic and not self._may_hold_weight(
            (*args, *kwargs.values()) if kwargs else args
        ):
            handler = None
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def __enter__(self) -> DeferredGrads:
        if not self._depth:
            if self.num_passes == 1:
                self._drop_late_grads()
            for call in self._compiled:
                call.replace()
        self._depth += 1
        push_mode(self)
        return self

    def __exit__(self, *failure: object) -> None:
        pop_mode()
        self._depth -= 1
        if not self._depth:
            for call in self._compiled:
                call.restore()
            self.num_passes += 1

    # --- weights -----------------------------------------------------------------------------

    def weight(self, value: object) -> Weight | None:
        """``value`` as a weight whose gradient can be deferred; None if it is none.

        While I recomputes a checkpointed region, the region's weights are other tensors at the same
        place of the graph, or leaves with a parameter's place.
        """
        if type(value) is Parameter or (is_dtensor(value) and isinstance(value, Parameter)):
            deferred = value.requires_grad and id(value) not in self._undeferred
            return value if deferred else None
        if not (self.expressions or self.num_passes) or not is_dense(value):
            return None
        if not value.requires_grad:
            return None
        if value.grad_fn is not None:
            return self.expressions.get((value.grad_fn, value.output_nr))
        if self.num_passes and saved_tensor_hooks_active() and deferrable_now():
            owner = getattr(accumulator_of(value), "variable", None)
            return self.weight(owner) if isinstance(owner, Parameter) else None
        return None

    def _may_hold_weight(self, args: Iterable[Any]) -> bool:
        """True if any of ``args`` may be or contain a weight; quick, and never wrongly False."""
        for arg in args:
            kind = type(arg)
            if kind is Parameter:
                return True
            if kind is Tensor:
                if (self.expressions or self.num_passes) and self.weight(arg) is not None:
                    return True
            # Sizes and dimensions come in lists as well.
            elif (
                kind is dict
                or ((kind is tuple or kind is list) and not (arg and type(arg[0]) is int))
                or (kind not in _PLAIN and self.weight(arg) is not None)
            ):
                return True
        return False

    def express(self, result: Any, sources: Iterable[Weight]) -> None:
        """Take the tensors in ``result``, computed from ``sources`` alone, as weights."""
        leaves = frozenset(_leaf_ids(sources))
        for each in optree.tree_leaves(result):
            if is_dense(each) and each.grad_fn is not None:
                self.expressions[each.grad_fn, each.output_nr] = Expression(
                    edge=get_gradient_edge(each),
                    shape=each.shape,
                    grad_dtype=each.dtype,
                    leaves=leaves,
                )

    # --- records -----------------------------------------------------------------------------

    def record(
        self,
        result: Tensor,
        formula: Formula,
        weights: tuple[Weight, ...],
        saved: Tensor,
        extra: Any = None,
    ) -> Tensor:
        """Defer the gradients of ``weights`` through the operation that computed ``result``.

        ``saved`` is the tensor that the formula needs, checked for in-place changes in W; ``extra``
        its further arguments. Returns ``result``, or its data with a node of their own.
        """
        saved = saved.detach()  # shares data and version, holds no graph
        if result.requires_grad and not is_view(result) and not saved_tensor_hooks_active():
            grads: list[Any] = []
            observe_grad(result, grads.append)
            self.records.append((formula, weights, saved, version_of(saved), extra, grads))
            return result
        # A node of our own, where there is none to hook: the inputs need no gradient; the result
        # is a view, whose node in-place operations bypass; or saved tensors pass through hooks
        # (checkpointing), and x has to as well.
        self.records.append(None)
        place = (self, len(self.records) - 1, formula, weights, extra)
        recorded: Tensor = _RecordInBackward.apply(_ANCHOR, result, saved, place)  # type: ignore[no-untyped-call]
        return recorded

    def proxy(self, weight: Weight, tensor: Tensor) -> Tensor:
        """A leaf in place of ``tensor``; it gets the gradient in I, and W hands it over."""
        proxy = self._latest_proxies.get(id(weight))
        if proxy is None or proxy.data_ptr() != tensor.data_ptr():
            proxy = self._latest_proxies[id(weight)] = tensor.detach().requires_grad_()
            if tensor.is_leaf:
                proxy.grad_dtype = tensor.grad_dtype
            self.proxies[id(proxy)] = weight, proxy
        return proxy

    def _drop_late_grads(self) -> None:
        """Drop gradients that came between F and I: user code differentiated the outputs."""
        for record in self.records:
            if record and record[5]:
                if any(grad is not None and grad.requires_grad for grad in record[5]):
                    refuse("autograd.grad(create_graph=True) on the outputs")
                record[5].clear()

    # --- undeferred parameters ---------------------------------------------------------------

    def note_undeferred(self, parameters: Iterable[Parameter]) -> None:
        """Note the parameters that ``find_undeferred`` found, of which the forward may not know."""
        if not (new := [p for p in parameters if id(p) not in self._undeferred]):
            return
        weights = [weight for record in self.records if record for weight in record[1]]
        deferred = _leaf_ids([*weights, *(weight for weight, _ in self.proxies.values())])
        unknown = None in self.records  # its weights are known with the gradient only
        self.mixed = [p for p in new if unknown or id(p) in deferred]

    def add_computed(self, grads: Iterable[tuple[Weight, Tensor]]) -> None:
        """Record gradients that autograd has computed in I, to be accumulated in W."""
        self.records += [(proxy_grads, (weight,), None, 0, None, [g]) for weight, g in grads]

    # --- W -----------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Run W: accumulate weight gradients; hooks on parameters, DDP's too, run once here."""
        self.num_passes = 0
        self.mixed = ()
        proxies = self.proxies.values()
        self.add_computed((w, proxy.grad) for w, proxy in proxies if proxy.grad is not None)
        records = [record for record in self.records if record and record[5]]
        self.records = []
        self.proxies.clear()
        self._latest_proxies.clear()
        self.expressions.clear()
        accumulate(records)


# Types of arguments that are no tensors.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def is_dense(value: object) -> TypeGuard[Tensor]:
    """True for a plain tensor or a DTensor, and no other subclass."""
    return type(value) is Tensor or is_dtensor(value)


def _leaf_ids(weights: Iterable[Weight]) -> set[int]:
    """The ids of the parameters that weights are, or are computed from."""
    found: set[int] = set()
    for weight in weights:
        found |= weight.leaves if isinstance(weight, Expression) else {id(weight)}
    return found


# Makes the result of _RecordInBackward need a gradient; gets none.
_ANCHOR = torch.empty(0, requires_grad=True, device="cpu")


class _RecordInBackward(torch.autograd.Function):
    """The identity, whose backward makes the record of an operation."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: Tensor, result: Tensor, saved: Tensor, place: Any
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.place = place  # type: ignore[attr-defined]
        # The result itself would come back as a view, which refuses later in-place operations.
        # Nothing else references it, so that its version counter is not missed.
        return result.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        deferred, index, formula, weights, extra = ctx.place
        (saved,) = ctx.saved_tensors
        known = deferred.records[index]
        if known is None:
            version = version_of(saved)
            deferred.records[index] = (formula, weights, saved, version, extra, [grad])
        else:
            known[5].append(grad)
        return None, grad if ctx.needs_input_grad[1] else None, None, None


# --- operations without a formula ----------------------------------------------------------------


def generic(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run any operation so that the gradient of every weight in its arguments is right."""
    leaves: list[Any] = optree.tree_leaves(cast(Any, (args, kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    weights = [w for w in map(deferred.weight, tensors) if w is not None]
    if not weights or not deferrable_now():
        return func(*args, **kwargs)
    if args and deferred.weight(args[0]) is not None and _changes_in_place(func, kwargs):
        return func(*args, **kwargs)
    has_others = len(tensors) > len(weights)
    if not has_others and not saved_tensor_hooks_active():
        result = func(*args, **kwargs)
        deferred.express(result, weights)
        return result
    twin = twin_of(func) if has_others else None
    # A function may dispatch to the mode again from a helper, as torch.meshgrid does.
    if twin is None or func in deferred.running:
        return substitute(deferred, func, args, kwargs)
    deferred.running.add(func)
    try:
        with deferred:
            return twin(*args, **kwargs)
    finally:
        deferred.running.remove(func)


def _changes_in_place(func: Func, kwargs: Kwargs) -> bool:
    """True if ``func`` writes into its first argument or into ``out=``, going by its name."""
    name: str = getattr(func, "__name__", "").partition(".")[0]  # overloads: add_.Tensor
    if name.startswith("__"):
        # Setting an attribute, such as ``weight.data``, is a change too.
        return name in ("__setitem__", "__set__") or name.startswith("__i")
    return name.endswith("_") or kwargs.get("out") is not None


# A Python function's copy that runs its body in the mode; None for other functions.
twin_of = functools.cache(without_override_check)


def substitute(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` with proxies in place of the weights."""
    if not deferrable_now():
        return func(*args, **kwargs)

    def swap(value: Any) -> Any:
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(map(swap, value))
        if kind is dict:
            return {name: swap(item) for name, item in value.items()}
        weight = deferred.weight(value)
        return value if weight is None else deferred.proxy(weight, value)

    return func(*swap(args), **swap(kwargs))


# --- compiled parts, and what can't be deferred ---------------------------------------------------


# The deferral whose compiled part is running, outside of its mode.
COMPILED_PART_OF: ContextVar[DeferredGrads | None] = ContextVar("compiled part", default=None)


def compiled_parts(module: nn.Module) -> list[CompiledCall]:
    """The compiled parts of a module, which run outside of ``DeferredGrads``.

    The compiler would trace the mode. Functions compiled on their own are not found.
    """

    def run(compiled: Func, args: Args, kwargs: Kwargs) -> Any:
        token = COMPILED_PART_OF.set(active_mode(DeferredGrads))
        try:
            with without_modes(DeferredGrads):
                return compiled(*args, **kwargs)
        finally:
            COMPILED_PART_OF.reset(token)

    return compiled_calls(module, run)


def find_undeferred(roots: Iterable[object]) -> list[Parameter]:
    """The parameters that autograd accumulates into in I, past the deferral.

    Deferring other uses of them, also in later forwards, would run their hooks twice.
    """
    tensors = (each for each in roots if isinstance(each, Tensor) and each.requires_grad)
    edges = [each for each in roots if isinstance(each, GradientEdge)]
    stack = [edge.node for edge in (*edges, *map(get_gradient_edge, tensors))]
    seen = set(stack)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    leaves = (getattr(node, "variable", None) for node in seen)
    return [leaf for leaf in leaves if isinstance(leaf, Parameter)]
