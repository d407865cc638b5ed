"""Run a model once without values, to see which parts it calls, and what each of them needs.

The model's own forward runs; its parts run on the meta device, where only shapes are computed, on
copies without values. A part that needs values (a mixture of experts that looks where its tokens
go) can't run so: then the whole model is run once on values, if it has any. Nothing of the model
changes, and no random number is drawn. This module does not know where the model is cut.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch_compat import in_function_forward, registries, watched_hooks
from penstock.errors import BoundaryError, PartitionError
from penstock.partition.forward.absent import (
    Absent,
    LooksAtValue,
    Origin,
    Source,
    SourceKind,
    draws,
    on_meta,
    sources_of,
    told_of_looks,
    turn_absent,
)
from penstock.partition.forward.attributes import Attributes, Stale, put
from penstock.partition.forward.given import Given
from penstock.partition.forward.glue_draws import GlueDraws
from penstock.partition.forward.host_draws import HostDraws
from penstock.partition.forward.recorded import DryRun, Recorded
from penstock.partition.forward.shell import build_shell
from penstock.partition.forward.side_writes import (
    State,
    hides_tensors,
    is_opaque,
    refuse_filled,
    tensors_in,
    told_of_object,
    told_replaced,
)
from penstock.partition.forward.unit_bodies import NeedsValues, UnitBodies, with_values
from penstock.partition.forward.units import Units
from penstock.partition.huggingface import capture_since, mark, replay
from penstock.partition.spec import own_loss
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.pytree import flatten, map_tensors, unflatten
from penstock.stage.rng import undrawn

__all__ = ["DryRunner", "input_names"]

logger = logging.getLogger(__name__)


class DryRunner:
    """Runs one model dry.

    Args:
        parts: the units of the plain model, on any device.
        device: where the stages will live.

    Attributes:
        captures: whether a model collected what its parts compute (see ``huggingface``).
    """

    def __init__(self, parts: Units, device: torch.device) -> None:
        self._shell = build_shell(parts, (), self, device)
        self._opened = {name: self._shell.get_submodule(name) for name in parts.opened}
        for module in self._opened.values():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):  # the model's own: nobody shall write into that
                    vars(module)[name] = value.detach().clone()
        # What the opened modules hold themselves, until it is known that no run needs its values.
        self._held = {
            (path, name): tensor
            for path, module in parts.opened.items()
            for registry in registries(module)
            for name, tensor in registry.items()
            if tensor is not None
        }
        self._bodies = UnitBodies(parts.units, device)
        self._where = device
        self._inside = False
        self._draws = GlueDraws()
        self._host_draws = HostDraws()
        self.captures = False
        # The attributes that units were seen to set, of the modules that stand for them, and those
        # that the code between replaced.
        self._set: dict[str, tuple[nn.Module, set[str]]] = {}
        self._replaced: set[str] = set()
        self._calls: list[Recorded] = []
        self._given = Given()
        # What the code between the units looked at, after so many calls; and what it said of that
        # when there were no values.
        self._looks: list[tuple[int, set[Source]]] = []
        self._looked: LooksAtValue | None = None

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> DryRun:
        """Run the model once.

        Args:
            args: its positional arguments, one microbatch.
            kwargs: its keyword arguments, likewise.
            training: in which mode.

        Raises:
            PartitionError: it can't be run so.
        """
        known = -1
        while known < self._num_set():  # attributes that are set, nobody may read before that
            known = self._num_set()
            seen = self._on_shapes_or_values(args, kwargs, training)
        return seen

    def _num_set(self) -> int:
        return sum(len(names) for _, names in self._set.values()) + len(self._replaced)

    def _on_shapes_or_values(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> DryRun:
        if self._bodies.on_values:
            return self._on_values(args, kwargs, training)
        try:
            seen = self._whole(args, kwargs, training)
        except (NeedsValues, LooksAtValue) as error:
            self._bodies.take_values(error)
            self._looked = error if isinstance(error, LooksAtValue) else None
            logger.info("dry run on values: %s", error)
            return self._on_values(args, kwargs, training)
        self._bodies.let_go()
        self._held = {}
        return seen

    def _on_values(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> DryRun:
        """Behind the last unit, where the last stage alone runs, the code may look at values."""
        seen = self._whole(args, kwargs, training)
        if self._looked is not None and any(at < len(seen.calls) for at, _ in self._looks):
            raise self._looked
        behind = (sources for at, sources in self._looks if at == len(seen.calls))
        return replace(seen, needs=seen.needs.union(*behind))

    def _look(self, sources: set[Source]) -> None:
        self._looks.append((len(self._calls), set(sources)))

    def _whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> DryRun:
        self._calls, self._given, self._looks = [], Given(), []
        self._where = self._bodies.place
        if self._bodies.on_values:
            self._give_values()
        for unit, (module, attributes) in self._set.items():
            put(module, {name: Stale(_told_stale(unit, name)) for name in attributes})
        put(self._shell, {name: Stale(told_replaced(name)) for name in self._replaced})
        self._shell.train(training)
        self._bodies.train(training)
        leaves, tree = flatten((args, dict(kwargs)))
        names = input_names(args, kwargs)
        given = [self._enter(i, leaf, names[i]) for i, leaf in enumerate(leaves)]
        positional, named = unflatten(tree, given)
        output, changed = self._run_shell(positional, named)
        return DryRun(
            inputs=_described_inputs((args, dict(kwargs)), leaves, names),
            calls=tuple(
                replace(call, written=self._given.written(i)) for i, call in enumerate(self._calls)
            ),
            needs=frozenset(sources_of(flatten(output)[0])),
            everywhere=frozenset(
                Source(SourceKind.INPUT, 0, i, names[i])
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and not leaf.is_floating_point()
            ),
            written=self._given.written(None),
            loss=_has_loss(output),
            changed=changed,
            draws=self._draws.seen,
            host_draws=self._host_draws.seen,
        )

    def _give_values(self) -> None:
        """Let copies stand in for what the opened modules hold: units will compute with them."""
        for (path, name), tensor in self._held.items():
            for registry in registries(self._opened[path]):
                absent = registry.get(name)
                if type(absent) is Absent:
                    absent.body = with_values(tensor, self._where)

    def _run_shell(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, frozenset[str]]:
        """The model's output, and which of the opened modules' tensors it wrote into."""
        with (
            torch.no_grad(),
            watched_hooks(self._refuse_hook),
            undrawn(self._where),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # what there is to warn of, comes again with values
            state, attributes = State(self._opened), Attributes(self._shell)
            self._draws, self._host_draws = GlueDraws(), HostDraws()
            told_of_looks.append(self._look)
            try:
                with self._draws:
                    output = self._shell(*args, **kwargs)
                self._replaced.update(state.replaced())
                self._host_draws.look()
                return output, state.written()
            finally:
                told_of_looks.remove(self._look)
                attributes.restore()  # for the next run, to which they may be none of those before

    def _enter(self, index: int, leaf: Any, name: str) -> Any:
        """An input as the model gets it: those that are not floating point have values."""
        if not isinstance(leaf, Tensor):
            return leaf
        floating = leaf.is_floating_point()
        if floating and not self._bodies.on_values:
            inner = on_meta(leaf)
        else:
            inner = leaf.detach().to(self._where, copy=True)
        if not floating:
            self._given.note(None, index, inner)
            return inner
        origin = Origin({Source(SourceKind.INPUT, 0, index, name)})
        self._given.note(None, index, inner, origin)
        return Absent(inner, self._where, origin)

    def _refuse_hook(self, what: str) -> None:
        if not self._inside:
            raise PartitionError(
                f"the code between the model's parts {what}, which several stages would do; do "
                "it within a module, or use an autograd.Function"
            )

    # --- one call of a unit ------------------------------------------------------------------

    def call(self, unit: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit on shapes, or on values, and note what it was given (see ``Play``)."""
        leaves, tree = flatten((args, kwargs))
        index = len(self._calls)
        states = [(leaf, tensors_in(leaf)) for leaf in leaves if is_opaque(leaf)]
        lowered = [self._bodies.lower(leaf) for leaf in leaves]
        versions = [x._version if isinstance(x, Tensor) else 0 for x in lowered]
        given = unflatten(tree, lowered)
        marked = mark()
        self.captures |= bool(marked)
        result, kept, changed, plain = self._run_unit(unit, given)
        refuse_filled(unit, states, given, lowered, tree)
        output = self._uncast(((result, capture_since(marked), kept),))
        writes = tuple(
            i for i, x in enumerate(lowered) if isinstance(x, Tensor) and x._version != versions[i]
        )
        self._calls.append(
            Recorded(
                unit=unit,
                needs=frozenset(sources_of(leaves)),
                output=_described(unit, output),
                writes=writes,
                changed=changed,
                drawn=next(draws),
                detached=self._bodies.trains(unit) and in_function_forward(),
            )
        )
        result, captured, kept = self._raise(index, unit, output)[0]
        for i in writes:
            self._note_written(index, unit, i, leaves[i])
        self._set_attributes(unit, run, kept, plain)
        replay(captured, marked)
        return result

    def _run_unit(
        self, unit: str, given: Any
    ) -> tuple[Any, dict[str, Any], tuple[str, ...], list[str]]:
        """A unit's result; what it keeps, all that it changes, what of that is no tensor."""
        args, kwargs = given
        with self._bodies.of(unit) as module:
            attributes = Attributes(module)
            try:
                self._inside = True
                self._draws.leave()
                self._host_draws.look()
                result = self._bodies.run(unit, module, args, kwargs)
                filled, kept, plain = attributes.filled(), attributes.changed(), attributes.plain()
                changed = (*attributes.buffers(), *kept, *plain)
            finally:
                self._host_draws.skip()
                self._draws.again()
                self._inside = False
                attributes.restore()
        if filled:
            raise PartitionError(
                f"{unit} puts tensors into its attribute {filled[0]}, a container that others may "
                "hold too, on other stages, where they would not see it; have it return them, or "
                "assign a new container"
            )
        return result, kept, changed, plain

    def _uncast(self, output: Any) -> Any:
        """What units that ran under autocast return, as all others do."""
        if not self._bodies.casts:
            return output
        return map_tensors(on_meta, output)

    def _set_attributes(
        self, unit: str, run: nn.Module, kept: dict[str, Any], plain: list[str]
    ) -> None:
        """Set what the unit keeps; what is no tensor does not cross, and may not be looked at."""
        put(run, kept)
        put(run, {name: Stale(_told_stale(unit, name)) for name in plain})
        if kept or plain:
            self._set.setdefault(unit, (run, set()))[1].update(kept, plain)

    def _note_written(self, index: int, unit: str, argument: int, tensor: Tensor) -> None:
        """A unit wrote into what it was given: that is of its making too from now on."""
        source = Source(SourceKind.WRITTEN, index, argument, unit)
        if type(tensor) is Absent:
            tensor.origin.sources.add(source)
            tensor.origin.written = True
        elif not turn_absent(tensor, {source}, not self._bodies.on_values):
            raise PartitionError(
                f"{unit} writes into the tensor that it is called with (argument {argument}), "
                "which shares its memory with others, of whom some may be on other stages; have "
                "it return a new tensor instead"
            )

    def _raise(self, index: int, unit: str, output: Any) -> Any:
        leaves, tree = flatten(output)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                origin = Origin({Source(SourceKind.OUTPUT, index, i, unit)})
                self._given.note(index, i, leaf, origin)
                leaves[i] = Absent(leaf, self._where, origin)
        return unflatten(tree, leaves)


def input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The leaves of a model's arguments as users know them: ``argument 0``, ``labels``."""
    paths = flatten((args, dict(kwargs)))[1].paths()
    return [
        ".".join(map(str, path[1:])) if path[0] == 1 else f"argument {path[1]}" for path in paths
    ]


def _told_stale(unit: str, name: str) -> str:
    return (
        f"the code between the model's parts reads {unit}.{name}, which {unit} sets when it is "
        "called: on other stages that would be an older value, or none; have the module return "
        "it, or keep its users in one module"
    )


def _described_inputs(call: Any, leaves: Sequence[Any], names: Sequence[str]) -> BoundarySpec:
    try:
        return describe((call,))
    except BoundaryError as error:
        for leaf, name in zip(leaves, names, strict=True):
            if hides_tensors(leaf):
                raise PartitionError(told_of_object(name, leaf)) from error
        raise


def _described(unit: str, output: Any) -> BoundarySpec:
    try:
        return describe(output)
    except BoundaryError as error:
        raise PartitionError(
            f"{unit} returns what can't be told to other stages: {error}; cut the model by other "
            "modules, so that this stays within one"
        ) from error


def _has_loss(output: Any) -> bool:
    loss = own_loss(output)
    return isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
