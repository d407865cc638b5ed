"""Weight gradients deferred from I to W by operation, on unmodified modules.

    deferred = DeferredGrads()                      one per stage and microbatch
    with deferred:                                  F: operations on parameters are recorded
        y = module(x)
    with deferred:                                  I: input gradients; the gradient of each
        torch.autograd.backward([y], [grad])           recorded operation's result is kept
    deferred.accumulate()                           W: a rule per record, latest operation first

In F, an operation on a parameter runs as ``op(x, w.detach())``, and a record holds its gradient
rule, the weight, and x. So W keeps and walks no graph: I + W costs what a full backward costs.
Operations without a rule get their weight gradient in I, and hand it over in W. The rest (custom
autograd functions, compiled regions) is left to autograd, which adds to ``.grad`` in I:
``find_undeferred`` finds their parameters.

``ops.py`` and ``generic.py`` register handlers of operations here; ``rules.py`` holds the formulas
and ``accumulate.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
)
from penstock.stage.weight_grad.accumulate import Record, accumulate, refuse
from penstock.stage.weight_grad.rules import Expression, GradRule, Weight, proxy_grads

__all__ = [
    "ANY",
    "HANDLERS",
    "Args",
    "DeferredGrads",
    "Func",
    "Handler",
    "Kwargs",
    "compiled_parts",
    "find_undeferred",
    "passed",
]

Func: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Handler: TypeAlias = "Callable[[DeferredGrads, Func, Args, Kwargs], Any]"
"""Runs one call of an operation in the active mode."""

# The handlers of operations; under ANY that of an operation without one that takes a weight.
HANDLERS: dict[Any, Handler] = {}
ANY = object()

# A node of the graph, and the index of its result.
_Place: TypeAlias = tuple[Node | None, int]


def passed(deferred: DeferredGrads, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that is irrelevant to gradients."""
    return func(*args, **kwargs) if kwargs else func(*args)


