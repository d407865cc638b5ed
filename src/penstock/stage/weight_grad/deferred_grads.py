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
``find_undeferred`` finds their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from penstock._torch_compat import (
    CompiledCall,
    compiled_calls,
    deferrable_now,
    is_view,
    observe_grad,
    pop_mode,
    push_mode,
    saved_tensor_hooks_active,
    version_of,
    without_hooks,
    without_modes,
    without_override_check,
)
from penstock.stage.weight_grad.accumulate import Record, accumulate, refuse
from penstock.stage.weight_grad.formulas import Expression, Formula, Weight, proxy_grads

__all__ = ["HANDLERS", "DeferredGrads", "compiled_parts", "find_undeferred"]

Func: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Handler: TypeAlias = "Callable[[DeferredGrads, Func, Args, Kwargs], Any]"
"""Runs one call of an operation in the active mode."""

HANDLERS: dict[Any, Handler] = {}


def passed(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that is irrelevant to gradients."""
    return func(*args, **kwargs)


class DeferredGrads(TorchFunctionMode):
    """The deferred weight gradients of one microbatch.

    Args:
        undeferred: parameters left to autograd, of ``find_undeferred``.
        compiled: the module's compiled parts, of ``compiled_parts``.

    Attributes:
        records: a record per operation; None until I has recomputed its checkpointed region.
        expressions: the tensors computed from weights alone, by their place in the graph.

    Raises:
        CannotDeferError: (in the forward) the module differentiates with ``create_graph=True``,
            or with respect to a parameter, inside its own forward.

    Example:
        >>> linear = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> deferred = DeferredGrads()
        >>> with deferred:
        ...     y = linear(x)
        >>> with deferred:
        ...     torch.autograd.backward([y], [torch.ones(1, 1)])
        >>> linear.weight.grad is None, x.grad is None
        (True, False)
        >>> deferred.accumulate()
        >>> linear.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(
        self, undeferred: Iterable[Parameter] = (), compiled: Sequence[CompiledCall] = ()
    ) -> None:
        super().__init__()
        self.records: list[Record | None] = []
        # In-place changes move a tensor to another place, so that it is no weight any more.
        self.expressions: dict[tuple[Node, int], Expression] = {}
        self.proxies: list[tuple[Weight, Tensor]] = []
        self._latest_proxies: dict[int, Tensor] = {}  # by the weight's id
        self.running: set[Func] = set()  # functions whose bodies are running in the mode
        self._num_passes = 0  # 1 after F, 2 after I
        self._depth = 0
        self._undeferred = frozenset(map(id, undeferred))
        # Parameters with some uses deferred and some not, see ``holding_undeferred``.
        self._mixed: Sequence[Parameter] = ()
        self._compiled = compiled

    def __torch_function__(
        self, func: Func, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run ``func``, deferring its weight gradients if it takes a weight."""
        handler = HANDLERS.get(func)
        if handler is None and self._may_hold_weight((*args, *kwargs.values()) if kwargs else args):
            handler = generic
        if handler is None or handler is passed:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def __enter__(self) -> DeferredGrads:
        if not self._depth:
            if self._num_passes == 1:
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
            self._num_passes += 1

    @property
    def is_forwarded(self) -> bool:
        """True after the forward, until W."""
        return self._num_passes > 0

    # --- weights -----------------------------------------------------------------------------

    def weight(self, value: object) -> Weight | None:
        """``value`` as a weight whose gradient can be deferred; None if it is none.

        While I recomputes a checkpointed region, weights that the region was given are other
        tensors at the same place of the graph, or leaves with a parameter's place. Taken for no
        weights, operations would save other tensors than in the forward.
        """
        kind = type(value)
        if kind is Parameter:
            return value if value.requires_grad and id(value) not in self._undeferred else None  # type: ignore[attr-defined, return-value]
        if kind is not Tensor or not (self.expressions or self._num_passes):
            return None
        assert isinstance(value, Tensor)
        if not value.requires_grad:
            return None
        if value.grad_fn is not None:
            return self.expressions.get((value.grad_fn, value.output_nr))
        if self._num_passes and saved_tensor_hooks_active() and deferrable_now():
            owner = getattr(get_gradient_edge(value).node, "variable", None)
            return self.weight(owner) if type(owner) is Parameter else None
        return None

    def _may_hold_weight(self, args: Iterable[Any]) -> bool:
        """True if any of ``args`` may be or contain a weight; quick, and never wrongly False."""
        for arg in args:
            kind = type(arg)
            if kind is Parameter:
                return True
            if kind is Tensor:
                if (self.expressions or self._num_passes) and self.weight(arg) is not None:
                    return True
            # Sizes and dimensions come in lists as well.
            elif kind is dict or (
                (kind is tuple or kind is list) and not (arg and type(arg[0]) is int)
            ):
                return True
        return False

    def express(self, result: object, sources: Iterable[Weight]) -> None:
        """Take the tensors in ``result``, computed from ``sources`` alone, as weights."""
        if isinstance(result, (tuple, list)):
            for item in result:
                self.express(item, sources)
        elif type(result) is Tensor and result.grad_fn is not None:
            leaves: frozenset[int] = frozenset().union(
                *(w.leaves if isinstance(w, Expression) else {id(w)} for w in sources)
            )
            self.expressions[result.grad_fn, result.output_nr] = Expression(
                edge=get_gradient_edge(result),
                shape=result.shape,
                dtype=result.dtype,
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
        if result.requires_grad and not is_view(result) and not saved_tensor_hooks_active():
            grads: list[Any] = []
            observe_grad(result, grads.append)
            saved = saved.detach()  # shares data and version, holds no graph
            self.records.append((formula, weights, saved, version_of(saved), extra, grads))
            return result
        # A node of our own, where there is none to hook: the inputs need no gradient; the result
        # is a view, whose node in-place operations bypass; or saved tensors pass through hooks
        # (checkpointing), and x has to as well.
        self.records.append(None)
        place = (self, len(self.records) - 1, formula, weights, extra)
        recorded: Tensor = _RecordInBackward.apply(_ANCHOR, result, saved.detach(), place)  # type: ignore[no-untyped-call]
        return recorded

    def proxy(self, weight: Weight, tensor: Tensor) -> Tensor:
        """A leaf in place of ``tensor``; it gets the gradient in I, and W hands it over."""
        proxy = self._latest_proxies.get(id(weight))
        if proxy is None or proxy.data_ptr() != tensor.data_ptr():
            proxy = self._latest_proxies[id(weight)] = tensor.detach().requires_grad_()
            self.proxies.append((weight, proxy))
        return proxy

    def _drop_late_grads(self) -> None:
        """Drop gradients that came between F and I: user code differentiated the outputs."""
        for record in self.records:
            if record and record[5]:
                if any(grad is not None and grad.requires_grad for grad in record[5]):
                    refuse("autograd.grad(create_graph=True) on the outputs")
                record[5].clear()

    def unrecorded(self, call: Callable[[], Any]) -> Any:
        """Run ``call``, a differentiation inside the forward, without a trace in the records."""
        before = [(record, len(record[5]) if record else 0) for record in self.records]
        result = call()
        self.records = [record for record, _ in before]
        for record, length in before:
            if record:
                del record[5][length:]
        return result

    # --- undeferred parameters ---------------------------------------------------------------

    def note_undeferred(self, parameters: Iterable[Parameter]) -> None:
        """Note the parameters that ``find_undeferred`` found in this forward."""
        weights = [weight for record in self.records if record for weight in record[1]]
        deferred: set[int] = set()
        for weight in (*weights, *(weight for weight, _ in self.proxies)):
            deferred |= weight.leaves if isinstance(weight, Expression) else {id(weight)}
        unknown = None in self.records  # its weights are known with the gradient only
        self._mixed = [p for p in parameters if unknown or id(p) in deferred]

    def holding_undeferred(self) -> AbstractContextManager[None]:
        """Stash the gradients that action I computes for undeferred parameters; W accumulates them.

        Other uses of these parameters are deferred in this microbatch already, and hooks must see
        one gradient, that of all uses.
        """
        return self._holding() if self._mixed else nullcontext()

    @contextmanager
    def _holding(self) -> Iterator[None]:
        before = [param.grad for param in self._mixed]
        with ExitStack() as stack:
            for param in self._mixed:
                param.grad = None
                stack.enter_context(without_hooks(param))
            try:
                yield
            finally:
                for param, grad in zip(self._mixed, before, strict=True):
                    if param.grad is not None:
                        record = (proxy_grads, (param,), None, 0, None, [param.grad])
                        self.records.append(record)
                    param.grad = grad

    # --- W -----------------------------------------------------------------------------------

    @property
    def is_reached(self) -> bool:
        """True if a gradient has come since the forward: user code ran a backward of its own."""
        proxied = any(proxy.grad is not None for _, proxy in self.proxies)
        return proxied or any(record and record[5] for record in self.records)

    def accumulate(self) -> None:
        """Run W: accumulate all weight gradients into ``.grad``, and free everything.

        Hooks on parameters, DDP's among them, run here, once per parameter.
        """
        self._num_passes = 0
        self._mixed = ()
        records = [record for record in self.records if record and record[5]]
        records += [
            (proxy_grads, (weight,), None, 0, None, [proxy.grad])
            for weight, proxy in self.proxies
            if proxy.grad is not None
        ]
        self.records = []
        self.proxies.clear()
        self._latest_proxies.clear()
        self.expressions.clear()
        accumulate(records)


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
    weights: list[Weight] = []
    others: list[Tensor] = []
    _collect(deferred, (args, kwargs), weights, others)
    if not weights or not deferrable_now():
        return func(*args, **kwargs)
    if args and deferred.weight(args[0]) is not None and _changes_in_place(func, kwargs):
        return func(*args, **kwargs)
    if not others and not saved_tensor_hooks_active():
        result = func(*args, **kwargs)
        deferred.express(result, weights)
        return result
    twin = twin_of(func) if others else None
    # A function may dispatch to the mode again from a helper, as torch.meshgrid does.
    if twin is None or func in deferred.running:
        return substitute(deferred, func, args, kwargs)
    deferred.running.add(func)
    try:
        with deferred:
            return twin(*args, **kwargs)
    finally:
        deferred.running.remove(func)


def _collect(
    deferred: DeferredGrads, value: object, weights: list[Weight], others: list[Tensor]
) -> None:
    """Collect the weights and the other tensors in ``value``, nested in any depth."""
    if isinstance(value, Tensor):
        weight = deferred.weight(value)
        if weight is None:
            others.append(value)
        else:
            weights.append(weight)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(deferred, item, weights, others)


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
        if isinstance(value, Tensor):
            weight = deferred.weight(value)
            return value if weight is None else deferred.proxy(weight, value)
        if type(value) is tuple or type(value) is list:
            return type(value)(map(swap, value))
        return value

    swapped = {name: swap(value) for name, value in kwargs.items()}
    return func(*map(swap, args), **swapped)


# --- what can't be deferred ----------------------------------------------------------------------


def compiled_parts(module: nn.Module) -> list[CompiledCall]:
    """The compiled parts of a module: they run outside of ``DeferredGrads``.

    The compiler would trace the mode, and break its graphs at deferred operations. Parameters
    inside get their gradients in I. Functions compiled on their own are not found, and are traced.
    """

    def run(compiled: Func, args: Args, kwargs: Kwargs) -> Any:
        with without_modes(DeferredGrads):
            return compiled(*args, **kwargs)

    return compiled_calls(module, run)


def find_undeferred(outputs: Iterable[object], parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that autograd accumulates into in I, past the deferral.

    Their hooks run in I. If other uses of such a parameter were deferred, its hooks would run
    twice: leave these to autograd altogether, by ``DeferredGrads(undeferred)``. It walks the graph
    of the outputs, so call it once, after the first forward.
    """
    tensors = (out for out in outputs if isinstance(out, Tensor) and out.requires_grad)
    stack: list[Node] = [get_gradient_edge(out).node for out in tensors]
    seen = set(stack)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    reached = {id(getattr(node, "variable", None)) for node in seen}
    return [p for p in parameters if id(p) in reached]
