"""Run a model once without values, to see which parts it calls, and what each of them needs.

The model's own forward runs; its parts run on the meta device, where only shapes are computed, on
copies without values. A part that needs values (a mixture of experts that looks where its tokens
go) can't run so: then the whole model is run once on values, if it has any. Nothing of the model
changes, and no random number is drawn. This module does not know where the model is cut.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.errors import BoundaryError, PartitionError
from penstock.partition.absent import (
    Absent,
    Kind,
    Origin,
    Source,
    on_meta,
    sources_of,
    turn_absent,
)
from penstock.partition.crossings import DryRun, Recorded
from penstock.partition.glue_draws import GlueDraws
from penstock.partition.huggingface import capture_since, collector, mark
from penstock.partition.shell import build_shell, skeleton
from penstock.partition.side_writes import Attributes, State, put, tensors_in
from penstock.partition.torch_private import as_fake, autocast_state, fake_mode, watched_hooks
from penstock.partition.units import Units
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.trees import NAMESPACE, flatten

__all__ = ["DryRunner", "input_names"]

logger = logging.getLogger(__name__)


class NeedsValues(Exception):  # no error of anybody's: the dry run starts again
    """A part can't run without values."""


class DryRunner:
    """Runs one model dry.

    Args:
        model: the plain model, on any device.
        parts: its units.
        device: where the stages will live.

    Attributes:
        captures: whether a model collected what its parts compute (see ``huggingface``).
    """

    def __init__(self, model: nn.Module, parts: Units, device: torch.device) -> None:
        self._device = device
        self._shell = build_shell(model, parts, (), self, device)
        self._opened = {name: self._shell.get_submodule(name) for name in parts.opened}
        for module in self._opened.values():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):  # the model's own: nobody shall write into that
                    vars(module)[name] = value.detach().clone()
        self._bare = {name: skeleton(unit) for name, unit in parts.units.items()}
        # Held until it is known that no dry run needs values: a rank may drop the rest.
        self._units: Mapping[str, nn.Module] | None = parts.units
        self._where = device
        self._on_values = False
        self._inside = False
        self._draws = GlueDraws()
        # Under autocast, units run on copies of these kinds, which it casts; made when needed.
        self._mode: Any = None
        self._fakes: dict[str, nn.Module] = {}
        self.captures = False
        self._calls: list[Recorded] = []
        # Tensors that were handed out: by which call (None: inputs), which leaf, version then.
        self._given: list[tuple[int | None, int, Tensor, int]] = []
        # Likewise those that went out as absent ones.
        self._absent: list[tuple[int | None, int, Origin]] = []

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> DryRun:
        """Run the model once.

        Args:
            args: its positional arguments, one microbatch.
            kwargs: its keyword arguments, likewise.
            training: in which mode.

        Raises:
            PartitionError: it can't be run so.
        """
        if self._on_values:
            return self._whole(args, kwargs, training)
        try:
            seen = self._whole(args, kwargs, training)
        except NeedsValues as error:
            self._refuse_without_values(error)
            logger.info("dry run on values: %s", error)
            self._on_values = True
            return self._whole(args, kwargs, training)
        self._units = None
        return seen

    def _refuse_without_values(self, error: NeedsValues) -> None:
        units = self._units
        if units is None or any(p.is_meta for unit in units.values() for p in unit.parameters()):
            raise PartitionError(
                f"{error}; the model has to be run once on values for that, but has none here: "
                "build it on a device other than meta, and pass an example"
            ) from error

    def _whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> DryRun:
        self._calls, self._given, self._absent = [], [], []
        self._where = self._values_at() if self._on_values else self._device
        inputs = describe(((args, dict(kwargs)),))
        leaves, tree = flatten((args, dict(kwargs)))
        names = input_names(args, kwargs)
        given = [self._enter(i, leaf, names[i]) for i, leaf in enumerate(leaves)]
        for module in (self._shell, *self._bare.values()):
            module.train(training)
        with (
            torch.no_grad(),
            watched_hooks(self._refuse_hook),
            _same_random_state(self._where),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # what there is to warn of, comes again with values
            positional, named = optree.tree_unflatten(tree, given)
            state = State(self._opened)
            self._draws = GlueDraws()
            with self._draws:
                output = self._shell(*positional, **named)
            changed = state.written()
        written: dict[int | None, list[int]] = {}
        for at, leaf, tensor, version in self._given:
            if tensor._version != version:
                written.setdefault(at, []).append(leaf)
        for at, leaf, origin in self._absent:
            if origin.written and leaf not in written.get(at, ()):
                written.setdefault(at, []).append(leaf)
        return DryRun(
            inputs=inputs,
            calls=tuple(
                Recorded(
                    unit=call.unit,
                    needs=call.needs,
                    output=call.output,
                    written=tuple(written.get(i, ())),
                    writes=call.writes,
                    buffers=call.buffers,
                )
                for i, call in enumerate(self._calls)
            ),
            needs=frozenset(sources_of(flatten(output)[0])),
            everywhere=frozenset(
                Source(Kind.INPUT, 0, i, names[i])
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and not leaf.is_floating_point()
            ),
            written=tuple(written.get(None, ())),
            loss=_has_loss(output),
            changed=changed,
            draws=self._draws.seen,
        )

    def _values_at(self) -> torch.device:
        """Where the model's values are now: not yet where its stages will be."""
        units = (self._units or {}).values()
        return next((p.device for unit in units for p in unit.parameters()), self._device)

    def _enter(self, index: int, leaf: Any, name: str) -> Any:
        """An input as the model gets it: those that are not floating point have values."""
        if not isinstance(leaf, Tensor):
            return leaf
        floating = leaf.is_floating_point()
        if floating and not self._on_values:
            inner = on_meta(leaf)
        else:
            inner = leaf.detach().to(self._where, copy=True)
        self._given.append((None, index, inner, inner._version))
        if not floating:
            return inner
        origin = Origin({Source(Kind.INPUT, 0, index, name)})
        self._absent.append((None, index, origin))
        return Absent(inner, self._where, origin)

    def _refuse_hook(self, tensor: Tensor) -> None:
        if not self._inside:
            raise PartitionError(
                "the code between the model's parts registers a hook on a tensor, which several "
                "stages would run; register it within a module, or use an autograd.Function"
            )

    def call(self, unit: str, run: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit on shapes, or on values, and note what it was given (see ``Play``)."""
        leaves, tree = flatten((args, kwargs))
        needs = frozenset(sources_of(leaves))
        states = [(leaf, tensors_in(leaf)) for leaf in leaves if _is_opaque(leaf)]
        casts = not self._on_values and bool(autocast_state(self._device))
        lowered = [self._lower(leaf, casts) for leaf in leaves]
        versions = [x._version if isinstance(x, Tensor) else 0 for x in lowered]
        given = optree.tree_unflatten(tree, lowered)
        marked = mark()
        self.captures |= bool(marked)
        module = self._module(unit, casts)
        attributes = Attributes(module)
        try:
            self._inside = True
            self._draws.leave()
            result = self._run(unit, module, *given)
            filled, kept = attributes.filled(), attributes.changed()
            buffers = attributes.buffers()
        finally:
            self._draws.again()
            self._inside = False
            attributes.restore()
        _refuse_filled(unit, states, given, lowered, tree)
        if filled:
            raise PartitionError(
                f"{unit} puts tensors into its attribute {filled[0]}, a container that others may "
                "hold too, on other stages, where they would not see it; have it return them, or "
                "assign a new container"
            )
        output: Any = ((result, capture_since(marked), kept),)
        if casts:
            made, shape = flatten(output)
            output = optree.tree_unflatten(
                shape, [on_meta(x) if isinstance(x, Tensor) else x for x in made]
            )
        index = len(self._calls)
        writes = tuple(
            i for i, x in enumerate(lowered) if isinstance(x, Tensor) and x._version != versions[i]
        )
        described = _described(unit, output)
        self._calls.append(
            Recorded(unit=unit, needs=needs, output=described, writes=writes, buffers=buffers)
        )
        result, captured, kept = self._raise(index, unit, output)[0]
        for i in writes:
            self._note_written(index, unit, i, leaves[i])
        put(run, kept)
        for key, values in captured.items():
            lists = collector()
            if lists is not None and marked is not None:
                lists[key][marked[key] :] = values
        return result

    def _module(self, unit: str, casts: bool) -> nn.Module:
        """What is run in a unit's place."""
        if self._on_values:
            assert self._units is not None
            return self._units[unit]
        if not casts:
            return self._bare[unit]
        if unit not in self._fakes:
            self._mode = self._mode or fake_mode()
            made = self._fakes[unit] = skeleton(self._bare[unit])
            for module in made.modules():
                for registry in (module._parameters, module._buffers):
                    for name, tensor in registry.items():
                        if tensor is not None:
                            fake: Any = as_fake(self._mode, tensor, self._device)
                            registry[name] = fake
        return self._fakes[unit].train(self._bare[unit].training)

    def _note_written(self, index: int, unit: str, argument: int, tensor: Tensor) -> None:
        """A unit wrote into what it was given: that is of its making too from now on."""
        source = Source(Kind.WRITTEN, index, argument, unit)
        if type(tensor) is Absent:
            tensor.origin.sources.add(source)
            tensor.origin.written = True
        elif not turn_absent(tensor, {source}, not self._on_values):
            raise PartitionError(
                f"{unit} writes into the tensor that it is called with (argument {argument}), "
                "which shares its memory with others, of whom some may be on other stages; have "
                "it return a new tensor instead"
            )

    def _lower(self, leaf: Any, casts: bool) -> Any:
        body = leaf.body if type(leaf) is Absent else leaf
        if not isinstance(body, Tensor) or self._on_values:
            return body
        if casts:
            self._mode = self._mode or fake_mode()
            return as_fake(self._mode, on_meta(body), self._device)
        return body if type(leaf) is Absent else on_meta(body)

    def _run(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._on_values:
            buffers = {name: b.clone() for name, b in module.named_buffers()}
            return functional_call(module, buffers, args, kwargs)
        try:
            with nullcontext() if module is self._bare[unit] else self._mode:
                return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise NeedsValues(
                f"{unit} can't run on shapes alone ({type(error).__name__}: {said})"
            ) from error

    def _raise(self, index: int, unit: str, output: Any) -> Any:
        leaves, tree = flatten(output)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._given.append((index, i, leaf, leaf._version))
                origin = Origin({Source(Kind.OUTPUT, index, i, unit)})
                self._absent.append((index, i, origin))
                leaves[i] = Absent(leaf, self._where, origin)
        return optree.tree_unflatten(tree, leaves)


def input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The leaves of a model's arguments as users know them: ``argument 0``, ``labels``."""
    given: Any = (args, dict(kwargs))
    paths = optree.tree_paths(given, namespace=NAMESPACE)
    return [
        ".".join(map(str, path[1:])) if path[0] == 1 else f"argument {path[1]}" for path in paths
    ]


def _described(unit: str, output: Any) -> BoundarySpec:
    try:
        return describe(output)
    except BoundaryError as error:
        raise PartitionError(
            f"{unit} returns what can't be told to other stages: {error}; cut the model by other "
            "modules, so that this stays within one"
        ) from error


def _is_opaque(leaf: Any) -> bool:
    plain = isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf)
    return (hasattr(leaf, "__dict__") or isinstance(leaf, set)) and not plain


def _refuse_filled(
    unit: str, states: list[Any], given: Any, lowered: list[Any], tree: optree.PyTreeSpec
) -> None:
    """A unit may not write into the objects and containers that it was given."""
    for state, held in states:
        now = tensors_in(state)
        if len(now) != len(held) or any(a is not b for a, b in zip(now, held, strict=True)):
            raise PartitionError(
                f"{unit} writes tensors into the {type(state).__name__} that it is called "
                "with, which its other users, on other stages, would not see; leave it out "
                "(use_cache=False, for instance)"
            )
    leaves, shape = flatten(given)
    if shape != tree or any(a is not b for a, b in zip(leaves, lowered, strict=True)):
        raise PartitionError(
            f"{unit} writes into a list or dict that it is called with, which its other users, on "
            "other stages, would not see; have it return what it writes"
        )


def _has_loss(output: Any) -> bool:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()


@contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """The model may draw, as it does when it skips layers at random; nobody shall notice."""
    state = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(state)