class DeferredGrads(TorchFunctionMode):
    """The deferred weight gradients of one microbatch.

    Entered around the forward and around the backward of the inputs, at any distance in time. Any
    number of microbatches may be in flight, each with its own.

    Args:
        undeferred: parameters left to autograd, such as those of ``find_undeferred``.
        compiled: the module's compiled parts, of ``compiled_parts``.

    Attributes:
        undeferred_now: parameters with some uses deferred and some not, in the microbatch whose
            forward showed the latter; see ``holding_undeferred``.

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
        self.undeferred_now: Sequence[Parameter] = ()
        self.records: list[Record | None] = []
        self.looked_into: set[Func] = set()  # functions whose bodies are running in the mode
        # Tensors computed from weights alone, in the forward by id (the tensor is kept, so that
        # its id stays its own), and after it by place in the graph.
        self.expressions: dict[int, tuple[Tensor, Expression]] = {}
        self._places: dict[_Place, Expression] = {}
        self.proxies: dict[int, tuple[Weight, Tensor]] = {}
        self.is_forwarded = False  # entered for F, then again for I
        self.recalls = False
        self._is_differentiated = False
        self._depth = 0
        self._undeferred = frozenset(map(id, undeferred)) if undeferred else frozenset()
        self._compiled = compiled

    def __torch_function__(
        self, func: Func, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run ``func``, deferring its weight gradients if it takes a weight."""
        handler = HANDLERS.get(func)
        if handler is passed:
            return func(*args, **kwargs) if kwargs else func(*args)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if self._may_hold_weight(args) or (kwargs and self._may_hold_weight(kwargs.values())):
            return HANDLERS[ANY](self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def __enter__(self) -> DeferredGrads:
        if not self._depth:
            if self.is_forwarded and not self._is_differentiated:
                self._is_differentiated = True
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
            self.is_forwarded = self.recalls = True
            self.expressions.clear()

    # --- weights -----------------------------------------------------------------------------

    def weight(self, value: object) -> Weight | None:
        """``value`` as a weight whose gradient can be deferred; None if it is none."""
        if type(value) is Parameter:
            deferrable = value.requires_grad and id(value) not in self._undeferred
            return value if deferrable else None
        return self.expression(value)

    def expression(self, value: object) -> Weight | None:
        """``value`` as a weight that was computed from parameters; None if it is none."""
        if self.expressions:
            known = self.expressions.get(id(value))
            if known is not None:
                return known[1]
        if self.recalls and type(value) is Tensor and saved_tensor_hooks_active():
            return self._recall(value) if value.requires_grad else None
        return None

    def _recall(self, value: Tensor) -> Weight | None:
        """The weight that a tensor was in the forward, while a region is recomputed.

        A checkpoint saves its arguments, and gets other tensors at the same place of the graph.
        Taken for no weight, an operation would save other tensors than in the forward.
        """
        if value.grad_fn is not None:
            return self._places.get(_place_of(value))
        if not deferrable_now():
            return None
        owner = getattr(get_gradient_edge(value).node, "variable", None)
        return self.weight(owner) if type(owner) is Parameter else None

    def _may_hold_weight(self, args: Iterable[Any]) -> bool:
        """True if any of ``args`` may be or contain a weight; quick, and never wrongly False."""
        known, recalls = self.expressions, self.recalls
        for arg in args:
            kind = type(arg)
            if kind is Parameter or (known and id(arg) in known):
                return True
            if recalls and kind is Tensor and self.expression(arg) is not None:
                return True
            # Sizes and dimensions come in lists as well.
            if (kind is tuple or kind is list) and not (arg and type(arg[0]) is int):
                return True
            if kind is dict:
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
            expression = Expression(
                edge=get_gradient_edge(result),
                shape=result.shape,
                dtype=result.dtype,
                leaves=leaves,
            )
            self.expressions[id(result)] = (result, expression)
            self._places[_place_of(result)] = expression

    def forget_changed(self) -> None:
        """Take as weights no longer the tensors changed in place, directly or through a view."""
        self.expressions = {
            key: known
            for key, known in self.expressions.items()
            if self._places.get(_place_of(known[0])) is known[1]
        }

    # --- records -----------------------------------------------------------------------------

    def record(
        self,
        result: Tensor,
        rule: GradRule,
        weights: tuple[Weight, ...],
        saved: Tensor,
        extra: Any = None,
    ) -> Tensor:
        """Defer the gradients of ``weights`` through one operation.

        Args:
            result: the operation's result, computed with its weights detached.
            rule: computes the weights' gradients.
            weights: the weights.
            saved: the tensor that the rule needs; checked for in-place changes in W.
            extra: further arguments of the rule.

        Returns:
            ``result``, or a tensor with its data if it needs a node of its own.
        """
        if result.requires_grad and not is_view(result) and not saved_tensor_hooks_active():
            grads: list[Any] = []
            observe_grad(result, grads.append)
            kept = saved.detach()  # shares data and version, holds no graph
            self.records.append((rule, weights, kept, version_of(kept), extra, grads))
            return result
        # A node of our own, where there is none to hook: the inputs need no gradient; the result
        # is a view, whose node in-place operations bypass; or saved tensors pass through hooks
        # (checkpointing), and x has to as well.
        self.records.append(None)
        place = (self, len(self.records) - 1, rule, weights, extra)
        recorded: Tensor = _RecordInBackward.apply(_ANCHOR, result, saved.detach(), place)  # type: ignore[no-untyped-call]
        return recorded

    def proxy(self, weight: Weight, tensor: Tensor) -> Tensor:
        """A leaf in place of ``tensor``; it gets the gradient in I, and W hands it over."""
        known = self.proxies.get(id(weight))
        if known is not None and known[1].data_ptr() == tensor.data_ptr():
            return known[1]
        proxy = tensor.detach().requires_grad_()
        self.proxies[id(weight)] = (weight, proxy)
        self.records.append((proxy_grads, (weight,), None, 0, None, _ProxyGrad(proxy)))
        return proxy

    def _drop_late_grads(self) -> None:
        """Drop gradients that came between F and I: user code differentiated the outputs.

        Raises:
            CannotDeferError: with ``create_graph=True``; its part of the weights' is not recorded.
        """
        for record in self.records:
            if record and record[5] and not isinstance(record[5], _ProxyGrad):
                if any(grad is not None and grad.requires_grad for grad in record[5]):
                    refuse("autograd.grad(create_graph=True) on the outputs")
                record[5].clear()

    def unrecorded(self, call: Callable[[], Any]) -> Any:
        """Run ``call``, a differentiation inside the forward, without a trace in the records."""
        before = [(record, len(record[5]) if record else 0) for record in self.records]
        result = call()
        self.records = [record for record, _ in before]
        for record, length in before:
            if record and not isinstance(record[5], _ProxyGrad):
                del record[5][length:]
        return result

    # --- undeferred parameters ---------------------------------------------------------------

    def note_undeferred(self, parameters: Iterable[Parameter]) -> None:
        """Note the parameters that ``find_undeferred`` found in this forward."""
        deferred: set[int] = set()
        for record in self.records:
            for weight in record[1] if record else ():
                deferred |= weight.leaves if isinstance(weight, Expression) else {id(weight)}
        unknown = None in self.records  # its weights are known with the gradient only
        self.undeferred_now = [p for p in parameters if unknown or id(p) in deferred]

    @contextmanager
    def holding_undeferred(self) -> Iterator[None]:
        """Keep back what I would accumulate into ``undeferred_now``; W hands it over.

        Other uses of these parameters are deferred in this microbatch already, and hooks must see
        one gradient, the whole.
        """
        before = [param.grad for param in self.undeferred_now]
        with ExitStack() as stack:
            for param in self.undeferred_now:
                param.grad = None
                stack.enter_context(without_hooks(param))
            try:
                yield
            finally:
                for param, grad in zip(self.undeferred_now, before, strict=True):
                    if param.grad is not None:
                        part = [param.grad]
                        self.records.append((proxy_grads, (param,), None, 0, None, part))
                    param.grad = grad

    # --- W -----------------------------------------------------------------------------------

    @property
    def is_reached(self) -> bool:
        """True if a gradient has come since the forward: user code ran a backward of its own."""
        return any(record and record[5] for record in self.records)

    def accumulate(self) -> None:
        """Run W: accumulate all weight gradients into ``.grad``, and free everything.

        Hooks on parameters, DDP's among them, run here, once per parameter.

        Raises:
            StageError: a tensor that a gradient needs was modified in place since the forward.
        """
        self.is_forwarded = self._is_differentiated = self.recalls = False
        self.undeferred_now = ()
        records = [record for record in self.records if record and record[5]]
        self.records = []
        self.proxies.clear()
        self.expressions.clear()
        self._places.clear()
        accumulate(records)


def _place_of(tensor: Tensor) -> _Place:
    """A tensor's place in the graph; another one once it was changed in place."""
    return tensor.grad_fn, tensor.output_nr


def compiled_parts(module: nn.Module) -> list[CompiledCall]:
    """The compiled parts of a module: they run outside of ``DeferredGrads``.

    The compiler would trace the mode, and break its graphs at deferred operations. Parameters
    inside get their gradients in I. Functions compiled on their own are not found, and are traced.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.compile(backend="eager")
        >>> len(compiled_parts(nn.Sequential(layer, nn.Linear(2, 2))))
        1
    """
    return compiled_calls(module, lambda: without_modes(DeferredGrads))


class _ProxyGrad:
    """The gradient of a proxy, read in W, in place of a list of gradients."""

    __slots__ = ("proxy",)

    def __init__(self, proxy: Tensor) -> None:
        self.proxy = proxy

    def __len__(self) -> int:
        return 0 if self.proxy.grad is None else 1

    def __iter__(self) -> Iterator[Tensor | None]:
        yield self.proxy.grad


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
        # Nobody else holds it, so that its version counter is not missed.
        return result.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        deferred, index, rule, weights, extra = ctx.place
        (saved,) = ctx.saved_tensors
        known = deferred.records[index]
        if known is None:
            version = version_of(saved)
            deferred.records[index] = (rule, weights, saved, version, extra, [grad])
        else:
            known[5].append(grad)
        return None, grad if ctx.needs_input_grad[1] else None, None, None


def find_undeferred(outputs: Iterable[object], parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that autograd accumulates into in I, past the deferral.

    Their hooks run in I. If other uses of such a parameter were deferred, its hooks would run
    twice: leave these to autograd altogether, by ``DeferredGrads(undeferred)``. It walks the graph,
    so call it once, after the first forward.

    Args:
        outputs: the outputs of a forward in ``DeferredGrads``; values that are no tensors are
            ignored.
        parameters: the candidates.

    Returns:
        Those of ``parameters`` that a backward from ``outputs`` reaches.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> find_undeferred([p * 2], [p])
        [Parameter containing:
        tensor([1., 1.], requires_grad=True)]
    """
    stack: list[Node] = [
        get_gradient_edge(out).node
        for out in outputs
        if isinstance(out, Tensor) and out.requires_grad
    ]
    seen = set(stack)
    reached: set[int] = set()
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            reached.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return [p for p in parameters if id(p) in reached]
