"""StagePlayer: what happens on one stage when the model calls its parts.

    its own part      runs, and what crosses of its result is kept
    another stage's   gives what came from there, or an absent tensor
    after its last    the forward is left: nothing more is needed here

It holds no modules and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.absent import Absent, Kind, Origin, Source, named, sources_of
from penstock.partition.crossings import Call, Crossings
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.side_writes import Attributes, kept_in, put
from penstock.stage.generators import random_state, set_random_state
from penstock.stage.tensor_meta import TensorMeta
from penstock.stage.trees import flatten

__all__ = ["Left", "StagePlayer", "absent"]


class Left(BaseException):  # no error: the stage's own parts have run
    """Leaves the model's forward; not an Exception, so that no model catches it."""


class Route:
    """What one stage has to know of a plan, worked out once.

    Args:
        plan: the plan.
        index: the stage.
        device: where absent values claim to be.

    Attributes:
        end: the number of calls that it needs.
        wanted: what it hands on of which leaf of which call.
        crossing: the calls that it hands something on of.
        again: the calls up to which earlier stages run the code between the parts too.
        seen: its own calls that have run before.
    """

    def __init__(self, plan: Crossings, index: int, device: torch.device) -> None:
        is_last = index == len(plan.carried)
        self.plan = plan
        self.end = len(plan.calls) if is_last else plan.last_call(index) + 1
        carried = () if is_last else plan.carried[index]
        self.wanted = {(s.call, s.leaf): s for s in carried if s.kind is Kind.OUTPUT}
        # Until there, the code between the parts has run on earlier stages too.
        self.again = max((plan.last_call(i) + 1 for i in range(index)), default=-1)
        self.crossing = {call for call, _ in self.wanted}
        self._device = device
        self.seen: set[int] = set()
        self._kept: dict[int, tuple[str, ...]] = {}
        self._hollow: dict[tuple[int, bool], tuple[list[Any], list[tuple[int, Source]]]] = {}

    def kept(self, index: int) -> tuple[str, ...]:
        """The attributes that a call's module keeps tensors in."""
        if index not in self._kept:
            output = self.plan.calls[index].output
            ((_, _, kept),) = rebuilt(output.tree, list(output.leaves))
            self._kept[index] = tuple(kept)
        return self._kept[index]

    def hollow(self, index: int) -> tuple[list[Any], list[tuple[int, Source]]]:
        """The leaves that stand for a call's result, and which of them are absent tensors.

        They are made once: the dry run has shown whether anybody writes into them.
        """
        key = (index, torch.is_grad_enabled())
        if key not in self._hollow:
            call = self.plan.calls[index]
            leaves: list[Any] = list(call.output.leaves)
            sources = []
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, TensorMeta):
                    source = Source(Kind.OUTPUT, index, i, call.unit)
                    leaves[i] = absent(leaf, self._device, source)
                    sources.append((i, source))
            if call.written:
                return leaves, sources
            self._hollow[key] = (leaves, sources)
        leaves, sources = self._hollow[key]
        return list(leaves), sources


