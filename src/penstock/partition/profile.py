"""Measure the costs of a model's blocks on the machine at hand.

    blocks.py            leaf modules, the modules that no cut goes through
    profiled_model.py    runs of the model: what each keeps for the backward, times of F, I and W
    forward/             a trace on shapes: the tensors that stages send

All measurements run the whole model, so that they include top-level code, and the modules' effects
on each other's caches.
"""

from __future__ import annotations

import copy
import logging
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PartitionError
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.blocks import LeafModule, gather, leaf_modules
from penstock.partition.forward.by_module import tensors_between
from penstock.partition.forward.module_state import ModuleSnapshot
from penstock.partition.profiled_model import (
    ProfiledModel,
    ProfileRun,
    Sent,
    Times,
    measure_memory,
    measure_times,
    run_profiled,
    sent_of,
)
from penstock.partition.sequential import is_sequence, layers_of
from penstock.partition.spec import Example
from penstock.stage.pytree import map_tensors, tensors_of

__all__ = ["measure_model", "profile"]

logger = logging.getLogger(__name__)


def profile(
    model: nn.Module | Sequence[nn.Module],
    example: Example,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    runs: int = 5,
) -> Profile:
    """Measure the costs of each block of a model per microbatch, on the model's device.

    Args:
        model: a model on one device, or a list of layers that serve as blocks. It runs in its
            current mode (training or evaluation).
        example: one microbatch: a tuple of positional arguments, a dict of keyword arguments, or
            the only tensor.
        loss_fn: a function from the model's output to the loss, counted with the last block. None
            for the output's ``loss`` if it has one, else the sum of all outputs.
        runs: the number of measurements, after one warm-up; the medians count, scaled up to the
            mean of whole runs.

    Returns:
        The costs of all blocks, in execution order. If the model can't be cut by module, a block's
        sent tensors are the outputs of its last module.

    Raises:
        PartitionError: the model has no blocks to cut between, runs none of its blocks, or its
            output does not require grad.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> costs = profile(model, torch.ones(3, 4), runs=1)
        >>> [block.modules for block in costs.blocks]
        [('0',), ('1',), ('2',)]
        >>> costs.blocks[0].parameter_bytes, costs.blocks[0].sends
        (160, ('float32[3,8]',))
    """
    if runs < 1:
        raise PartitionError(f"runs is {runs}, expected at least 1")
    name = type(model).__name__
    if isinstance(model, nn.Module):
        leaves = leaf_modules(model)
    else:
        layers = layers_of(model)
        leaves = tuple(LeafModule(name=n, module=m, trunk="") for n, m in layers.items())
        model = nn.Sequential(*layers.values())
    profiled = ProfiledModel(model, leaves, example, loss_fn)
    snapshot = ModuleSnapshot(model)
    try:
        run, medians, memory = _measure(profiled, runs)
    finally:
        snapshot.restore()
    blocks = gather(leaves, run.order)
    sent = _sent_by_block(profiled, run, blocks)
    held = {id(param) for leaf in leaves for param in leaf.module.parameters()}
    loose = [name for name, param in model.named_parameters() if id(param) not in held]
    return Profile(
        blocks=tuple(
            _costs_of(block, () if i else loose, run, medians, memory, sent[i])
            for i, block in enumerate(blocks)
        ),
        model=name,
    )


def _measure(
    profiled: ProfiledModel, runs: int
) -> tuple[ProfileRun, list[Times], tuple[tuple[int, ...], tuple[int, ...]]]:
    """One run without timing; the medians of ``measure_times`` over runs after a warm-up; and
    ``measure_memory``."""
    run = profiled.on_own_state(lambda: run_profiled(profiled))
    measured, above = list[tuple[Times, ...]](), None
    for _ in range(runs + 1):
        above = profiled.on_own_state(lambda: _hold_memory(profiled))
        measured.append(profiled.on_own_state(lambda: measure_times(profiled, run)))
    memory = profiled.on_own_state(lambda: measure_memory(profiled, run))
    del above
    return run, list(map(_median_times, zip(*measured[1:], strict=True))), memory


def _median_times(runs: Sequence[Times]) -> Times:
    """The medians by segment, scaled up to the mean of whole runs where that is more.

    A delay in another segment of each run is in no segment's median, but a step has many of them.
    """
    medians = tuple(map(statistics.median, zip(*runs, strict=True)))
    whole = sum(medians)
    scale = max(1.0, statistics.fmean(map(sum, runs)) / whole) if whole else 1.0
    return tuple(scale * median for median in medians)


def _hold_memory(profiled: ProfiledModel) -> object:
    """Free the memory of earlier forwards below a live one, which is returned.

    Within a training step, microbatches reuse memory. Without a live allocation above, as after a
    run, the C library returns memory to the system: page faults make a forward up to three times
    as slow.
    """
    if profiled.device.type != "cpu":
        return None
    return [profiled.forward() for _ in range(3)][-1]


def _sent_by_block(
    profiled: ProfiledModel, run: ProfileRun, blocks: Sequence[Sequence[LeafModule]]
) -> list[Sent]:
    """The tensors that cross the cut after each block, if cut by module.

    Where that is not possible, the outputs of the block's last module.
    """
    place = {name: segment for segment, name in enumerate(run.order)}
    last = [max(place[leaf.name] for leaf in b if leaf.name in place) for b in blocks[:-1]]
    sent = [run.outputs[i] for i in last]
    if not is_sequence(profiled.model):
        names = [[leaf.name for leaf in block] for block in blocks]
        example = profiled.kwargs or profiled.args
        between = tensors_between(profiled.model, names, example, profiled.device)
        for i, metas in enumerate(between or ()):
            sent[i] = sent_of([torch.empty(m.shape, dtype=m.dtype, device="meta") for m in metas])
    return [*sent, (0, ())]


