"""Run a model for measurement: on its own state, observed by leaf module, timed.

    segments  │ embed │ layer 0 │ layer 1 │ head   │    from the first call of a leaf module to the
                                                        next one's: what runs between counts before
    F         │ embed │ layer 0 │ layer 1 │ head   │    a stamp where a segment begins
    I         │ head  │ layer 1 │ layer 0 │ embed  │    ... and where a gradient reaches its output
    W         │ head  │ layer 1 │ layer 0 │ embed  │    ... and where its weight gradients come

F is measured on the plain model; I and W on a stage that defers its weight gradients. The model
runs on parameters that share its memory, which leaves its gradients and hooks untouched, and on
copies of its buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock._torch_compat import (
    around_compiled,
    buffers_of,
    parameters_of,
    saved_through,
)
from penstock.errors import PartitionError
from penstock.partition.blocks import LeafModule
from penstock.partition.forward.module_state import ModuleSnapshot
from penstock.partition.plan import abbreviate
from penstock.partition.spec import Example, as_call, describe, own_loss
from penstock.stage.pytree import as_args, flatten, tensors_of
from penstock.stage.weight_grad import (
    CannotDeferError,
    DeferredGrads,
    compiled_parts,
    find_undeferred,
)
from penstock.stage.weight_grad.accumulate import accumulate

__all__ = ["Chained", "ProfileRun", "ProfiledModel", "Times", "measure_times", "run_profiled"]

T = TypeVar("T")
Times: TypeAlias = tuple[float, ...]
"""Seconds per segment."""


class ProfiledModel:
    """A model with an example, and separate state to run on.

    Args:
        model: the model.
        leaves: its leaf modules.
        example: one microbatch.
        loss_fn: a function from the output to the loss; None for the output's own.

    Raises:
        PartitionError: the model is on the meta device.
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
        """Call ``run``, which runs forward and backward, with the model on ``state``.

        The backward must run inside, since checkpointing recomputes forwards.
        """
        state = {f"model.{name}": value for name, value in self.state.items()}
        found: T = functional_call(_Running(self.model), state, (run,), tie_weights=False)
        return found

    @contextmanager
    def attributes_restored(self) -> Iterator[None]:
        """Restore the attributes of all modules at exit.

        Attributes may hold ``state``: recurrent layers have a list of their weights.
        """
        snapshot = ModuleSnapshot(self.model)
        snapshot.hold()
        try:
            yield
        finally:
            snapshot.restore()

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run the model, within ``on_own_state``; return the roots of the backward, and their
        gradients."""
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

    A shared layer is one place, and must have only one name: with several names,
    ``functional_call`` would finally restore the replacement instead of the original.
    """
    ours: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():  # each module once
        prefix = f"{path}." if path else ""
        for name, param in parameters_of(module).items():
            if param is not None:
                twin = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                state[prefix + name] = ours.setdefault(id(param), twin)
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                state[prefix + name] = ours.setdefault(id(buffer), buffer.detach().clone())
    return state


class Chained(nn.Module):
    """Stages in sequence, each called with the previous output.

    Args:
        stages: the stages; a stage may occur several times.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for i, stage in enumerate(stages):
            self.add_module(str(i), stage)
        self._stages = tuple(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; keyword arguments go to the first."""
        output = self._stages[0](*args, **kwargs)
        for stage in self._stages[1:]:
            output = stage(*as_args(output))
        return output


# --- segments -----------------------------------------------------------------------------------

OnSegment: TypeAlias = Callable[[int, Any], None]


def _ignore(segment: int, value: Any) -> None:
    """A callback that does nothing."""


