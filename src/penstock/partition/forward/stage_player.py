"""StagePlayer: what happens on one stage when the model calls its parts.

    its own part      runs, and what crosses of its result is kept
    another stage's   gives what came from there, or an absent tensor
    after its last    the forward is left: nothing more is needed here

It holds no modules and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from optree import PyTreeSpec
from torch import Tensor, nn

from penstock._torch_compat import in_function_forward
from penstock.errors import PartitionError
from penstock.partition.forward.absent import Source, named, sources_of
from penstock.partition.forward.attributes import Glance, kept_in, put
from penstock.partition.forward.crossings import Crossings, PlacedCall
from penstock.partition.forward.host_draws import HostStream
from penstock.partition.forward.route import Route
from penstock.partition.forward.shell import is_hollow
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.rng import random_state, set_random_state
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["Left", "StagePlayer"]


class Left(BaseException):  # no error: the stage's own parts have run
    """Leaves the model's forward; not an Exception, so that no model catches it."""


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
        self._glances: dict[int, Glance] = {}
        self._route: Route | None = None
        self._values: dict[Source, Tensor] = {}
        self._versions: dict[Source, int] = {}
        self._next = 0
        self._has_grad = False
        self._inside = False
        # What the code between the parts draws again, shall not move the generator on.
        self._random: Tensor | None = None
        self._host: HostStream | None = None

    def begin(
        self, plan: Crossings, values: dict[Source, Tensor], seeds: Sequence[int] = ()
    ) -> None:
        """A microbatch begins.

        Args:
            plan: what is known of it; kept by the caller.
            values: those that are here; what is handed on of the stage's own is added.
            seeds: of what the code between the parts draws from the host's generators.
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
        self._host = HostStream(plan.host_draws, seeds) if plan.host_draws else None

    def end(self) -> None:
        """It is through, or has failed: let go of it."""
        if self._host is not None:
            self._host.leave()
            self._host = None
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
            self._refuse_hollow(unit, run)
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
        index = self._next
        call = self._expected(route, unit)
        self._next = index + 1
        if call.stage != self.index:
            return self._stand_in(route, index, call, run)
        given = flatten((args, kwargs))[0]
        self._refuse_missing(unit, given)
        marked = mark()
        glance = self._glance(run)
        before = glance.look()
        result = self._run(call, run, args, kwargs, given)
        self._refuse_unseen(unit, glance.fresh(before), route.kept(index))
        if self._has_grad and not torch.is_grad_enabled() and index in route.crossing:
            takers = [*run.parameters(), *given]
            takes_grad = any(isinstance(x, Tensor) and x.requires_grad for x in takers)
            self._refuse_cut_off(takes_grad, unit)
        return self._note(route, index, call, run, result, marked)

    def _expected(self, route: Route, unit: str) -> PlacedCall:
        """What the dry run called now.

        Raises:
            Left: nothing that this stage has to do with.
            PartitionError: another unit.
        """
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
        return call

    def _refuse_missing(self, unit: str, given: Sequence[Any]) -> None:
        missing = sources_of(given)
        if missing:
            raise PartitionError(
                f"stage {self.index}: {unit} is called with {named(missing)}, which its dry run "
                "did not show and which is not here; does what it is given depend on values?"
            )

    def forget(self, unit: nn.Module) -> None:
        """A unit will not be called again."""
        self._glances.pop(id(unit), None)

    def _refuse_hollow(self, unit: str, run: nn.Module) -> None:
        if is_hollow(run):
            raise PartitionError(
                f"stage {self.index}: {unit}, which lies on another stage, is called again in the "
                "backward, as by a checkpoint around parts of several stages; checkpoint each part "
                "by itself, or cut where a checkpoint begins"
            )

    def _glance(self, run: nn.Module) -> Glance:
        """What looks at a unit's attributes: what it sets now may depend on values."""
        if id(run) not in self._glances:
            self._glances[id(run)] = Glance(run)
        return self._glances[id(run)]

    def _run(
        self,
        call: PlacedCall,
        run: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Any],
    ) -> Any:
        versions = [(i, x, x._version) for i, x in enumerate(given) if isinstance(x, Tensor)]
        self._inside = True
        try:
            with self._host.paused() if self._host is not None else nullcontext():
                result = run(*args, **kwargs)
        finally:
            self._inside = False
        for i, tensor, version in versions:
            if tensor._version != version and i not in call.writes:
                raise PartitionError(
                    f"stage {self.index}: {call.unit} writes into argument {i}, which it did not "
                    "in its dry run; have it return a new tensor instead"
                )
        return result

    def refuse_hook(self, what: str) -> None:
        """A tensor gets a hook, or shows its place in the graph: may that be here?

        Raises:
            PartitionError: an earlier stage ran this code, and a hook would act twice.
        """
        route = self._route
        if route is None or self._inside or self._next > route.again:
            return
        raise PartitionError(
            f"stage {self.index}: the code between the model's parts {what}, which earlier stages "
            "do too, so that a hook would act on each; do it within a module, use an "
            "autograd.Function, or cut elsewhere"
        )

    def _refuse_unseen(self, unit: str, fresh: Sequence[str], kept: tuple[str, ...]) -> None:
        unseen = [name for name in fresh if name not in kept]
        if unseen:
            raise PartitionError(
                f"stage {self.index}: {unit} keeps tensors in its attribute {unseen[0]}, which it "
                "did not in its dry run; other stages would not see them; have it return them"
            )

    def _refuse_cut_off(self, matters: bool, unit: str) -> None:
        """Without gradients by the model's own wish (no_grad) is right, there are none then."""
        if matters and self._has_grad and not torch.is_grad_enabled() and in_function_forward():
            raise PartitionError(
                f"{unit} is called within an autograd function, as by a checkpoint with "
                "use_reentrant=True, but what it returns crosses to another stage: its gradient "
                "would be lost; use use_reentrant=False, freeze its parameters, or cut elsewhere"
            )

    def _stand_in(self, route: Route, index: int, call: PlacedCall, run: nn.Module) -> Any:
        leaves, sources = route.hollow(index)
        for i, source in sources:
            value = self._values.get(source)
            if value is not None:
                self._refuse_cut_off(value.requires_grad, call.unit)
                leaves[i] = value.clone() if i in call.written else value
        ((result, captured, kept),) = unflatten(call.output.tree, leaves)
        replay(captured)
        put(run, kept)
        return result

    def _note(
        self,
        route: Route,
        index: int,
        call: PlacedCall,
        run: nn.Module,
        result: Any,
        marked: Mapping[str, int] | None,
    ) -> Any:
        output = ((result, capture_since(marked), kept_in(run, route.kept(index))),)
        leaves, tree = flatten(output)
        if tree != call.output.tree:
            dry = _shown(call.output.tree, call.output.leaves)
            raise PartitionError(
                f"stage {self.index}: {call.unit} returned {_shown(tree, leaves)}, in its dry run "
                f"{dry}; how many values it returns, and in which containers, may not depend on "
                "values; have it return the same always, or keep it and its users in one stage"
            )
        changed = False
        for i, (leaf, expected) in enumerate(zip(leaves, call.output.leaves, strict=True)):
            if not isinstance(expected, TensorMeta) or not isinstance(leaf, Tensor):
                if isinstance(leaf, Tensor) or leaf != expected:
                    raise self._differs(call, i, leaf, expected)
                continue
            same_shape = leaf.shape == expected.shape or index >= route.alone
            if not same_shape or leaf.dtype is not expected.dtype:
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
        ((result, _, kept),) = unflatten(tree, leaves)
        put(run, kept)
        return result

    def _differs(self, call: PlacedCall, leaf: int, got: Any, expected: Any) -> PartitionError:
        return PartitionError(
            f"stage {self.index}: output {leaf} of {call.unit} is {got}, in its dry run "
            f"{expected}; other stages run by what the dry run showed"
        )


def _shown(tree: PyTreeSpec, leaves: Sequence[Any]) -> str:
    """A unit's result, as a message shows it; with what it appends or keeps, where it does."""
    ((result, captured, kept),) = unflatten(tree, [_Shown(leaf) for leaf in leaves])
    beside = [f"appending {captured}"] if captured else []
    beside += [f"keeping {kept}"] if kept else []
    return ", ".join([repr(result), *beside])


class _Shown:
    """A leaf that a message shows by its dtype and shape, or by its value."""

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __repr__(self) -> str:
        """What is shown."""
        leaf = self._leaf
        if not isinstance(leaf, Tensor | TensorMeta):
            return repr(leaf)
        return f"{leaf.dtype} {tuple(leaf.shape)}".removeprefix("torch.")
