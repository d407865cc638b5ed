"""What one microbatch owes to its weights: the contributions that I leaves for W.

    forward     y = op(x, w.detach())        the gradient of x needs no more than this
                ledger.tap(y, ...)           a record: rule, weights, x, and room for the gradient
    I           the gradient of y passes     ... and is kept in the record
    W           rule(x, gradient)            for every record, latest operation first

The ledger knows weights and records. It knows no operation (`ops`) and no formula
(`rules`), nor how gradients reach the parameters (`delivery`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from penstock._torch_compat import (
    deferrable_now,
    observe_grad,
    saved_tensor_hooks_active,
)
from penstock.errors import StageError
from penstock.stage.weight_grad.rules import Expression, GradRule, Weight, proxy_grads

__all__ = ["CannotDeferError", "Ledger", "Record", "refuse"]

# rule, weights, what the rule needs saved, its version then, the rule's other facts, gradients of
# the result. A plain tuple: one is made per operation and microbatch, on the hot path.
Record: TypeAlias = tuple[GradRule, tuple[Weight, ...], Tensor | None, int, Any, Any]

# A node of the graph, and which of its results.
GraphPlace: TypeAlias = tuple[Node | None, int]


def place_of(tensor: Tensor) -> GraphPlace:
    """Where a tensor leaves the graph; another place once it was changed in place."""
    return tensor.grad_fn, tensor.output_nr


class CannotDeferError(StageError):
    """The module's forward does what deferral by operation can't give right gradients for."""


def refuse(what: str) -> NoReturn:
    """Raise what is raised where a stage needs the graph from its results to its parameters."""
    raise CannotDeferError(
        f"the module or its loss calls {what}, which needs the graph that leads to the "
        "parameters, and weight gradients put off by operation have none; pass "
        "defers_weights=False to this PipelineStage, or set it (pipe.stages[i].defers_weights = "
        "False), or use a schedule with full backwards"
    )


class Ledger:
    """The records of one microbatch, and the tensors known to be weights during its forward.

    Args:
        excluded: ids of parameters to leave to autograd.
    """

    __slots__ = ("excluded", "expressions", "places", "proxies", "recalls", "records")

    def __init__(self, excluded: frozenset[int] = frozenset()) -> None:
        self.excluded = excluded
        self.records: list[Record | None] = []
        # id → (the tensor, kept so that its id stays its own; what it is)
        self.expressions: dict[int, tuple[Tensor, Expression]] = {}
        self.proxies: dict[int, tuple[Weight, Tensor]] = {}
        # The same by where they leave the graph, which is asked once the forward is over.
        self.places: dict[GraphPlace, Expression] = {}
        self.recalls = False

    def weight(self, value: object) -> Weight | None:
        """``value`` as a weight whose gradient can be put off, or None if it is none."""
        if type(value) is Parameter:
            deferrable = value.requires_grad and id(value) not in self.excluded
            return value if deferrable else None
        return self.derived(value)

    def derived(self, value: object) -> Weight | None:
        """``value`` likewise where it is no ``Parameter`` itself."""
        if self.expressions:
            known = self.expressions.get(id(value))
            if known is not None:
                return known[1]
        if self.recalls and type(value) is Tensor and saved_tensor_hooks_active():
            return self.recall(value) if value.requires_grad else None
        return None

    def recall(self, value: Tensor) -> Weight | None:
        """``value`` as the weight that it was in the forward, where regions are recomputed.

        What a checkpoint was given as arguments it has saved, and gets other tensors back, at the
        same place of the graph. Taken for another thing than in the forward, an operation would
        save other tensors, and the checkpoint hand these to the forward's backward.
        """
        if value.grad_fn is not None:
            return self.places.get(place_of(value))
        if not deferrable_now():
            return None
        owner = getattr(get_gradient_edge(value).node, "variable", None)
        return self.weight(owner) if type(owner) is Parameter else None

    def end_forward(self) -> None:
        """From now on know derived weights by their places in the graph.

        By identity they are known while nobody else can be given it: within one forward.
        """
        self.recalls = True
        self.expressions.clear()

    def express(self, result: object, sources: Iterable[Weight]) -> None:
        """Remember the tensors in ``result``, computed from ``sources`` alone, as weights."""
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
            self.places[place_of(result)] = expression

    def forget_changed(self) -> None:
        """Know as weights no longer what was changed in place, itself or through a view."""
        self.expressions = {
            key: known
            for key, known in self.expressions.items()
            if self.places.get(place_of(known[0])) is known[1]
        }

    def tap(
        self,
        result: Tensor,
        rule: GradRule,
        weights: tuple[Weight, ...],
        saved: Tensor,
        extra: Any = None,
    ) -> Tensor:
        """Leave the gradients of ``weights`` to W, and return ``result`` as the operation's own.

        Args:
            result: what the operation returned, given its weights detached.
            rule: how the gradients follow from the other arguments.
            weights: the weights that took part.
            saved: the tensor that the rule needs; checked for changes before it is used.
            extra: whatever else the rule needs.

        Returns:
            ``result``, or a tensor with its data where its gradient needs a node of its own.
        """
        if result.requires_grad and not result._is_view() and not saved_tensor_hooks_active():
            grads: list[Any] = []
            observe_grad(result, grads.append)
            kept = saved.detach()  # shares data and version, holds no graph
            self.records.append((rule, weights, kept, kept._version, extra, grads))
            return result
        # A node of our own, where there is nothing to hook on: inputs that need no gradient, or a
        # view, whose node is bypassed after operations in place; and where saved tensors pass
        # through hooks (checkpointing), as x has to.
        self.records.append(None)
        place = (self, len(self.records) - 1, rule, weights, extra)
        tapped: Tensor = Tap.apply(ANCHOR, result, saved.detach(), place)  # type: ignore[no-untyped-call]
        return tapped

    def proxy(self, weight: Weight, tensor: Tensor) -> Tensor:
        """A leaf in place of ``tensor`` that gets the gradient in I, to be delivered in W."""
        known = self.proxies.get(id(weight))
        if known is not None and known[1].data_ptr() == tensor.data_ptr():
            return known[1]
        proxy = tensor.detach().requires_grad_()
        self.proxies[id(weight)] = (weight, proxy)
        self.records.append((proxy_grads, (weight,), None, 0, None, Proxied(proxy)))
        return proxy

    def take(self) -> list[Record]:
        """All records that a gradient has reached; the ledger is empty."""
        records = [record for record in self.records if record and record[5]]
        self.records = []
        self.proxies.clear()
        self.expressions.clear()
        self.places.clear()
        self.recalls = False
        return records

    def forget_strays(self) -> None:
        """Drop gradients that came by before I: somebody differentiated between F and I.

        Raises:
            CannotDeferError: with ``create_graph=True``; what that adds to weights is not noted.
        """
        for record in self.records:
            if record and record[5] and not isinstance(record[5], Proxied):
                if any(grad is not None and grad.requires_grad for grad in record[5]):
                    refuse("autograd.grad(create_graph=True) on the outputs")
                record[5].clear()

    def unobserved(self, call: Callable[[], Any]) -> Any:
        """Run ``call``, a differentiation inside the forward, as if no record saw it."""
        before = [(record, len(record[5]) if record else 0) for record in self.records]
        result = call()
        self.records = [record for record, _ in before]
        for record, length in before:
            if record and not isinstance(record[5], Proxied):
                del record[5][length:]
        return result


class Proxied:
    """The gradient of a proxy, read when W comes in place of a list of gradients."""

    __slots__ = ("proxy",)

    def __init__(self, proxy: Tensor) -> None:
        self.proxy = proxy

    def __len__(self) -> int:
        return 0 if self.proxy.grad is None else 1

    def __iter__(self) -> Iterator[Tensor | None]:
        yield self.proxy.grad


# Makes the result of Tap need a gradient; gets none.
ANCHOR = torch.empty(0, requires_grad=True, device="cpu")


class Tap(torch.autograd.Function):
    """The identity, whose backward makes the record of an operation."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: Tensor, result: Tensor, saved: Tensor, place: Any
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.place = place  # type: ignore[attr-defined]
        # The result itself would come back as a view, which refuses later in-place operations.
        # Nobody else holds it, so nobody can miss its version counter.
        return result.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        ledger, index, rule, weights, extra = ctx.place
        (saved,) = ctx.saved_tensors
        known = ledger.records[index]
        if known is None:
            ledger.records[index] = (rule, weights, saved, saved._version, extra, [grad])
        else:
            known[5].append(grad)
        return None, grad if ctx.needs_input_grad[1] else None, None, None