class _SegmentWatch:
    """Call back at the first call of each leaf module in one forward.

    Args:
        leaves: the leaf modules.
        enter: called with the segment's number and ``(args, kwargs)`` before the call.
        leave: called with the segment's number and the output after the call.

    Attributes:
        order: the names of the leaf modules whose segments have begun.
    """

    def __init__(
        self,
        leaves: Sequence[LeafModule],
        *,
        enter: OnSegment = _ignore,
        leave: OnSegment = _ignore,
    ) -> None:
        self.order: list[str] = []
        self._enter, self._leave = enter, leave
        self._names: dict[int, list[str]] = {}
        for leaf in leaves:
            self._names.setdefault(id(leaf.module), []).append(leaf.name)
        self._modules = list({id(leaf.module): leaf.module for leaf in leaves}.values())
        self._calls: list[int | None] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls in this block."""
        with ExitStack() as around:
            for module in self._modules:
                # torch.compile would compile the hooks of a module that is compiled in place.
                if around.enter_context(around_compiled(module, self._before, self._after)):
                    continue
                hook = module.register_forward_pre_hook(self._before, with_kwargs=True)
                around.callback(hook.remove)
                around.callback(module.register_forward_hook(self._after).remove)
            yield

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A layer with several places is called by its names in turn.
        names = self._names[id(module)]
        if not names:
            self._calls.append(None)
            return
        self._calls.append(len(self.order))
        self.order.append(names.pop(0))
        self._enter(len(self.order) - 1, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        if call is not None:
            self._leave(call, output)


# --- one run without a clock --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileRun:
    """The results of one untimed run of a model.

    Args:
        order: the names of the leaf modules that run, by first call.
        kept_bytes: per segment, the bytes that autograd saves for the backward.
        outputs: per segment, descriptions of its leaf module's output tensors.
        output_bytes: per segment, the bytes of its leaf module's output tensors.
        undeferred: the parameters whose gradients are computed in I; None if none can be deferred.
    """

    order: tuple[str, ...]
    kept_bytes: tuple[int, ...]
    outputs: tuple[tuple[str, ...], ...]
    output_bytes: tuple[int, ...]
    undeferred: tuple[nn.Parameter, ...] | None


def run_profiled(profiled: ProfiledModel) -> ProfileRun:
    """Run the model once; record its leaf modules and the memory that autograd saves for each."""
    own = {
        _memory_of(tensor)
        for tensor in (*profiled.state.values(), *tensors_of((profiled.args, profiled.kwargs)))
    }
    kept: list[dict[int, int]] = [{}]
    outputs: dict[int, list[Tensor]] = {}

    def enter(segment: int, _: Any) -> None:
        if segment:  # tensors saved before the first segment count as its own
            kept.append({})

    def leave(segment: int, output: Any) -> None:
        outputs[segment] = list(tensors_of(output))

    def keep(tensor: Tensor) -> Tensor:
        if _memory_of(tensor) not in own:
            kept[-1][_memory_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    watch = _SegmentWatch(profiled.leaves, enter=enter, leave=leave)
    refused = PartitionError(
        "the model differentiates by torch.func (grad, vjp, hessian, ...), under which torch "
        "refuses hooks on saved tensors, so it can't be measured; pass split= as counts or names, "
        "and name a schedule"
    )
    with watch.watching(), saved_through(keep, lambda tensor: tensor, refused):
        profiled.forward()
    if not watch.order:
        raise PartitionError(
            f"a run of the {type(profiled.model).__name__} calls none of "
            f"{abbreviate([leaf.name for leaf in profiled.leaves])}; pass a list of modules, its "
            "blocks"
        )
    segments = [outputs.get(i, []) for i in range(len(watch.order))]
    return ProfileRun(
        order=tuple(watch.order),
        kept_bytes=tuple(sum(each.values()) for each in kept),
        outputs=tuple(tuple(map(describe, tensors)) for tensors in segments),
        output_bytes=tuple(sum(t.numel() * t.element_size() for t in each) for each in segments),
        undeferred=_undeferred(profiled),
    )


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _undeferred(profiled: ProfiledModel) -> tuple[nn.Parameter, ...] | None:
    work = DeferredGrads((), compiled_parts(profiled.model))
    try:
        with work:
            roots, grads = profiled.forward()
        found = find_undeferred(roots, profiled.parameters)
        with work:
            torch.autograd.backward(roots, grads)
        work.accumulate()
    except CannotDeferError:
        return None
    return tuple(found)


# --- timed runs ---------------------------------------------------------------------------------


def measure_times(profiled: ProfiledModel, run: ProfileRun) -> tuple[Times, Times, Times]:
    """Measure the time of each segment's F, I and W, within ``on_own_state``."""
    forward, order = _time_forward(profiled)
    if order != run.order:
        raise PartitionError(
            f"the {type(profiled.model).__name__} runs {len(order)} blocks where it ran "
            f"{len(run.order)} before; switch off what drops layers at random, or call eval()"
        )
    if run.undeferred is not None:
        return forward, *_time_split_backward(profiled, run.undeferred)
    arrivals = Arrivals(profiled)
    with _SegmentWatch(profiled.leaves, enter=arrivals.enter, leave=arrivals.leave).watching():
        roots, grads = profiled.forward()
    return forward, arrivals.backward(roots, grads), (0.0,) * len(order)


