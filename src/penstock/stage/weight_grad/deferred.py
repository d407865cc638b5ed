"""Weight gradients put off to W by operation, on modules as they are.

    work = DeferredWeights()                        one per stage and microbatch
    with work:                                      F: operations on parameters are noted
        y = module(x)
    with work:                                      I: gradients of the inputs, at once
        torch.autograd.backward([y], [grad])
    work.accumulate()                               W: gradients of the parameters

While active, it runs each operation that takes a parameter with the parameter detached, and notes
the gradient that reaches the operation's result in I. What that leaves to do in W is one formula
per operation: no graph is kept, none is walked. Operations without a formula get their weight
gradient in I and hand it over in W. What can't be seen from here (custom autograd functions,
compiled regions) goes the way of autograd, straight into ``.grad`` in I: `find_leaks` tells which.

It knows neither stages nor schedules nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from penstock._torch_compat import pop_mode, push_mode, without_hooks
from penstock.stage.weight_grad.aten import OVERLOADS
from penstock.stage.weight_grad.delivery import deliver
from penstock.stage.weight_grad.generic import intercept_any, may_hold_weight
from penstock.stage.weight_grad.ledger import CannotDeferError, Ledger
from penstock.stage.weight_grad.ops import HANDLERS, PASS
from penstock.stage.weight_grad.rules import Expression, proxy_grads

__all__ = ["CannotDeferError", "DeferredWeights", "find_leaks"]

ALL_HANDLERS = HANDLERS | OVERLOADS


class DeferredWeights(TorchFunctionMode):
    """The weight gradients of one microbatch, left over by I for W.

    Entered around the forward and around the backward of the inputs, at any distance in time;
    any number of microbatches may be in flight, each with its own.

    Args:
        excluded: parameters to leave to autograd, such as those that `find_leaks` found.

    Attributes:
        leaks: those in part put off all the same, since this microbatch's own forward showed them.

    Raises:
        CannotDeferError: (from the forward) the module differentiates with ``create_graph=True``,
            or with respect to a parameter, inside its own forward.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> work = DeferredWeights()
        >>> with work:
        ...     y = linear(x)
        >>> with work:
        ...     torch.autograd.backward([y], [torch.ones(1, 1)])
        >>> linear.weight.grad is None, x.grad is None
        (True, False)
        >>> work.accumulate()
        >>> linear.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(self, excluded: Iterable[Parameter] = ()) -> None:
        super().__init__()
        self.ledger = Ledger(frozenset(map(id, excluded)) if excluded else frozenset())
        self.looked_into: set[Callable[..., Any]] = set()  # whose twins are running
        self.depth = 0
        self.forwarded = False  # the first time in is F, the next is I
        self.differentiated = False
        self.leaks: Sequence[Parameter] = ()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, its weights' gradients put off where it takes any."""
        handler = ALL_HANDLERS.get(func)
        if handler is PASS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        ledger = self.ledger
        if may_hold_weight(ledger, args) or (kwargs and may_hold_weight(ledger, kwargs.values())):
            return intercept_any(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def __enter__(self) -> DeferredWeights:
        if not self.depth and self.forwarded and not self.differentiated:
            self.differentiated = True
            self.ledger.forget_strays()
        self.depth += 1
        push_mode(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.forwarded = True
            self.ledger.end_forward()
        pop_mode()

    @property
    def is_reached(self) -> bool:
        """Whether a gradient has come by since the forward: somebody ran a backward of his own."""
        return any(record and record[5] for record in self.ledger.records)

    def note_leaks(self, leaks: Iterable[Parameter]) -> None:
        """Tell what `find_leaks` found in this forward; uses of the same put off are looked for."""
        put_off: set[int] = set()
        for record in self.ledger.records:
            for weight in record[1] if record else ():
                put_off |= weight.leaves if isinstance(weight, Expression) else {id(weight)}
        unknown = None in self.ledger.records  # told with the gradient only
        self.leaks = [leak for leak in leaks if unknown or id(leak) in put_off]

    @contextmanager
    def holding_leaks(self) -> Iterator[None]:
        """Hold back, while I runs, what it would accumulate into ``leaks``; W hands it over.

        For the microbatch whose forward has shown them: other uses of the same parameters are put
        off in it already, and hooks are to see one gradient, the whole.
        """
        before = [leak.grad for leak in self.leaks]
        with ExitStack() as stack:
            for leak in self.leaks:
                leak.grad = None
                stack.enter_context(without_hooks(leak))
            try:
                yield
            finally:
                for leak, grad in zip(self.leaks, before, strict=True):
                    if leak.grad is not None:
                        part = [leak.grad]
                        self.ledger.records.append((proxy_grads, (leak,), None, 0, None, part))
                    leak.grad = grad

    def accumulate(self) -> None:
        """W: accumulate all weight gradients of this microbatch, and hold nothing any more.

        Hooks on parameters, DDP's among them, run here, once per parameter.

        Raises:
            StageError: a tensor that a gradient needs was modified in place since the forward.
        """
        self.forwarded = self.differentiated = False
        self.leaks = ()
        deliver(self.ledger.take())


def find_leaks(outputs: Iterable[object], parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters whose gradients go straight into ``.grad`` in I, past the deferral.

    Such a parameter's hooks run in I. One that is also used by an operation that is put off
    would have them run twice: give these to ``DeferredWeights(excluded=...)`` from then on. It
    walks the graph, so ask once, after the first forward.

    Args:
        outputs: what a forward under ``DeferredWeights`` returned; other values are passed over.
        parameters: those to look for.

    Returns:
        The ones among ``parameters`` that a backward from ``outputs`` reaches.

    Example:
        >>> import torch
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> find_leaks([p * 2], [p])
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
