"""Run a model for measurement: on its own state, observed by leaf module, timed.

    segments  │ embed │ layer 0 │ layer 1 │ head   │    from the first call of a leaf module to the
                                                        next one's: what runs between counts before
    F         │ embed │ layer 0 │ layer 1 │ head   │    a stamp where a segment begins
    B, I      │ head  │ layer 1 │ layer 0 │ embed  │    ... and where a gradient reaches its output
    W         │ head  │ layer 1 │ layer 0 │ embed  │    ... and where its weight gradients come

F and B are measured on the plain model; F, I and W on a model that defers its weight gradients,
where F takes a little longer. The model runs on parameters that share its memory, so that its
gradients and hooks stay untouched, and on copies of its buffers.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from penstock._torch_compat import CompiledCall, TorchDispatchMode, is_compiled_in_place, registries
from penstock.errors import PartitionError
from penstock.partition.blocks import LeafModule
from penstock.partition.plan import abbreviate
from penstock.partition.spec import Example, as_call, own_loss
from penstock.stage.boundary import shape_text
from penstock.stage.pytree import flatten, tensors_of
from penstock.stage.rng import preserve_rng_state
from penstock.stage.weight_grad import (
    CannotDeferError,
    DeferredGrads,
    compiled_parts,
    find_undeferred,
)
from penstock.stage.weight_grad.accumulate import accumulate

__all__ = [
    "ObservedPass", "ProfileRun", "ProfiledModel", "Sent", "Times",
    "measure_memory", "measure_times", "run_profiled", "sent_of",
]  # fmt: skip

T = TypeVar("T")
Times: TypeAlias = tuple[float, ...]
"""Seconds per segment."""
Sent: TypeAlias = tuple[int, tuple[str, ...]]
"""The bytes of tensors that are sent, and their descriptions."""


def sent_of(tensors: Sequence[Tensor]) -> Sent:
    """The bytes and descriptions of tensors."""
    return sum(tensor.nbytes for tensor in tensors), tuple(map(shape_text, tensors))


class ProfiledModel:
    """A model with its leaf modules, an example, and separate state to run on.

    ``loss_fn`` is a function from the output to the loss; None for the output's own.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[LeafModule],
        example: Example,
        loss_fn: Callable[[Any], Tensor] | None,
    ) -> None:
        self.model, self.leaves = model, leaves
        self.args, self.kwargs = as_call(example)
        self.state = _state_of(model)
        self.device = next(iter(self.state.values()), torch.empty(0)).device
        self._loss_fn = loss_fn
        if self.device.type == "meta":
            raise PartitionError(
                "the model is on the meta device, where nothing can be measured; materialize it, "
                "or measure a smaller one of its kind"
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the model runs on, without duplicates."""
        params = (each for each in self.state.values() if isinstance(each, nn.Parameter))
        return list({id(param): param for param in params}.values())

    def on_own_state(self, run: Callable[[], T]) -> T:
        """Call ``run`` with the model on ``state``; preserve the random number generators.

        ``run`` runs forward and backward, since checkpointing recomputes forwards in the backward.
        """
        state = {f"model.{name}": value for name, value in self.state.items()}
        with preserve_rng_state(self.device), torch.enable_grad():
            found: T = functional_call(_Running(self.model), state, (run,), tie_weights=False)
        return found

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run the model; return the roots of the backward, and their gradients."""
        output = self.model(*self.args, **self.kwargs)
        loss = (self._loss_fn or own_loss)(output)
        has_loss = self._loss_fn is not None or isinstance(loss, Tensor)
        found = [loss] if has_loss else flatten(output)[0]
        roots = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not roots:
            raise PartitionError(
                f"the output of the {type(self.model).__name__} takes no gradient, so there is no "
                "backward to measure; unfreeze parameters, or pass loss_fn"
            )
        return roots, [torch.ones_like(root) for root in roots]

    def stamp(self) -> float:
        """The time, after synchronizing the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class _Running(nn.Module):
    """A model as a function call, so that ``functional_call`` also covers the backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """The replacement of each tensor of ``model``, under one name per place.

    ``functional_call`` would leave a replacement in a shared layer that it meets under two names.
    """
    ours: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():  # each module once
        prefix = f"{path}." if path else ""
        params, buffers = registries(module)
        for name, param in params.items():
            if param is not None:
                twin = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                state[prefix + name] = ours.setdefault(id(param), twin)
        for name, buffer in buffers.items():
            if buffer is not None:
                state[prefix + name] = ours.setdefault(id(buffer), buffer.detach().clone())
    return state


class ObservedPass:
    """One forward and backward of a profiled model, observed by segment.

    ``mark`` is called where a segment begins. A forward with other segments than ``run`` raises.

    Attributes:
        order: the names of the leaf modules whose segments have begun.
        marks: per segment, the result of ``mark``.
        outputs: per segment, the output tensors of its leaf module, if ``keeps_outputs``.
        spans: of the last forward or backward, in order: a segment, and the clock before and after.
    """

    def __init__(
        self,
        profiled: ProfiledModel,
        run: ProfileRun | None = None,
        mark: Callable[[], Any] = lambda: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._run, self.order = run, list[str]()
        self.marks: list[Any] = []
        self.outputs: dict[int, list[Tensor]] = {}
        self.keeps_outputs = False
        self._profiled = profiled
        self.spans: list[tuple[int, float, float]] = []
        self._mark, self._clock = mark, clock or profiled.stamp
        self._begun: list[float] = []
        self._names: dict[nn.Module, list[str]] = {}
        for leaf in profiled.leaves:
            self._names.setdefault(leaf.module, []).append(leaf.name)
        self._calls: list[int | None] = []
        self._arrivals: dict[int, float] = {}

    def forward(self) -> Times:
        """Run the forward, within ``on_own_state``; return the time of each segment's.

        It draws the same random numbers each time, on which a router of experts may depend.
        """
        with self._watching(), preserve_rng_state(self._profiled.device):
            begin = self._clock()
            self.roots, self._grads = self._profiled.forward()
            stamps = [begin, *self._begun[1:], self._clock()]
        if self._run is not None and tuple(self.order) != self._run.order:
            raise PartitionError(
                f"the {type(self._profiled.model).__name__} runs {len(self.order)} blocks where it "
                f"ran {len(self._run.order)} before; switch off what drops layers at random, or "
                "call eval()"
            )
        spans = zip(range(len(self.order)), pairwise(stamps), strict=False)
        self.spans = [(segment, *between) for segment, between in spans]
        return self._times()

    def backward(self) -> Times:
        """Run the backward; return the time of each segment's.

        A segment's backward begins when a gradient reaches its output. The time before the first
        one belongs to the loss, and counts with the last segment.
        """
        self._arrivals.clear()  # of gradients taken within the forward
        current, begin = len(self.order) - 1, self._clock()
        torch.autograd.backward(self.roots, self._grads)
        arrivals = [*self._arrivals.items(), (current, self._clock())]
        self.spans = []
        for segment, stamp in arrivals:
            self.spans.append((current, begin, stamp))
            current, begin = segment, stamp
        return self._times()

    def _times(self) -> Times:
        times = [0.0] * len(self.order)
        for segment, begin, end in self.spans:
            times[segment] += end - begin
        return tuple(times)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as around:
            for module in self._names:
                # torch.compile would compile the hooks of a module that is compiled in place.
                if is_compiled_in_place(module):
                    call = CompiledCall(module, partial(self._run_compiled, module))
                    call.replace()
                    around.callback(call.restore)
                    continue
                hook = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                around.callback(hook.remove)
                around.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _run_compiled(self, module: nn.Module, compiled: Any, args: Any, kwargs: Any) -> Any:
        self._enter(module, args, kwargs)
        output = compiled(*args, **kwargs)
        self._leave(module, args, output)
        return output

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A layer with several places is called by its names in turn; later calls begin nothing.
        names = self._names[module]
        self._calls.append(len(self.order) if names else None)
        if names:
            self.order.append(names.pop(0))
            self.marks.append(self._mark())
            self._begun.append(self._clock())

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        segment = self._calls.pop()
        if segment is None:
            return
        tensors = list(tensors_of(output))
        # Without a reference to this pass, which would keep the graph until the garbage collection.
        arrivals, clock = self._arrivals, self._clock

        def arrive(grad: Tensor) -> None:  # the first gradient counts
            arrivals.setdefault(segment, clock())

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(arrive)  # type: ignore[no-untyped-call]
        if self.keeps_outputs:
            self.outputs[segment] = tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileRun:
    """The results of one untimed run of a model, by segment."""

    order: tuple[str, ...]  # the names of the leaf modules that run, by first call
    kept_bytes: tuple[int, ...]  # saved by autograd for the backward
    outputs: tuple[Sent, ...]  # the leaf module's output tensors
    # The parameters whose gradients are computed in I; None if none can be deferred.
    undeferred: tuple[nn.Parameter, ...] | None


def run_profiled(profiled: ProfiledModel) -> ProfileRun:
    """Run the model once; record its leaf modules and the memory that autograd saves for each."""
    given = (*profiled.state.values(), *tensors_of((profiled.args, profiled.kwargs)))
    not_kept = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, dict[int, int]] = defaultdict(dict)
    observed = ObservedPass(profiled)
    observed.keeps_outputs = True

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_kept:
            # Tensors saved before the first segment count as its own.
            segment = max(len(observed.order) - 1, 0)
            kept[segment][storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        observed.forward()
    if not observed.order:
        raise PartitionError(
            f"a run of the {type(profiled.model).__name__} calls none of "
            f"{abbreviate([leaf.name for leaf in profiled.leaves])}; pass a list of modules, its "
            "blocks"
        )
    segments = range(len(observed.order))
    return ProfileRun(
        order=tuple(observed.order),
        kept_bytes=tuple(sum(kept[i].values()) for i in segments),
        outputs=tuple(sent_of(observed.outputs.get(i, [])) for i in segments),
        undeferred=_undeferred(profiled),
    )


def _undeferred(profiled: ProfiledModel) -> tuple[nn.Parameter, ...] | None:
    observed, work = ObservedPass(profiled), DeferredGrads((), compiled_parts(profiled.model))
    try:
        with work:
            observed.forward()
        found = find_undeferred(observed.roots)
        with work:
            observed.backward()
        work.accumulate()
    except CannotDeferError:
        return None
    return tuple(found)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations make, while they live.

    Attributes:
        laps: at each call of ``lap`` the bytes, and their peak since the call before.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.laps: list[tuple[int, int]] = []
        self._live = self._peak = 0
        self._known = {t.untyped_storage().data_ptr() for t in known if t.layout is torch.strided}
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_of(made):
            with suppress(NotImplementedError, RuntimeError):  # no storage of its own
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._known and place not in self._storages:
            self._storages[place] = weakref.ref(storage, partial(self._free, place, size))
            self._live += size
            self._peak = max(self._peak, self._live)

    def _free(self, place: int, size: int, storage: object) -> None:
        del self._storages[place]
        self._live -= size

    def lap(self) -> float:
        """Begin a lap; returns its number."""
        self.laps.append((self._live, self._peak))
        self._peak = self._live
        return len(self.laps) - 1.0


def measure_memory(
    profiled: ProfiledModel, run: ProfileRun
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By segment, within ``on_own_state``, the most bytes that F or B holds beyond the activation,
    and those held from I to W: none, and all, for compiled models, whose operations are not seen.
    """
    state, params = profiled.state.values(), profiled.parameters
    grads = [param.grad for param in params if param.grad is not None]
    counted = _LiveBytes([*state, *grads, *tensors_of((profiled.args, profiled.kwargs))])
    observed = ObservedPass(profiled, run, clock=counted.lap)
    if compiled_parts(profiled.model):
        return (0,) * len(run.order), run.kept_bytes
    most: dict[int, int] = {}
    for go, holds_after in ((observed.forward, True), (observed.backward, False)):
        with counted:
            go()
        for segment, begin, end in observed.spans:
            laps = counted.laps[int(begin) : int(end) + 1]
            held = laps[-1 if holds_after else 0][0]
            peak = max(peak for _, peak in laps[1:])
            most[segment] = max(most.get(segment, 0), peak - held)
    temporaries = tuple(most.get(i, 0) for i in range(len(observed.order)))
    if run.undeferred is None:
        return temporaries, run.kept_bytes
    work = DeferredGrads(run.undeferred, ())
    observed = ObservedPass(profiled, run, clock=counted.lap)
    held_to_w = [0] * len(run.order)
    for go in (observed.forward, observed.backward):
        with counted, work:
            go()
        for segment, begin, end in observed.spans:
            held_to_w[segment] += counted.laps[int(end)][0] - counted.laps[int(begin)][0]
    work.accumulate()
    for i, (size, _) in enumerate(run.outputs[:-1]):
        # The gradient between two segments was made in the later one, and freed in the earlier.
        held_to_w[i] += size
        held_to_w[i + 1] -= size
    return temporaries, tuple(max(0, held) for held in held_to_w)


def measure_times(profiled: ProfiledModel, run: ProfileRun) -> tuple[Times, ...]:
    """Measure each segment's F and B, and F, I and W of a split backward, within
    ``on_own_state``."""
    observed = ObservedPass(profiled, run)
    forward, backward = observed.forward(), observed.backward()
    if run.undeferred is None:
        return forward, backward, forward, backward, (0.0,) * len(run.order)
    del observed
    return forward, backward, *_time_split_backward(profiled, run, run.undeferred)


def _time_split_backward(
    profiled: ProfiledModel, run: ProfileRun, undeferred: Sequence[nn.Parameter]
) -> tuple[Times, Times, Times]:
    """The times of each segment's F, I and W."""
    work = DeferredGrads(undeferred, compiled_parts(profiled.model))
    observed = ObservedPass(profiled, run, mark=lambda: len(work.records))
    with work:
        forward_times = observed.forward()
    with work:
        input_times = observed.backward()
    weight_times = []
    for begin, end in reversed(list(pairwise([0, *observed.marks[1:], len(work.records)]))):
        part = [record for record in work.records[begin:end] if record and record[5]]
        start = profiled.stamp()
        accumulate(part)
        weight_times.append(profiled.stamp() - start)
    return forward_times, input_times, tuple(reversed(weight_times))