def _time_forward(profiled: ProfiledModel) -> tuple[Times, tuple[str, ...]]:
    """The time of each segment of a forward, and the order of segments."""
    stamps: list[float] = []
    watch = _SegmentWatch(profiled.leaves, enter=lambda *_: stamps.append(profiled.stamp()))
    with watch.watching():
        start = profiled.stamp()
        profiled.forward()
        end = profiled.stamp()
    return tuple(b - a for a, b in pairwise([start, *stamps[1:], end])), tuple(watch.order)


def _time_split_backward(
    profiled: ProfiledModel, undeferred: Sequence[nn.Parameter]
) -> tuple[Times, Times]:
    """The times of each segment's I and W."""
    arrivals = Arrivals(profiled)
    work = DeferredGrads(undeferred, compiled_parts(profiled.model))
    begins: list[int] = []

    def enter(segment: int, given: Any) -> None:
        arrivals.enter(segment, given)
        begins.append(len(work.records))

    with work, _SegmentWatch(profiled.leaves, enter=enter, leave=arrivals.leave).watching():
        roots, grads = profiled.forward()
    with work:
        input_times = arrivals.backward(roots, grads)
    records = work.records
    weight_times = []
    for begin, end in reversed(list(pairwise([0, *begins[1:], len(records)]))):
        part = [record for record in records[begin:end] if record and record[5]]
        start = profiled.stamp()
        accumulate(part)
        weight_times.append(profiled.stamp() - start)
    return input_times, tuple(reversed(weight_times))


class Arrivals:
    """The times at which gradients reach the outputs of segments, where the segments' backwards
    begin.

    Args:
        clock: the profiled model, or another object with ``stamp``.
    """

    def __init__(self, clock: ProfiledModel) -> None:
        self._clock = clock
        self._num_segments = 0
        self._arrived: dict[int, float] = {}

    def enter(self, segment: int, _: Any) -> None:
        """Do nothing when a segment begins."""
        self._num_segments = segment + 1

    def leave(self, segment: int, output: Any) -> None:
        """Register a hook on the output that a leaf module returned."""
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._arrive(segment))  # type: ignore[no-untyped-call]

    def _arrive(self, segment: int) -> None:
        if segment not in self._arrived:
            self._arrived[segment] = self._clock.stamp()

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> Times:
        """Run the backward; return the time of each segment's.

        The time before the first arrival belongs to the loss, and counts with the last segment.
        """
        times = [0.0] * self._num_segments
        self._arrived.clear()  # arrivals of gradients taken within the forward
        current, last = self._num_segments - 1, self._clock.stamp()
        torch.autograd.backward(list(roots), list(grads))
        end = self._clock.stamp()
        for segment, stamp in self._arrived.items():
            times[current] += stamp - last
            current, last = segment, stamp
        times[current] += end - last
        return tuple(times)