def _costs_of(
    block: Sequence[LeafModule],
    loose: Sequence[str],
    run: ProfileRun,
    medians: Sequence[Times],
    memory: Sequence[Sequence[int]],
    sent: Sent,
) -> BlockCosts:
    names = [leaf.name for leaf in block]
    segments = [segment for segment, name in enumerate(run.order) if name in names]
    params = {id(p): p for leaf in block for p in leaf.module.parameters()}.values()
    forward_s, backward_s, deferring_s, input_grad_s, weight_grad_s = (
        sum(times[i] for i in segments) for times in medians
    )
    return BlockCosts(
        modules=(*loose, *names),
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        backward_s=backward_s,
        deferral_s=max(0.0, deferring_s - forward_s),
        activation_bytes=sum(run.kept_bytes[i] for i in segments),
        temporary_bytes=max(memory[0][i] for i in segments),
        weight_grad_bytes=sum(memory[1][i] for i in segments),
        parameters=sum(p.numel() for p in params),
        parameter_bytes=sum(param.nbytes for param in params),
        frozen_bytes=sum(param.nbytes for param in params if not param.requires_grad),
        sent_bytes=sent[0],
        sends=sent[1],
    )


# --- as Pipeline measures -----------------------------------------------------------------------


def measure_model(
    model: nn.Module | Sequence[nn.Module],
    example: Example,
    *,
    device: torch.device,
    loss_fn: Callable[..., Any] | None = None,
) -> Profile:
    """Measure a model as ``Pipeline`` receives it: on its stages' device, and with its loss.

    Args:
        model: the model, or a list of its layers; a model on another device is copied.
        example: one microbatch, on any device.
        device: the device to measure on.
        loss_fn: a function from output, or output and target, to a scalar or ``(scalar, metrics)``;
            counted with the last block. None for the model's own loss, if any.

    Raises:
        PartitionError: the model can't be measured.
    """
    loss = None if loss_fn is None else TargetlessLoss(loss_fn)
    modules = [model] if isinstance(model, nn.Module) else list(layers_of(model).values())
    tensors = (each for m in modules for each in (*m.parameters(), *m.buffers()))
    devices = {each.device.type for each in tensors}
    if not (devices <= {device.type} or "meta" in devices):
        modules = [module.to(device) for module in copy.deepcopy(modules)]
        model = modules[0] if isinstance(model, nn.Module) else modules
    # As in a step: lengths on the CPU stay there, beside tensors that are on the device.
    if {each.device.type for each in tensors_of(example)}.isdisjoint({device.type, "meta"}):
        example = map_tensors(lambda tensor: tensor.to(device), example)
    return profile(model, example, loss_fn=loss)


def _class_zero(shape: Sequence[int], output: Tensor) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=output.device)


TARGETS: tuple[Callable[[Tensor], tuple[Any, ...]], ...] = (
    lambda output: (),
    lambda output: (_class_zero(output.shape[:-1], output),),
    lambda output: (_class_zero((*output.shape[:1], *output.shape[2:]), output),),
    lambda output: (torch.zeros_like(output),),
    lambda output: (None,),
)
"""Targets to try: none; class 0 for each row or token; class 0 for each pixel (with classes along
the second dimension); zeros like the output; None."""


class TargetlessLoss:
    """A loss of the output alone, with the first of ``TARGETS`` that the loss function accepts.

    A loss over a large vocabulary takes as long as a layer or two, for any target. If the loss
    function accepts no target, the loss is omitted, and a log message says so. A module is copied,
    so that its buffers stay unchanged.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self._loss: Callable[[Any], Tensor] | None = None  # None before the first call

    def __call__(self, output: Any) -> Tensor:
        """The loss of an output; the sum of its tensors if no target fits."""
        self._loss = self._loss or self._first_accepted(output)
        return self._loss(output)

    def _with_target(self, target: Callable[[Tensor], tuple[Any, ...]], output: Any) -> Tensor:
        first = next(tensor for tensor in tensors_of(output) if tensor.requires_grad)
        loss = self._loss_fn(output, *target(first))
        found = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            raise TypeError(f"the loss function returned {type(loss).__name__}, expected a scalar")
        return found

    def _first_accepted(self, output: Any) -> Callable[[Any], Tensor]:
        for target in TARGETS:
            try:
                # Nested saved-tensor hooks, so that the profiler's own hooks see only one call.
                with warnings.catch_warnings(), saved_tensors_hooks(lambda t: t, lambda t: t):
                    warnings.simplefilter("error")  # such as broadcast shapes
                    self._with_target(target, output)
            except Exception as error:  # whatever the user's function raises on a wrong target
                logger.debug("a target for the loss was refused: %s", error)
            else:
                return partial(self._with_target, target)
        logger.warning(
            "the loss function takes none of the targets that were tried, so the last stage is "
            "measured without it; to count it, measure with penstock.profile(model, example, "
            "loss_fn=lambda output: ...), and pass the plan as split="
        )
        return lambda output: torch.stack(
            [tensor.sum() for tensor in tensors_of(output) if tensor.requires_grad]
        ).sum()
