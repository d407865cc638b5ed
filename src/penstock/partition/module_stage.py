"""ModuleStage: one stage of a model that was cut by module, as a module.

    stage 0   forward(ids, labels)        the model's arguments
              ──► plan, values            what crosses; the plan says which value is which
    stage 1   forward(plan, values)       the model's own forward, with its own parts
              ──► the model's output

A stage runs the model's forward up to its own last part. It knows neither schedules nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.absent import Absent, Kind, Origin, Source, named, sources_of
from penstock.partition.crossings import Call, Crossings
from penstock.partition.dry_run import input_names
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.shell import build_shell, own_tree
from penstock.partition.units import Units
from penstock.stage.tensor_meta import TensorMeta
from penstock.stage.trees import flatten

__all__ = ["ModuleStage", "FindCrossings"]

FindCrossings = Callable[[tuple[Any, ...], Mapping[str, Any], bool], Crossings]


class Left(BaseException):  # no error: the stage's own parts have run
    """Leaves the model's forward; not an Exception, so that no model catches it."""


class ModuleStage(nn.Module):
    """One stage of a model, under the plain model's names.

    Args:
        model: the plain model; its modules and parameters become the stage's.
        parts: its units.
        own: the names of the units, and of parameters by themselves, that this stage holds.
        index: which stage it is.
        num_stages: of how many.
        find: finds out what crosses, for inputs of a new shape.
        device: where it will live.
    """

    _player: StagePlayer
    _shell: nn.Module
    _opened: list[tuple[nn.Module, nn.Module]]

    def __init__(
        self,
        model: nn.Module,
        parts: Units,
        own: frozenset[str],
        index: int,
        num_stages: int,
        find: FindCrossings,
        device: torch.device,
    ) -> None:
        super().__init__()
        tree = own_tree(model, parts, own)
        for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, registry, vars(tree)[registry])
        self.training = model.training
        # Not registered: the shell has modules that this stage does not hold.
        player = StagePlayer(index, device)
        shell = build_shell(model, parts, own, player, device)
        held = {name: module for name, module in self.named_modules() if name in parts.opened}
        object.__setattr__(self, "_player", player)
        object.__setattr__(self, "_shell", shell)
        object.__setattr__(
            self,
            "_opened",
            [(shell.get_submodule(name), held.get(name, self)) for name in parts.opened],
        )
        self._own_direct = tuple(name for name in parts.direct if name in own)
        self._index = index
        self._is_last = index == num_stages - 1
        self._find = find
        # What is known of inputs met so far: on the first stage by shape, elsewhere as it arrives.
        self._entries: dict[Any, tuple[bytes, Crossings, list[tuple[Source, int]]]] = {}
        self._plans: dict[bytes, Crossings] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage.

        Args:
            args: the model's arguments on the first stage, else what the stage before returned.
            kwargs: the model's keyword arguments; later stages have them from the one before.

        Returns:
            On the last stage what the model returns, else what the next stage takes.

        Raises:
            PartitionError: the model does something else than in its dry run.
        """
        if self._index == 0:
            data, plan, values = self._enter(args, kwargs)
        else:
            data, tensors = args
            plan = self._decoded(data)
            values = dict(zip(plan.carried[self._index - 1], tensors, strict=True))
        args, kwargs = self._inputs(plan, values)
        output = self._play(plan, values, args, kwargs)
        if self._is_last:
            missing = sources_of(flatten(output)[0])
            if missing:
                raise PartitionError(
                    f"the model's output needs {named(missing)}, which its dry run did not show "
                    "and which is not here; does what it computes depend on values?"
                )
            return output
        return data, tuple(self._carry(source, values) for source in plan.carried[self._index])

    # --- what is known of the inputs ---------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Crossings) -> None:
        """Note what crosses for inputs of these shapes.

        Args:
            args: the model's positional arguments.
            kwargs: its keyword arguments.
            plan: what a dry run has shown.
        """
        names = input_names(args, kwargs)
        leaves, _ = flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        sources = [(Source(Kind.INPUT, 0, i, names[i]), i) for i in tensors]
        self._entries[self._key(args, kwargs)] = (plan.encode(), plan, sources)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        leaves, tree = flatten((args, kwargs))
        marks = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in leaves
        ]
        return (tree, self.training, *marks)

    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bytes, Crossings, dict[Source, Tensor]]:
        """What is known of inputs like these, and their tensors by name."""
        key = self._key(args, kwargs)
        if key not in self._entries:
            self.prepare(args, kwargs, self._find(args, kwargs, self.training))
        data, plan, sources = self._entries[key]
        leaves, _ = flatten((args, kwargs))
        return data, plan, {source: leaves[i] for source, i in sources}

    def _decoded(self, data: bytes) -> Crossings:
        found = self._plans.get(data)
        if found is None:
            found = self._plans[data] = Crossings.decode(data)
        return found

    def _inputs(self, plan: Crossings, values: dict[Source, Tensor]) -> Any:
        here = {s.leaf: value for s, value in values.items() if s.kind is Kind.INPUT}
        leaves: list[Any] = list(plan.inputs.leaves)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, TensorMeta):
                continue
            if i in here:
                leaves[i] = here[i].clone() if i in plan.written else here[i]
            else:
                source = Source(Kind.INPUT, 0, i, f"number {i}")
                leaves[i] = absent(leaf, self._player.device, source)
        ((args, kwargs),) = rebuilt(plan.inputs.tree, leaves)
        return args, kwargs

    # --- running -----------------------------------------------------------------------------

    def _play(self, plan: Crossings, values: dict[Source, Tensor], args: Any, kwargs: Any) -> Any:
        for shell, held in self._opened:
            shell.training = held.training
        for name in self._own_direct:
            registry, last = _registry(self, name)
            _registry(self._shell, name)[0][last] = registry[last]
        player = self._player
        lent = self._lend(values)
        player.begin(plan, values, self._is_last)
        try:
            output = self._shell(*args, **kwargs)
        except Left:
            output = None
        finally:
            player.end()
            for registry, name, hollow in lent:
                registry[name] = hollow
        player.check_done(plan)
        return output

    def _lend(self, values: dict[Source, Tensor]) -> list[tuple[Any, str, Any]]:
        """Put parameters that come from other stages in their places, for one microbatch."""
        lent = []
        for source, value in values.items():
            if source.kind is Kind.PARAMETER:
                registry, name = _registry(self._shell, source.name)
                lent.append((registry, name, registry[name]))
                registry[name] = value
        return lent

    def _carry(self, source: Source, values: dict[Source, Tensor]) -> Tensor:
        if source.kind is Kind.PARAMETER and source not in values:
            registry, name = _registry(self._shell, source.name)
            own: Tensor = registry[name]
            return own.view_as(own) if torch.is_grad_enabled() else own.detach()
        return values[source]


def _registry(module: nn.Module, name: str) -> tuple[Any, str]:
    """Where a module keeps a parameter or buffer, and its last name there."""
    path, _, last = name.rpartition(".")
    holder = module.get_submodule(path)
    return (holder._parameters if last in holder._parameters else holder._buffers), last


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


class StagePlayer:
    """Runs a stage's own units, and says what stands for the others' results (see ``Play``).

    Args:
        index: the stage.
        device: where absent values claim to be.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.device = device
        self._plan: Crossings | None = None
        self._values: dict[Source, Tensor] = {}
        self._versions: dict[Source, int] = {}
        self._next = self._end = 0

    def begin(self, plan: Crossings, values: dict[Source, Tensor], to_the_end: bool) -> None:
        """A microbatch begins; ``values`` are those that are here, and are added to."""
        self._plan = plan
        self._values = values
        self._next = 0
        self._end = len(plan.calls) if to_the_end else plan.last_call(self.index) + 1
        carried = () if to_the_end else plan.carried[self.index]
        self._wanted = {(s.call, s.leaf): s for s in carried if s.kind is Kind.OUTPUT}
        self._versions = {s: value._version for s, value in values.items()}
        self._has_grad = torch.is_grad_enabled()

    def end(self) -> None:
        """It is through, or has failed."""
        self._plan = None
        self._checked, self._versions = self._versions, {}

    def check_done(self, plan: Crossings) -> None:
        """Have all own units run, and is what crosses as it was computed?

        Raises:
            PartitionError: no.
        """
        if self._next < self._end:
            raise PartitionError(
                f"stage {self.index} did not call {plan.calls[self._next].unit}, which it called "
                "in its dry run; which parts a model calls may not depend on values"
            )
        for source, version in self._checked.items():
            if self._values[source]._version != version:
                raise PartitionError(
                    f"stage {self.index}: {source} crosses to other stages, but was written into "
                    "after it was computed; compute a new tensor instead"
                )

    def call(self, unit: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a unit."""
        plan = self._plan
        if plan is None:  # computed again in the backward, by checkpointing
            return run(*args, **kwargs)
        index = self._next
        if index >= self._end and self._end < len(plan.calls):
            raise Left
        call = plan.calls[index] if index < len(plan.calls) else None
        if call is None or call.unit != unit:
            raise PartitionError(
                f"stage {self.index} calls {unit} where its dry run called "
                f"{'nothing more' if call is None else call.unit}; which parts a model calls may "
                "not depend on values"
            )
        self._next = index + 1
        if call.stage != self.index:
            return self._stand_in(index, call)
        missing = sources_of(flatten((args, kwargs))[0])
        if missing:
            raise PartitionError(
                f"stage {self.index}: {unit} is called with {named(missing)}, which its dry run "
                "did not show and which is not here; does what it is given depend on values?"
            )
        marked = mark()
        result = run(*args, **kwargs)
        if self._has_grad and not torch.is_grad_enabled() and self._crosses(index):
            given = [*run.parameters(), *flatten((args, kwargs))[0]]
            takes_grad = any(isinstance(x, Tensor) and x.requires_grad for x in given)
            self._refuse_cut_off(takes_grad, unit)
        return self._note(index, call, result, marked)

    def _crosses(self, index: int) -> bool:
        return any(call == index for call, _ in self._wanted)

    def _refuse_cut_off(self, matters: bool, unit: str) -> None:
        if matters and self._has_grad and not torch.is_grad_enabled():
            raise PartitionError(
                f"{unit} is called without gradients (in a checkpoint with use_reentrant=True, or "
                "under no_grad), but what it returns crosses to another stage: its gradient would "
                "be lost; use use_reentrant=False, freeze its parameters, or cut elsewhere"
            )

    def _stand_in(self, index: int, call: Call) -> Any:
        leaves: list[Any] = list(call.output.leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, TensorMeta):
                source = Source(Kind.OUTPUT, index, i, call.unit)
                value = self._values.get(source)
                if value is None:
                    leaves[i] = absent(leaf, self.device, source)
                else:
                    self._refuse_cut_off(value.requires_grad, call.unit)
                    leaves[i] = value.clone() if i in call.written else value
        ((result, captured),) = rebuilt(call.output.tree, leaves)
        replay(captured)
        return result

    def _note(self, index: int, call: Call, result: Any, marked: Mapping[str, int] | None) -> Any:
        output = ((result, capture_since(marked)),)
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
                raise self._differs(call, i, tuple(leaf.shape), expected)
            source = self._wanted.get((index, i))
            if source is not None:
                self._values[source] = leaf
                self._versions[source] = leaf._version
                if i in call.written:
                    leaves[i] = leaf.clone()
                    changed = True
        if not changed:
            return result
        ((result, _),) = rebuilt(tree, leaves)
        return result

    def _differs(self, call: Call, leaf: int, got: Any, expected: Any) -> PartitionError:
        return PartitionError(
            f"stage {self.index}: output {leaf} of {call.unit} is {got}, in its dry run "
            f"{expected}; other stages run by what the dry run showed"
        )