class StagePlayer:
    """Runs a stage's own units, and says what stands for the others' results (see ``Play``).

    Args:
        index: the stage.
        device: where absent values claim to be.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self._routes: dict[int, Route] = {}
        self._route: Route | None = None
        self._values: dict[Source, Tensor] = {}
        self._versions: dict[Source, int] = {}
        self._next = 0
        self._has_grad = False
        self._inside = False
        # What the code between the parts draws again, shall not move the generator on.
        self._random: Tensor | None = None

    def begin(self, plan: Crossings, values: dict[Source, Tensor]) -> None:
        """A microbatch begins.

        Args:
            plan: what is known of it; kept by the caller.
            values: those that are here; what is handed on of the stage's own is added.
        """
        route = self._routes.get(id(plan))
        if route is None or route.plan is not plan:
            route = self._routes[id(plan)] = Route(plan, self.index, self.device)
        self._route = route
        self._values = values
        self._next = 0
        self._versions = {s: value._version for s, value in values.items()}
        self._has_grad = torch.is_grad_enabled()
        self._random = random_state(self.device) if plan.draws else None

    def end(self) -> None:
        """It is through, or has failed: let go of it."""
        self._route = None
        self._values, self._versions = {}, {}

    def check_done(self) -> None:
        """Have all own units run, and is what crosses as it was computed?

        Raises:
            PartitionError: no.
        """
        assert self._route is not None
        if self._next < self._route.end:
            raise PartitionError(
                f"stage {self.index} did not call {self._route.plan.calls[self._next].unit}, which "
                "it called in its dry run; which parts a model calls may not depend on values"
            )
        for source, version in self._versions.items():
            if self._values[source]._version != version:
                raise PartitionError(
                    f"stage {self.index}: {source} crosses to other stages, but was written into "
                    "after it was computed; compute a new tensor instead"
                )

    def call(self, unit: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a unit."""
        route = self._route
        if route is None:  # computed again in the backward, by checkpointing
            return run(*args, **kwargs)
        result = self._called(route, unit, run, args, kwargs)
        if self._random is not None:
            if self._next == route.again:  # from here on, this code runs for the first time
                set_random_state(self.device, self._random)
            if self._next == route.end:  # and from here on, again on the next stage
                self._random = random_state(self.device)
        return result

    def _called(
        self,
        route: Route,
        unit: str,
        run: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        index, calls = self._next, route.plan.calls
        if index >= route.end and route.end < len(calls):
            if self._random is not None:
                set_random_state(self.device, self._random)
            raise Left
        call = calls[index] if index < len(calls) else None
        if call is None or call.unit != unit:
            raise PartitionError(
                f"stage {self.index} calls {unit} where its dry run called "
                f"{'nothing more' if call is None else call.unit}; which parts a model calls may "
                "not depend on values"
            )
        self._next = index + 1
        if call.stage != self.index:
            return self._stand_in(route, index, call, run)
        given = flatten((args, kwargs))[0]
        missing = sources_of(given)
        if missing:
            raise PartitionError(
                f"stage {self.index}: {unit} is called with {named(missing)}, which its dry run "
                "did not show and which is not here; does what it is given depend on values?"
            )
        marked = mark()
        # What the dry run could not see, since it depends on values, is looked for once.
        before = None if index in route.seen else Attributes(run)
        versions = [(i, x, x._version) for i, x in enumerate(given) if isinstance(x, Tensor)]
        self._inside = True
        try:
            result = run(*args, **kwargs)
        finally:
            self._inside = False
        for i, tensor, version in versions:
            if tensor._version != version and i not in call.writes:
                raise PartitionError(
                    f"stage {self.index}: {unit} writes into argument {i}, which it did not in "
                    "its dry run; have it return a new tensor instead"
                )
        if before is not None:
            self._refuse_unseen(unit, before, route.kept(index))
            route.seen.add(index)
        if self._has_grad and not torch.is_grad_enabled() and index in route.crossing:
            takers = [*run.parameters(), *given]
            takes_grad = any(isinstance(x, Tensor) and x.requires_grad for x in takers)
            self._refuse_cut_off(takes_grad, unit)
        return self._note(route, index, call, run, result, marked)

    def refuse_hook(self, tensor: Tensor) -> None:
        """A tensor gets a hook: may it have one here?

        Raises:
            PartitionError: an earlier stage ran this code, and the hook would act twice.
        """
        route = self._route
        if route is None or self._inside or self._next > route.again:
            return
        raise PartitionError(
            f"stage {self.index}: the code between the model's parts registers a hook on a tensor "
            "that earlier stages have too, so that it would act on each; register it within a "
            "module, use an autograd.Function, or cut elsewhere"
        )

    def _refuse_unseen(self, unit: str, before: Attributes, kept: tuple[str, ...]) -> None:
        unseen = [name for name in before.changed() if name not in kept]
        if unseen:
            raise PartitionError(
                f"stage {self.index}: {unit} keeps tensors in its attribute {unseen[0]}, which it "
                "did not in its dry run; other stages would not see them; have it return them"
            )

    def _refuse_cut_off(self, matters: bool, unit: str) -> None:
        if matters and self._has_grad and not torch.is_grad_enabled():
            raise PartitionError(
                f"{unit} is called without gradients (in a checkpoint with use_reentrant=True, or "
                "under no_grad), but what it returns crosses to another stage: its gradient would "
                "be lost; use use_reentrant=False, freeze its parameters, or cut elsewhere"
            )

    def _stand_in(self, route: Route, index: int, call: Call, run: nn.Module) -> Any:
        leaves, sources = route.hollow(index)
        for i, source in sources:
            value = self._values.get(source)
            if value is not None:
                self._refuse_cut_off(value.requires_grad, call.unit)
                leaves[i] = value.clone() if i in call.written else value
        ((result, captured, kept),) = rebuilt(call.output.tree, leaves)
        replay(captured)
        put(run, kept)
        return result

    def _note(
        self,
        route: Route,
        index: int,
        call: Call,
        run: nn.Module,
        result: Any,
        marked: Mapping[str, int] | None,
    ) -> Any:
        output = ((result, capture_since(marked), kept_in(run, route.kept(index))),)
        leaves, tree = flatten(output)
        if tree != call.output.tree:
            raise PartitionError(
                f"stage {self.index}: {call.unit} returned {tree}, in its dry run "
                f"{call.output.tree}; what it returns may not depend on values"
            )
        changed = False
        for i, (leaf, expected) in enumerate(zip(leaves, call.output.leaves, strict=True)):
            if not isinstance(expected, TensorMeta) or not isinstance(leaf, Tensor):
                if isinstance(leaf, Tensor) or leaf != expected:
                    raise self._differs(call, i, leaf, expected)
                continue
            if leaf.shape != expected.shape or leaf.dtype is not expected.dtype:
                raise self._differs(call, i, TensorMeta.of(leaf), expected)
            source = route.wanted.get((index, i))
            if source is not None:
                self._values[source] = leaf
                self._versions[source] = leaf._version
                if i in call.written:
                    leaves[i] = leaf.clone()
                    changed = True
        if not changed:
            return result
        ((result, _, kept),) = rebuilt(tree, leaves)
        put(run, kept)
        return result

    def _differs(self, call: Call, leaf: int, got: Any, expected: Any) -> PartitionError:
        return PartitionError(
            f"stage {self.index}: output {leaf} of {call.unit} is {got}, in its dry run "
            f"{expected}; other stages run by what the dry run showed"
        )


def rebuilt(tree: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    """A tree of these leaves."""
    return optree.tree_unflatten(tree, leaves)


def absent(meta: TensorMeta, device: torch.device, source: Source) -> Absent:
    """What stands for a tensor that ``meta`` describes."""
    inner = torch.empty(meta.wire_shape, dtype=meta.dtype, device="meta")
    body = meta.unpack(inner)
    if not (meta.dtype.is_floating_point and torch.is_grad_enabled()):
        return Absent(body, device, Origin({source}))
    made: Absent = _Guarded.apply(_anchor, body, device, source)  # type: ignore[no-untyped-call]
    return made


# Requires a gradient, so that what is made from it does.
_anchor = torch.zeros(0, requires_grad=True)


class _Guarded(torch.autograd.Function):
    """Makes absent tensors that no gradient may reach: their real ones would not get it.

    Nothing that is here is computed from them. But an autograd function of the model's own may
    take one, leave its value alone, and have a gradient for it.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, body: Tensor, device: torch.device, source: Source
    ) -> Absent:
        ctx.source = source
        return Absent(body, device, Origin({source}))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise PartitionError(
            f"a gradient is computed for {ctx.source} on a stage that does not have it: an "
            "autograd function between the model's parts takes it without using its value; move "
            "that into a module"
        )
